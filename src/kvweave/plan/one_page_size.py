"""The scheme most engines use, for comparison: one padded page size for all groups.

A page there is one block of one layer, and all are equally large. Groups must have equally many layers, so the kinds
are split into groups of the smallest kind's count, the last filled up with layers that hold nothing. A state's page
cannot be cut, so the blocks of attention grow until they are as large: hundreds of tokens, where prefixes are shared
in whole blocks only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvweave.plan.group import Group
from kvweave.plan.plan import TYPICAL_TOKENS, Plan

BLOCK_STEP = 16
"""Engines enlarge a block in steps of this many tokens."""


@dataclass(frozen=True, slots=True)
class OnePageSize:
    """What the scheme would have cost for a sequence of `num_tokens`."""

    num_tokens: int
    page_bytes: int
    layers_per_group: int
    block_tokens: dict[str, int]
    bytes_per_sequence: int
    padding_share: float
    reuse_tokens: int
    """The steps in which prefixes are shared: where blocks of all groups with rows end."""


def one_page_size(plan: Plan, num_tokens: int = TYPICAL_TOKENS) -> OnePageSize:
    groups = [group for group in plan.groups if group.layers]
    if len({group.cache.reach for group in groups}) == 1:
        return _one_group(groups, num_tokens)
    states = max((_layer_page(g) for g in groups if not g.cache.reach.per_token), default=0)
    blocks = {g.tag: _grown(g, states) for g in groups}
    page = max(states, *(_rows_bytes(g, blocks[g.tag]) for g in groups))
    # where the page is a multiple of a group's, the block grows again instead of being padded
    blocks = {
        g.tag: blocks[g.tag] * (page // _rows_bytes(g, blocks[g.tag]))
        if _divides(g, blocks[g.tag], page)
        else blocks[g.tag]
        for g in groups
    }
    counts = [len(g.layers) for g in groups]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    held = payload = 0
    for g in groups:
        pages = _resized(g, blocks[g.tag]).num_blocks_held(num_tokens)
        held += pages * page * size * -(-len(g.layers) // size)
        payload += pages * _rows_bytes(g, blocks[g.tag]) * len(g.layers)
    steps = math.lcm(*(blocks[g.tag] * g.context_shards for g in groups if g.cache.reach.per_token))
    return OnePageSize(num_tokens, page, size, blocks, held, 1 - payload / max(1, held), steps)


def _one_group(groups: list[Group], num_tokens: int) -> OnePageSize:
    """Caches of one reach share a group there, whatever their rows: nothing is padded."""
    block = math.lcm(*(group.block_tokens for group in groups))
    layer = sum(_rows_bytes(group, block) for group in groups)
    rows = sum(_rows_bytes(group, block) * len(group.layers) for group in groups)
    held = rows * _resized(groups[0], block).num_blocks_held(num_tokens)
    most = max(len(group.layers) for group in groups)
    blocks = {group.tag: block for group in groups}
    return OnePageSize(num_tokens, layer, most, blocks, held, 0.0, block * groups[0].context_shards)


def _layer_page(group: Group) -> int:
    return sum(role.row_bytes for role in group.cache.roles)


def _rows_bytes(group: Group, block_tokens: int) -> int:
    """One layer's rows in a block."""
    return sum(role.row_bytes * group.cache.num_rows(role, block_tokens) for role in group.cache.roles)


def _grown(group: Group, least_bytes: int) -> int:
    """The smallest block, in whole steps, whose page is as large as a state's."""
    if not group.cache.reach.per_token:
        return group.block_tokens
    step = max(BLOCK_STEP, group.cache.unit_tokens)
    return max(group.block_tokens, step * -(-least_bytes // max(1, _rows_bytes(group, step))))


def _divides(group: Group, block_tokens: int, page: int) -> bool:
    return group.cache.reach.per_token and page % max(1, _rows_bytes(group, block_tokens)) == 0


def _resized(group: Group, block_tokens: int) -> Group:
    return Group(group.tag, group.cache, group.layers, block_tokens, block_tokens, group.context_shards)

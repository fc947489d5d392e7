"""The joint hit: the longest position from which every group can go on.

With c the running count of present blocks, a group can resume at p iff c[p] - c[tail(p)] equals the number of blocks
between, and its head is whole. One cumulative sum and one comparison a group over all positions at once, on
the common grid; the last position that passes all of them is the hit. No iteration, longest by construction.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.spec import Reach


class Present(NamedTuple):
    """Which blocks of `block_tokens` tokens a group has, from block `first` on, before which nobody looks; for states,
    whether there is a snapshot at the block's end."""

    reach: Reach
    block_tokens: int
    blocks: NDArray[np.bool_]
    first: int = 0
    tails: NDArray[np.bool_] | None = None
    """Which blocks are present at least from their token `tail_start` on: enough where no earlier token is needed."""
    tail_start: int = 0


def joint_hit(groups: Iterable[Present], grid: int, limit: int, positions: NDArray[np.int64] | None = None) -> int:
    """The longest p <= `limit`, a multiple of `grid`, from which all groups can go on. 0 is always one.

    `positions`, where only some come into question: multiples of `grid` up to `limit`, ascending.
    """
    if positions is None:
        positions = np.arange(grid, limit + 1, grid)
    for group in sorted(groups, key=_span):
        if len(positions):
            positions = positions[resumable(group, positions)]
    return int(positions[-1]) if len(positions) else 0


def _span(group: Present) -> float:
    """Short reaches are asked first: they are cheap, and leave few positions for the others."""
    return inf if group.reach.span is None else group.reach.span


def resumable(group: Present, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a group alone can go on from each position, all multiples of its block, none of them 0."""
    reach, size, blocks, first, tails, tail_start = group
    end = positions // size - first
    if len(positions) and end[-1] > len(blocks):
        return _beyond(group, positions)
    start = reach.tail(positions) // size - first
    if not reach.per_token:  # the one snapshot: nothing to count
        return blocks[start]
    count = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(blocks, out=count[1:])
    whole: NDArray[np.bool_] = count[end] - count[start] == end - start
    if tails is not None:
        rest = count[end] - count[np.minimum(start + 1, end)] == end - start - 1
        whole |= rest & tails[np.minimum(start, len(tails) - 1)] & (reach.tail(positions) % size >= tail_start)
    if reach.head:
        head = np.minimum(-(-reach.head // size), end)
        whole &= count[head] == head
    return whole


def _beyond(group: Present, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`resumable` where some positions lie behind the last block that is known: those are not."""
    fine = positions <= (group.first + len(group.blocks)) * group.block_tokens
    fine[fine] = resumable(group, positions[fine])
    return fine

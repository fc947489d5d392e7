"""What a group of layers is for the core: its kind, its block size, and the blocks it needs at a position.

Worked out once from the plan; pools, tables, the prefix tree and the cache all ask this record.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import SpecError
from kvweave.plan import Group, Plan
from kvweave.spec import Reach

Ids = NDArray[np.int32]
Counts = NDArray[np.int64]
NULL: Final = 0
"""The page of every group that is never allocated, and is safe to read and to write."""
NO_PAGES: Final[Ids] = np.empty(0, np.int32)
MOST_REMEMBERED = 4096


class PagedGroup:
    """A group is one of three kinds: `is_full` (sees every token), `is_window` (what lies behind its tail may leave:
    windows, chunks, sinks) or `is_state` (one page for the state after a position).

    `slot_tokens` are the tokens of one slot of its block table: a block, or one block of each context-parallel rank.
    """

    def __init__(self, number: int, group: Group, stride_bytes: int) -> None:
        self.number = number
        self.tag = group.tag
        self.reach: Reach = group.cache.reach
        self.is_state = not group.cache.reach.per_token
        self.is_full = group.cache.reach.per_token and group.cache.reach.span is None
        self.is_window = not self.is_state and not self.is_full
        self.block_tokens = group.block_tokens
        self.context_shards = group.context_shards
        self.slot_tokens = group.block_tokens * group.context_shards
        self.kernel_blocks = 1 if self.is_state else group.kernel_blocks
        self.head_blocks = -(-group.cache.reach.head // self.slot_tokens)
        self.pool = group.pool
        self.pages_per_superpage = group.pages_per_superpage
        self.has_pages = bool(group.layers)
        """False on a rank without such layers: its table is all NULL, and it takes no memory."""
        self.page_bytes = stride_bytes
        ends = self.slot_tokens * np.arange(1, 1025)
        tails = np.asarray(self.reach.tail(ends))
        if (goes_back := np.flatnonzero(tails[1:] < tails[:-1])).size:
            at = int(goes_back[0])
            raise SpecError(
                f"group {self.tag!r}: to go on from {ends[at + 1]} it needs tokens from {tails[at + 1]} on, but from"
                f" {ends[at]} on only those from {tails[at]} on, and earlier ones may be gone: the tail of"
                f" {type(self.reach).__name__} must never go back"
            )
        self.needs_last_block = not self.is_state and bool((tails < ends).all())
        """Whether going on from the end of a block always needs that block. (A chunk needs nothing where it ends.)"""
        self._first_blocks: dict[int, int] = {}

    def first_block(self, position: int) -> int:
        """The first block behind the head that is needed to go on from a position; remembered, for few are asked."""
        block = self._first_blocks.get(position, -1)
        if block < 0:
            if len(self._first_blocks) >= MOST_REMEMBERED:
                self._first_blocks.clear()
            block = max(int(self.reach.tail(position)) // self.slot_tokens, self.head_blocks)
            self._first_blocks[position] = block
        return block

    def first_blocks(self, positions: Counts) -> Counts:
        """The same for many positions."""
        return np.maximum(np.asarray(self.reach.tail(positions)) // self.slot_tokens, self.head_blocks)

    def blocks_for(self, start: Counts, end: Counts) -> Counts:
        """Blocks that must be there while the tokens [start, end) are computed in one step; for many at once."""
        if self.is_state:
            return np.ones_like(start)
        last = -(-end // self.slot_tokens)
        first = np.minimum(self.first_blocks(start), last)
        blocks: Counts = last - first + np.minimum(self.head_blocks, first)
        return blocks


def paged_groups(plan: Plan) -> list[PagedGroup]:
    return [PagedGroup(number, group, plan.stride_bytes(group.tag)) for number, group in enumerate(plan.groups)]

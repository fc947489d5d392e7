"""Block tables: per group one int32 array of pages and one of kernel blocks, a row a sequence, written in place.

    row r   | NULL  NULL  p7  p3  p9  p12  NULL ... |     a window: old blocks left, first = 2, blocks = 6
                          ^first            ^blocks
                                 ^shared: pages before it belong to the prefix tree, from it on to the sequence

Both arrays can be handed to a kernel as they are: NULL is page 0, which nobody owns and anybody may read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.plan import Group
from kvweave.pool import NULL, Ids
from kvweave.prefix.tails import Tails

Counts = NDArray[np.int64]


class GroupTable:
    """The table of one group. A context-parallel rank holds every cp-th block, so `slot_tokens` spans them all.

    States have one column (`blocks`) for the live state, and one more for each draft token that may be rejected.
    """

    def __init__(self, group: Group, num_rows: int, max_tokens: int, num_pages: int) -> None:
        self.tag = group.tag
        self.reach = group.cache.reach
        self.per_token: bool = group.cache.reach.per_token
        self.span: int | None = group.cache.reach.span
        self.block_tokens = group.block_tokens
        self.context_shards = group.context_shards
        self.slot_tokens = group.block_tokens * group.context_shards
        self.kernel_blocks = group.kernel_blocks if self.per_token else 1
        self.head_blocks = -(-self.reach.head // self.slot_tokens)
        self.tails = Tails(self.reach, self.slot_tokens)
        self.width = max(1, min(num_pages, -(-max_tokens // self.slot_tokens))) if self.per_token else 1
        self.pages: Ids = np.zeros((num_rows, self.width), np.int32)
        self.kernels: Ids = self.pages
        if self.kernel_blocks > 1:
            self.kernels = np.zeros((num_rows, self.width * self.kernel_blocks), np.int32)
        self.first: Counts = np.full(num_rows, self.head_blocks, np.int64)
        self.shared: Counts = np.zeros(num_rows, np.int64)
        self.blocks: Counts = np.zeros(num_rows, np.int64)

    def grow(self, num_rows: int, width: int) -> None:
        """Make room for more rows or wider ones; addresses change, so engines size a cache once."""
        used, self.width = int(self.blocks.max()), max(width, self.width)
        self.pages = _grown(self.pages, used, num_rows, self.width)
        if self.kernel_blocks == 1:
            self.kernels = self.pages
        else:
            self.kernels = _grown(self.kernels, used * self.kernel_blocks, num_rows, self.width * self.kernel_blocks)
        more = num_rows - len(self.first)
        self.first = np.pad(self.first, (0, more), constant_values=self.head_blocks)
        self.shared, self.blocks = np.pad(self.shared, (0, more)), np.pad(self.blocks, (0, more))

    def write(self, row: int, start: int, pages: Ids) -> None:
        """Pages of one row from slot `start` on, in both arrays."""
        self.pages[row, start : start + len(pages)] = pages
        if self.kernel_blocks > 1:
            at = start * self.kernel_blocks
            self.kernels[row, at : at + len(pages) * self.kernel_blocks] = self.kernel_ids(pages).ravel()

    def append(self, row: int, pages: Ids) -> None:
        """More pages at the end of one row."""
        blocks = int(self.blocks[row])
        self.write(row, blocks, pages)
        self.blocks[row] = blocks + len(pages)

    def append_one(self, row: int, page: int) -> None:
        """One more page at the end of one row."""
        slot = int(self.blocks[row])
        self.pages[row, slot] = page
        if self.kernel_blocks > 1:
            at = slot * self.kernel_blocks
            self.kernels[row, at : at + self.kernel_blocks] = np.arange(self.kernel_blocks) + page * self.kernel_blocks
        self.blocks[row] = slot + 1

    def write_many(self, rows: Counts, slots: Counts, pages: Ids) -> None:
        """One page for each (row, slot)."""
        self.pages[rows, slots] = pages
        if self.kernel_blocks > 1:
            columns = slots[:, None] * self.kernel_blocks + np.arange(self.kernel_blocks)
            self.kernels[rows[:, None], columns] = self.kernel_ids(pages)

    def kernel_ids(self, pages: Ids) -> Ids:
        """`[pages, kernel blocks]`; a NULL page stays NULL."""
        ids = pages[:, None] * self.kernel_blocks + np.arange(self.kernel_blocks, dtype=np.int32)
        return np.where(pages[:, None] == NULL, np.int32(NULL), ids)

    def erase(self, row: int, start: int, end: int) -> None:
        """NULL in the slots [start, end) of one row."""
        self.pages[row, start:end] = NULL
        if self.kernel_blocks > 1:
            self.kernels[row, start * self.kernel_blocks : end * self.kernel_blocks] = NULL

    def owned(self, row: int) -> Ids:
        """The pages that belong to the sequence of a row, and not to the tree; NULLs among them. A view."""
        owned: Ids = self.pages[row, int(self.shared[row]) : int(self.blocks[row])]
        return owned

    def clear(self, row: int) -> None:
        self.erase(row, 0, int(self.blocks[row]))
        self.blocks[row] = 0
        if self.per_token:
            self.first[row] = self.head_blocks
            self.shared[row] = 0

    def slots(self, row: int, start: int, end: int, cp_rank: int) -> Counts:
        """Where the tokens [start, end) of a row are written: page x block_tokens + offset; -1: on another rank."""
        positions = np.arange(start, end)
        pages = self.pages[row, positions // self.slot_tokens].astype(np.int64)
        slots: Counts = pages * self.block_tokens + positions % self.block_tokens
        if self.context_shards > 1:
            slots[positions // self.block_tokens % self.context_shards != cp_rank] = -1
        return slots


def _grown(table: Ids, used: int, num_rows: int, width: int) -> Ids:
    """A larger table with the used columns of this one; the rest is not touched."""
    larger = np.zeros((max(num_rows, len(table)), width), np.int32)
    larger[: len(table), :used] = table[:, :used]
    return larger

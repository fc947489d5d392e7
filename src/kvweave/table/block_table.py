"""Block tables: per group one int32 array of pages and one of kernel blocks, a row a sequence, written in place.

    row r   | NULL  NULL  p7  p3  p9  p12  NULL ... |     a window: old blocks left, first = 2, blocks = 6
                          ^first            ^blocks

Both arrays can be passed to a kernel as they are: NULL is page 0, which nobody owns and anybody may read. Their
addresses stay the same while rows and tokens stay within what the cache was made for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.pool import NULL, Counts, Ids, PagedGroup


class BlockTable:
    """The table of one group. A context-parallel rank holds every cp-th block, so a slot spans all ranks' blocks.

    States have a column for the live state, and one more for each draft token that may be rejected. Of full
    groups the tree owns the pages that it has. Windows hold a reference to every page in them.
    """

    def __init__(self, group: PagedGroup, num_rows: int, width: int) -> None:
        self.group = group
        self.slot_tokens = group.slot_tokens
        self.kernel_blocks = group.kernel_blocks
        self.head_blocks = group.head_blocks
        self.width = width
        self.pages: Ids = np.zeros((num_rows, width), np.int32)
        self.kernels: Ids = self.pages
        if self.kernel_blocks > 1:
            self.kernels = np.zeros((num_rows, width * self.kernel_blocks), np.int32)
        first = np.full(num_rows, self.head_blocks, np.int64)
        self._set(first, np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_))

    def _set(self, first: Counts, blocks: Counts, changed: NDArray[np.bool_]) -> None:
        """One number a row; and the same as plain ones, which are read five times sooner."""
        self.first, self.blocks, self._changed = first, blocks, changed
        self.first_of, self.blocks_of, self._changed_of = first.data, blocks.data, changed.data

    def add_rows(self, count: int) -> None:
        """More rows than the cache was made for: addresses change."""
        used = int(self.blocks.max())
        self.pages = _with_rows(self.pages, count, used)
        same = self.kernel_blocks == 1
        self.kernels = self.pages if same else _with_rows(self.kernels, count, used * self.kernel_blocks)
        first = np.pad(self.first, (0, count), constant_values=self.head_blocks)
        self._set(first, np.pad(self.blocks, (0, count)), np.pad(self._changed, (0, count)))

    def take_changed(self) -> Counts:
        """The rows that were written since this was last asked."""
        rows: Counts = np.flatnonzero(self._changed)
        self._changed[rows] = False
        return rows

    # ---- writing: both arrays, always

    def write(self, row: int, start: int, pages: Ids) -> None:
        """Pages of one row from slot `start` on."""
        self.pages[row, start : start + len(pages)] = pages
        self._changed_of[row] = True
        if self.kernel_blocks > 1:
            at = start * self.kernel_blocks
            self.kernels[row, at : at + len(pages) * self.kernel_blocks] = self.kernel_ids(pages).ravel()

    def write_state(self, row: int, page: int) -> None:
        """The first page of a row of states, which have one kernel block a page."""
        self.pages[row, 0] = page
        self.blocks_of[row], self._changed_of[row] = 1, True

    def append(self, rows: Counts, counts: Counts, pages: Ids) -> None:
        """`counts[i]` more pages at the end of `rows[i]`, out of `pages` in order."""
        slots = self.blocks[rows]
        self.blocks[rows] = slots + counts
        if len(pages) != len(rows) or counts[counts.argmax()] != 1:
            rows, slots = spread(rows, slots, counts)
        self.write_many(rows, slots, pages)

    def write_many(self, rows: Counts, slots: Counts, pages: Ids) -> None:
        """One page for each (row, slot)."""
        self.pages[rows, slots] = pages
        self._changed[rows] = True
        if self.kernel_blocks > 1:
            columns = slots[:, None] * self.kernel_blocks + np.arange(self.kernel_blocks)
            self.kernels[rows[:, None], columns] = self.kernel_ids(pages)

    def erase(self, row: int, start: int, end: int) -> None:
        """NULL in the slots [start, end) of one row."""
        if end > start:
            self.pages[row, start:end] = NULL
            self._changed_of[row] = True
            if self.kernel_blocks > 1:
                self.kernels[row, start * self.kernel_blocks : end * self.kernel_blocks] = NULL

    def clear(self, row: int) -> None:
        self.erase(row, 0, self.blocks_of[row])
        self.first_of[row], self.blocks_of[row] = self.head_blocks, 0

    # ---- reading

    def kernel_ids(self, pages: Ids) -> Ids:
        """`[pages, kernel blocks]`; a NULL page stays NULL."""
        ids = pages[:, None] * self.kernel_blocks + np.arange(self.kernel_blocks, dtype=np.int32)
        return np.where(pages[:, None] == NULL, np.int32(NULL), ids)

    def held(self, row: int, published: int) -> Ids:
        """The pages that a row holds itself: of full groups those behind what is in the tree, of windows and states
        all in it, NULLs among them. A view."""
        held: Ids = self.pages[row, published // self.slot_tokens if self.group.is_full else 0 : self.blocks_of[row]]
        return held

    def slots(self, rows: Counts, positions: Counts, cp_rank: int) -> Counts:
        """Where tokens are written: page x block_tokens + offset for each (row, position); -1: on another rank."""
        size, blocks = self.group.block_tokens, positions // self.slot_tokens
        pages, offsets = self.pages.take(rows * self.width + blocks), positions - blocks * self.slot_tokens
        if self.group.context_shards == 1:
            return pages * np.int64(size) + offsets
        ranks = offsets // size
        return np.where(ranks == cp_rank, pages * np.int64(size) + offsets - ranks * size, -1)


def spread(rows: Counts, first: Counts, counts: Counts) -> tuple[Counts, Counts]:
    """Each (row, number) of the numbers [first, first + count) of rows."""
    if not np.count_nonzero(counts != 1):
        return rows, first
    numbers = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    return np.repeat(rows, counts), numbers


def _with_rows(table: Ids, count: int, used: int) -> Ids:
    """A table with `count` rows more and the used columns of this one; the rest is not touched."""
    larger = np.zeros((len(table) + count, table.shape[1]), np.int32)
    larger[: len(table), :used] = table[:, :used]
    return larger

"""Where windows release blocks, worked out once: between two such lengths a row has nothing to do for its windows."""

from __future__ import annotations

import numpy as np

from kvweave.pool import PagedGroup
from kvweave.prefix import NEVER
from kvweave.table import Counts

FIRST_SIZE = 1024


class WindowMoves:
    """By multiples of the grid: the first block that each window needs there, and where one of them moves on next."""

    def __init__(self, windows: list[PagedGroup], grid: int) -> None:
        self.windows = windows
        self.grid = grid
        self._work_out(FIRST_SIZE)

    def _work_out(self, size: int) -> None:
        """For the first `size` multiples of the grid; for more when a row comes there."""
        numbers = np.arange(size)
        self._first_blocks = [group.first_blocks(numbers * self.grid) for group in self.windows]
        moves = np.full(size + 1, size)
        for first in self._first_blocks:
            moved = np.flatnonzero(first[1:] > first[:-1]) + 1
            moves[moved] = moved
        self._next: Counts = np.minimum.accumulate(moves[:0:-1])[::-1] * self.grid
        self._next_of = self._next.data

    def next(self, position: int) -> int:
        """The first multiple of the grid after a position at which a window moves on."""
        number = position // self.grid
        if not self.windows:
            return NEVER
        if number >= len(self._next):
            self._work_out(2 * number)
        return self._next_of[number]

    def look_up(self, numbers: Counts) -> tuple[list[Counts], Counts]:
        """For many multiples of the grid: the first blocks that each window needs, and where one moves on next."""
        last = int(numbers[numbers.argmax()])
        if last >= len(self._next):
            self._work_out(2 * last)
        return [first[numbers] for first in self._first_blocks], self._next[numbers]

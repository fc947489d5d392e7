"""Where windows release blocks, worked out once: between two such lengths a row has nothing to do for its windows."""

from __future__ import annotations

import numpy as np

from kvweave.pool import Counts, PagedGroup
from kvweave.prefix import NEVER


class WindowMoves:
    """By multiples of the grid: the first block that each window needs there, and where one of them moves on next."""

    def __init__(self, windows: list[PagedGroup], grid: int, max_tokens: int) -> None:
        self.grid = grid
        size = max_tokens // grid + 1 if windows else 0
        numbers = np.arange(size)
        self._first_blocks = [group.first_blocks(numbers * grid) for group in windows]
        moves = np.full(size + 1, size)
        for first in self._first_blocks:
            moved = np.flatnonzero(first[1:] > first[:-1]) + 1
            moves[moved] = moved
        self._next: Counts = np.minimum.accumulate(moves[:0:-1])[::-1] * grid
        self._next_of = self._next.data

    def next(self, position: int) -> int:
        """The first multiple of the grid after a position at which a window moves on."""
        return self._next_of[position // self.grid] if self._first_blocks else NEVER

    def look_up(self, numbers: Counts) -> tuple[list[Counts], Counts]:
        """For many multiples of the grid: the first blocks that each window needs, and where one moves on next."""
        return [first[numbers] for first in self._first_blocks], self._next[numbers]

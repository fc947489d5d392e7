"""Extents: which bytes of an arena or a file are free. Best fit, with adjacent free runs merged; it touches no
memory."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


class ExtentAllocator:
    """Free runs of `[0, capacity)`, in multiples of `align` bytes."""

    def __init__(self, capacity: int, align: int) -> None:
        self.align = align
        self.capacity = capacity // align * align
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        if self.capacity:
            self._add(0, self.capacity)

    def rounded(self, num_bytes: int) -> int:
        """The size of an extent for `num_bytes`."""
        return max(1, -(-num_bytes // self.align)) * self.align

    def rounded_all(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes: NDArray[np.int64] = np.maximum(1, -(-lengths // self.align)) * self.align
        return sizes

    def take(self, num_bytes: int) -> int | None:
        """Allocate at least `num_bytes`; returns the start, None if no free run is long enough."""
        size = self.rounded(num_bytes)
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        whole, start = self._by_size[at]
        self._drop(start, whole)
        if whole > size:
            self._add(start + size, whole - size)
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Free what `take` allocated."""
        size = self.rounded(num_bytes)
        before, after = self._start_of.get(start), self._size_at.get(start + size)
        if after is not None:
            self._drop(start + size, after)
            size += after
        if before is not None:
            self._drop(before, start - before)
            start, size = before, size + start - before
        self._add(start, size)

    def keep(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Start over with these extents allocated: in order of start, not overlapping, within the capacity."""
        self._by_size, self._size_at, self._start_of, self.free_bytes = [], {}, {}, 0
        sizes = self.rounded_all(lengths)
        ends = np.concatenate(([0], starts + sizes))
        gaps = np.concatenate((starts, [self.capacity])) - ends
        for at in np.flatnonzero(gaps):
            self._add(int(ends[at]), int(gaps[at]))

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start], self._start_of[start + size] = size, start
        self.free_bytes += size

    def _drop(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start], self._start_of[start + size]
        self.free_bytes -= size

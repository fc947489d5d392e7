"""Histograms of durations: counts in fixed buckets, which can be summed over processes and time."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvweave.store.forking import register_after_fork

BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """How many took at most `BUCKETS_S[i]` seconds and more than the bucket before; the last: longer than all of them.
    And the seconds of all together."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts. Any thread may observe."""

    def __init__(self) -> None:
        self._counts, self._seconds = [0] * (len(BUCKETS_S) + 1), 0.0
        self._lock = threading.Lock()
        register_after_fork(self)

    def observe(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(BUCKETS_S, seconds)] += 1
            self._seconds += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Observe how long a block takes, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.observe(time.monotonic() - began)

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock does not exist."""
        self._lock = threading.Lock()

    def stats(self) -> HistogramStats:
        with self._lock:
            return HistogramStats(tuple(self._counts), self._seconds)

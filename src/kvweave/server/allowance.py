"""What the threads of one connection hold at once: they wait here for each other, where the daemon would refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.store.tier_stack import Budget

CANCEL_POLL_S = 0.02
"""A cancelled operation stops waiting after so many seconds."""


class Allowance:
    """Bytes that are held over one connection. Thread-safe."""

    def __init__(self) -> None:
        self._held, self._lock = 0, threading.RLock()
        self._freed = threading.Condition(self._lock)

    @contextmanager
    def holding(self, num_bytes: int, most_bytes: int, wait_s: float, budget: Budget) -> Iterator[None]:
        """A context for `hold`."""
        self.hold(num_bytes, most_bytes, wait_s, budget)
        try:
            yield
        finally:
            self.give_back(num_bytes)

    def hold(self, num_bytes: int, most_bytes: int, wait_s: float, budget: Budget) -> None:
        """Hold so many bytes more, until `give_back`, when no more than `most_bytes` are held then, or nothing else is.

        After `wait_s`, or when the budget is spent, they are held all the same: the daemon decides.
        """
        until = time.monotonic() + wait_s
        with self._lock:
            while not self._fits(num_bytes, most_bytes) and (left_s := budget.within(until - time.monotonic())) > 0:
                self._freed.wait(min(left_s, CANCEL_POLL_S))
            self._held += num_bytes

    def hold_now(self, num_bytes: int, most_bytes: int) -> bool:
        """As `hold`, if they fit now; returns whether they do."""
        with self._lock:
            fits = self._fits(num_bytes, most_bytes)
            self._held += num_bytes if fits else 0
        return fits

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._held -= num_bytes
            self._freed.notify_all()

    def _fits(self, num_bytes: int, most_bytes: int) -> bool:
        return not self._held or self._held + num_bytes <= most_bytes

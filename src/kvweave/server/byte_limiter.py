"""A limit on the bytes that the threads of one connection hold together: a thread waits for the others instead of
sending a request that the daemon would refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.store.tier_stack import Budget

CANCEL_POLL_S = 0.02
"""A cancelled operation stops waiting within this many seconds."""


class ByteLimiter:
    """Counts the bytes held over one connection. Thread-safe."""

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
        """Hold `num_bytes` more, until `give_back`. Waits until at most `most_bytes` are held, or no others are.

        After `wait_s`, or when the budget is spent, the bytes are counted without waiting on: the daemon decides.
        """
        until = time.monotonic() + wait_s
        with self._lock:
            while not self._fits(num_bytes, most_bytes) and (left_s := budget.within(until - time.monotonic())) > 0:
                self._freed.wait(min(left_s, CANCEL_POLL_S))
            self._held += num_bytes

    def hold_now(self, num_bytes: int, most_bytes: int) -> bool:
        """As `hold`, but without waiting: returns False, and holds nothing, if the bytes do not fit now."""
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

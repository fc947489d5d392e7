"""A limit on the bytes that the threads of one connection hold together: a thread waits for the others instead of
sending a request that the daemon would refuse."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.store.tier_stack import Budget

CANCEL_POLL_S = 0.02
"""A cancelled operation stops waiting within this many seconds."""


class HeldBytes:
    """Bytes that a limiter counts until they are given back, or nobody has this object any more: an interrupt may come
    before anybody knows that they are held."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class ByteLimiter:
    """Counts the bytes held over one connection. Thread-safe."""

    def __init__(self) -> None:
        self._held, self._lock = weakref.WeakSet[HeldBytes](), threading.RLock()
        self._freed = threading.Condition(self._lock)

    @contextmanager
    def holding(self, num_bytes: int, most_bytes: int, wait_s: float, budget: Budget) -> Iterator[None]:
        """A context for `hold`."""
        held = HeldBytes(num_bytes)
        try:
            self.hold(held, most_bytes, wait_s, budget)
            yield
        finally:
            self.give_back(held)

    def hold(self, held: HeldBytes, most_bytes: int, wait_s: float, budget: Budget) -> bool:
        """Hold these bytes, until `give_back`. Waits until at most `most_bytes` are held, or no others are.

        After `wait_s`, or when the budget is spent, the bytes are counted without waiting on, and this returns False:
        the daemon decides.
        """
        until = time.monotonic() + wait_s
        with self._lock:
            while (
                not (fits := self._fits(held, most_bytes)) and (left_s := budget.within(until - time.monotonic())) > 0
            ):
                self._freed.wait(min(left_s, CANCEL_POLL_S))
            self._held.add(held)
        return fits

    def hold_now(self, held: HeldBytes, most_bytes: int) -> bool:
        """As `hold`, but without waiting: returns False, and holds nothing, if the bytes do not fit now."""
        with self._lock:
            fits = self._fits(held, most_bytes)
            if fits:
                self._held.add(held)
        return fits

    def give_back(self, held: HeldBytes) -> None:
        """Calling it twice is fine."""
        with self._lock:
            self._held.discard(held)
            self._freed.notify_all()

    def _fits(self, held: HeldBytes, most_bytes: int) -> bool:
        return not self._held or self.held_bytes + held.num_bytes <= most_bytes

    @property
    def held_bytes(self) -> int:
        return sum(each.num_bytes for each in self._held)

"""What the threads of one connection hold at once: they wait here for each other, where the daemon would refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.store.tier_stack import Budget


class Allowance:
    """Bytes that are held over one connection. Thread-safe."""

    def __init__(self) -> None:
        self._held, self._freed = 0, threading.Condition()

    @contextmanager
    def holding(self, num_bytes: int, most_bytes: int, wait_s: float, budget: Budget) -> Iterator[None]:
        """Hold so many bytes more, when no more than `most_bytes` are held then, or nothing else is.

        After `wait_s`, or when the budget is spent, they are held all the same: the daemon decides.
        """
        with self._freed:
            self._freed.wait_for(lambda: not self._held or self._held + num_bytes <= most_bytes, budget.within(wait_s))
            self._held += num_bytes
        try:
            yield
        finally:
            with self._freed:
                self._held -= num_bytes
                self._freed.notify_all()

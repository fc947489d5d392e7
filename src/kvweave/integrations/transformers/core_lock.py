"""Who may use the core: one thread at a time, for as long as a request or a forward takes."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from kvweave.cache import Cache, Sequence


class CoreLock:
    """A lock around a core, as a context: the thread that enters owns the core until it leaves. May be nested.

    Rows of pasts that nobody closed are closed by whoever enters next: `drop` is called by the garbage collector, which
    must not wait for a lock.
    """

    def __init__(self, core: Cache) -> None:
        self._core = core
        self._lock = threading.RLock()
        self._dropped: deque[list[Sequence]] = deque()

    def drop(self, sequences: list[Sequence]) -> None:
        """The past that held these rows is gone."""
        self._dropped.append(sequences)

    def __enter__(self) -> CoreLock:
        self._lock.acquire()
        try:
            self._core.bind_thread()
            while self._dropped:
                sequences = self._dropped.popleft()
                while sequences:
                    self._core.close(sequences.pop())
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

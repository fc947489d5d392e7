"""The lock of a core: one thread at a time uses it, for the duration of a request or a forward."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from kvweave.cache import Cache, Sequence


class CoreLock:
    """A lock around a core, used as a context. Reentrant.

    Rows of caches that were never closed are closed by the next thread that enters: `drop` is called by the garbage
    collector, which must not wait for a lock.
    """

    def __init__(self, core: Cache) -> None:
        self._core = core
        self._lock = threading.RLock()
        self._dropped: deque[list[Sequence]] = deque()

    def drop(self, sequences: list[Sequence]) -> None:
        """Note that the cache that held these rows was garbage-collected."""
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

"""The job queue of a tier: reads are served before writes, and one thread serves reads alone.

A write that has started cannot be interrupted, so a reserved thread is needed to keep reads from waiting behind it.
Waiting reads hold no memory, so their number is not limited; waiting writes hold their blobs, so it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Job:
    __slots__ = ("future", "work")

    def __init__(self, future: Future[Any], work: Callable[[], Any]) -> None:
        self.future, self.work = future, work


class JobQueue:
    """`workers` threads for reads and writes, and one for reads alone; no threads if `workers` is 0. At most
    `most_writes` writes wait."""

    def __init__(self, name: str, workers: int, most_writes: int) -> None:
        self._most_writes = most_writes
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._unfinished: dict[int, None] = {}
        """Numbers of the writes that are queued or running, the oldest first."""
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False
        kinds = [True, *[False] * workers] if workers else []
        self._threads = [
            threading.Thread(target=self._work, args=(only,), name=f"kvweave-{name}-{number}", daemon=True)
            for number, only in enumerate(kinds)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            self._reads.append(_Job(future, work))
            self._changed.notify_all()
        return future

    def write(self, work: Callable[[], T], wait_s: float = 0.0) -> Future[T] | None:
        """Queue a write; None if there was no room in the queue for `wait_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or len(self._writes) < self._most_writes, wait_s):
                return None
            if self._closed:
                return None
            self._count += 1
            future, number = Future[T](), self._count
            self._unfinished[number] = None
            self._writes.append(_Job(future, work))
            self._changed.notify_all()
        future.add_done_callback(lambda _: self._finished(number))
        return future

    @property
    def queued(self) -> tuple[int, int]:
        """Reads and writes that no thread has begun; a snapshot, without the lock."""
        return len(self._reads), len(self._writes)

    def _finished(self, number: int) -> None:
        with self._changed:
            self._unfinished.pop(number, None)
            self._changed.notify_all()

    def _work(self, only_reads: bool) -> None:
        while (job := self._next(only_reads)) is not None:
            if job.future.set_running_or_notify_cancel():
                _settle(job.future, job.work)
            del job  # drops the blobs while the thread waits for its next job

    def _next(self, only_reads: bool) -> _Job | None:
        with self._changed:
            while True:
                if self._reads:
                    return self._reads.popleft()
                if self._writes and not only_reads:
                    self._changed.notify_all()
                    return self._writes.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    def drain(self, wait_s: float) -> bool:
        """Wait until every write queued before this call was tried; returns whether it was. Later writes are not
        waited for."""
        with self._changed:
            last = self._count
            return self._changed.wait_for(lambda: next(iter(self._unfinished), last + 1) > last, wait_s)

    def close(self, wait_s: float) -> bool:
        """Finish queued jobs and end the threads; returns whether all ended in time."""
        until = time.monotonic() + wait_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def run_now(work: Callable[[], T]) -> Future[T]:
    """Run in the caller's thread."""
    future: Future[T] = Future()
    _settle(future, work)
    return future


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # re-raised by `result()`
        future.set_exception(error)

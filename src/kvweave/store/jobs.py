"""The job queue of a tier: reads are served before writes, and one thread serves reads alone.

A write that has started cannot be interrupted, so a reserved thread is needed to keep reads from waiting behind it.
Reads without end do not hold writes up for ever: a write that has waited for `OVERDUE_S` is next for the other threads.
Waiting reads hold no memory, so their number is not limited; waiting writes hold their blobs, so it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

from kvweave.errors import StoreError

T = TypeVar("T")
OVERDUE_S = 0.5


class _Condition(threading.Condition):
    """Entered and left as its lock is, in C: an interrupt within `Condition.__enter__` would leave it locked."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class _JobFuture(Future[T]):
    """A future whose caller may be interrupted anywhere: the thread that ends the job is not locked out."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()


class _Job:
    __slots__ = ("future", "queued_at", "work")

    def __init__(self, future: Future[Any], work: Callable[[], Any]) -> None:
        self.future, self.work, self.queued_at = future, work, time.monotonic()


class JobQueue:
    """`workers` threads for reads and writes, and one for reads alone. At most `most_writes` writes wait."""

    def __init__(self, name: str, workers: int, most_writes: int) -> None:
        self._most_writes = most_writes
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._unfinished: dict[int, None] = {}
        """Numbers of the writes that are queued or running, the oldest first."""
        self._count = 0
        self._drains: dict[Future[None], int] = {}
        """Futures of `drained`, with the last write that each is about."""
        self._turns: deque[object] = deque()
        """Callers that wait for room in the queue of writes, in their order."""
        self._moved_at = 0.0
        """When a write last left the queue, or came into an empty one."""
        self._lock = threading.RLock()  # entered itself: an interrupt in `Condition.__enter__` would leave it held
        self._changed = threading.Condition(self._lock)
        """Callers wait here. Threads wait apart, and one is woken for a job: each that is woken in vain takes the
        interpreter from others."""
        self._for_reader, self._for_workers = threading.Condition(self._lock), threading.Condition(self._lock)
        self._is_reader_idle = False
        self._closed = False
        kinds = [True, *[False] * workers]
        self._threads = [
            threading.Thread(target=self._work, args=(only,), name=f"kvweave-{name}-{number}", daemon=True)
            for number, only in enumerate(kinds)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, work: Callable[[], T]) -> Future[T]:
        """Queue a read. After `close` it fails at once: no thread would begin it, and its caller would wait."""
        future = _JobFuture[T]()
        with self._lock:
            if self._closed:
                future.set_exception(StoreError("the queue is closed"))
                return future
            self._reads.append(_Job(future, work))
            (self._for_reader if self._is_reader_idle else self._for_workers).notify()
            self._is_reader_idle = False
        return future

    def write(self, work: Callable[[], T], wait_s: float = 0.0, stalled_s: float = inf) -> Future[T] | None:
        """Queue a write. While the queue is full, callers wait, the first come first. None: there was no room for
        `wait_s`, or no write left the queue for `stalled_s`."""
        with self._lock:
            if not self._has_room(wait_s, stalled_s):
                return None
            self._count += 1
            future, number = _JobFuture[T](), self._count
            future.add_done_callback(lambda _: self._finished(number))
            if not self._writes:
                self._moved_at = time.monotonic()
            self._writes.append(_Job(future, work))
            self._unfinished[number] = None  # last: what is not queued, after an interrupt, would never be finished
            self._for_workers.notify()
        return future

    def _has_room(self, wait_s: float, stalled_s: float) -> bool:
        """Wait for this caller's turn and for room."""
        turn, began = object(), time.monotonic()
        try:
            self._turns.append(turn)
            while not self._closed:
                if self._turns[0] is turn and len(self._writes) < self._most_writes:
                    return True
                end = min(began + wait_s, max(began, self._moved_at) + stalled_s)
                if (left_s := end - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left_s)
            return False
        finally:
            if turn in self._turns:  # unless it was interrupted before
                self._turns.remove(turn)
            self._changed.notify_all()

    def is_stalled(self, seconds: float) -> bool:
        """Whether writes wait, and none has left the queue for `seconds`."""
        return bool(self._writes) and time.monotonic() - self._moved_at >= seconds

    @property
    def queued(self) -> tuple[int, int]:
        """Reads and writes that no thread has begun; a snapshot, without the lock."""
        return len(self._reads), len(self._writes)

    def _finished(self, number: int) -> None:
        with self._lock:
            self._unfinished.pop(number, None)
            self._changed.notify_all()
            self._end_drains()

    def _work(self, only_reads: bool) -> None:
        while (job := self._next(only_reads)) is not None:
            if job.future.set_running_or_notify_cancel():
                _settle(job.future, job.work)
            del job  # drops the blobs while the thread waits for its next job

    def _next(self, only_reads: bool) -> _Job | None:
        with self._lock:
            while (job := self._take(only_reads)) is None and not self._closed:
                self._is_reader_idle |= only_reads
                (self._for_reader if only_reads else self._for_workers).wait()
            if self._reads or self._writes:  # this thread may have been woken for another job than it took
                self._for_workers.notify()
            return job

    def _take(self, only_reads: bool) -> _Job | None:
        may_write = bool(self._writes) and not only_reads
        if self._reads and not (may_write and self._is_overdue(self._writes[0])):
            return self._reads.popleft()
        if not may_write:
            return None
        self._moved_at = time.monotonic()
        self._changed.notify_all()
        return self._writes.popleft()

    @staticmethod
    def _is_overdue(write: _Job) -> bool:
        return time.monotonic() - write.queued_at >= OVERDUE_S

    def drain(self, wait_s: float) -> bool:
        """Wait until every write queued before this call was tried; returns whether it was. Later writes are not
        waited for."""
        with self._lock:
            last = self._count
            return self._changed.wait_for(lambda: self._were_tried(last), wait_s)

    def drained(self) -> Future[None]:
        """As `drain`, for callers that must not block. One that no longer waits cancels the future."""
        future = Future[None]()
        with self._lock:
            self._drains[future] = self._count
            self._end_drains()
        future.add_done_callback(self._forget_drain)
        return future

    def _forget_drain(self, future: Future[None]) -> None:
        with self._lock:
            self._drains.pop(future, None)

    def _end_drains(self) -> None:
        for future in [each for each, last in self._drains.items() if self._were_tried(last)]:
            del self._drains[future]
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _were_tried(self, last: int) -> bool:
        """Whether all writes up to this number were."""
        return next(iter(self._unfinished), last + 1) > last

    def close(self, wait_s: float) -> bool:
        """Finish queued jobs and end the threads; returns whether all ended in time."""
        until = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
            for each in (self._changed, self._for_reader, self._for_workers):
                each.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def run_beside(work: Callable[[], T], name: str) -> Future[T]:
    """Run in a thread of its own, which does not keep the process alive."""
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    return future


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # re-raised by `result()`
        future.set_exception(error)

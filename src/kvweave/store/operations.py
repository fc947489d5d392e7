"""Lookups, loads and saves that go on in threads of the store, while an engine does its steps.

Lookups have threads of their own, so that they never wait behind a load; loads go before saves (`JobQueue`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from kvweave.errors import OperationCancelled, OperationTimeout, StoreError
from kvweave.operation import Completions, OperationState
from kvweave.store.jobs import JobQueue
from kvweave.store.tier_stack import UNLIMITED, Budget

T = TypeVar("T")
ChunkRef = tuple[int, int]
"""The number of a shard in the schema, and of a chunk."""
Kind = Literal["lookup", "load", "save"]
SAVES = 256
"""Saves that are queued at most; more are dropped. A queued save keeps its source's memory in use."""
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CancellableBudget(Budget):
    """A budget that is spent at once when it is cancelled."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    @property
    def left_s(self) -> float | None:
        return 0.0 if self.is_cancelled else super().left_s

    @property
    def is_spent(self) -> bool:
        return self.is_cancelled or super().is_spent


class Operation(Generic[T]):
    """The handle of a lookup, load or save. `request` is the caller's own name for it.

    `failed` are the pieces (shard, chunk) that a load did not get, or a save did not keep: known when it has ended, and
    empty for one that was cancelled before it began.
    """

    error: BaseException | None = None
    failed: tuple[ChunkRef, ...] = ()
    _state = OperationState.PENDING
    _result: T
    _gathered = False

    def __init__(self, number: int, kind: Kind, request: Hashable, budget_s: float | None) -> None:
        self.id, self.kind, self.request = number, kind, request
        self.budget = CancellableBudget(Budget.of(budget_s).until)
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._unstarted: Callable[[], bool] = lambda: False
        self._taken: Callable[[], None] = lambda: None
        self._wanted: set[ChunkRef] | None = None
        self._left: Counter[int] = Counter()
        self._arrived_at = 0.0
        self.shard_seconds: dict[int, float] = {}
        """Of a load, by shard: how long its pieces took, from one arrival to the next."""

    def __repr__(self) -> str:
        return f"<Operation {self.id}: {self.kind} {self._state}, request {self.request!r}>"

    @property
    def state(self) -> OperationState:
        return self._state

    @property
    def is_done(self) -> bool:
        return self._ended.is_set()

    @property
    def is_gathered(self) -> bool:
        """Of a save: whether everything is copied, so that the source's memory may be reused."""
        return self._gathered or self.is_done

    def has_shard(self, number: int) -> bool:
        """Of a load: whether all of a shard was passed to the sink. A shard is the layers of a group, or some of their
        heads: a layer can run when all shards of its group are there. After a load that falls back to a shorter hit
        this is known when it is done."""
        return self.is_done or (self._wanted is not None and not self._left[number])

    def wait(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Block until it is done. Raises if it failed, was cancelled, or takes longer than `timeout` seconds."""
        if not self._ended.wait(UNLIMITED.within(timeout)):
            raise OperationTimeout(f"{self!r}: not done after {timeout} s; wait again, or cancel it")
        self._taken()
        if self._state is OperationState.CANCELLED:
            raise OperationCancelled(f"{self!r}: {len(self.failed)} pieces were left undone")
        if self.error is not None:
            raise self.error

    def result(self, timeout: float = DEFAULT_TIMEOUT_S) -> T:
        """As `wait`; returns the result. `poll` does not report it any more."""
        self.wait(timeout)
        return self._result

    def cancel(self) -> bool:
        self.budget.cancelled.set()
        if self._unstarted():
            self.end(OperationState.CANCELLED)
        return self._state in (OperationState.PENDING, OperationState.CANCELLED)

    # ---- for the thread that runs it

    def expect(self, pieces: Iterable[ChunkRef]) -> None:
        wanted, self._arrived_at = {*pieces}, time.monotonic()
        self._left.update(shard for shard, _ in wanted)
        self._wanted = wanted

    def arrived(self, piece: ChunkRef) -> None:
        before, self._arrived_at = self._arrived_at, time.monotonic()
        self.shard_seconds[piece[0]] = self.shard_seconds.get(piece[0], 0.0) + self._arrived_at - before
        if self._wanted and piece in self._wanted:
            self._wanted.remove(piece)
            self._left[piece[0]] -= 1

    @property
    def missing(self) -> list[ChunkRef]:
        return sorted(self._wanted or ())

    def gathered(self) -> None:
        self._gathered = True

    def run(self, work: Callable[[], tuple[T, Sequence[ChunkRef]]]) -> None:
        """Run `work`, which returns the result and the pieces that failed, and end."""
        try:
            self._result, failed = work()
        except BaseException as error:  # re-raised by `wait`
            self.error = error
            self.end(OperationState.FAILED, self.missing)
            return
        cut_short = self.budget.is_cancelled and (failed or self.kind == "lookup")
        self.end(OperationState.CANCELLED if cut_short else OperationState.DONE, failed)

    def end(self, state: OperationState, failed: Iterable[ChunkRef] = ()) -> None:
        with self._lock:
            if not self._ended.is_set():
                self.failed, self._state = tuple(sorted(failed)), state
                self._ended.set()


class OperationQueue:
    """The threads of one store, started with its first operation."""

    def __init__(self) -> None:
        self.completions = Completions()
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._lookups: JobQueue | None = None
        self._copies: JobQueue | None = None
        self._closed = False

    def start(self, operation: Operation[T], work: Callable[[], tuple[T, Sequence[ChunkRef]]]) -> Operation[T]:
        """Run in a thread of its own, for work that may take long. `poll` does not report it. Raises `StoreError` after
        `close`."""
        self._check_open()
        name = f"kvweave-{operation.kind}-{operation.id}"
        threading.Thread(target=operation.run, args=(work,), name=name, daemon=True).start()
        return operation

    def new(self, kind: Kind, request: Hashable, budget_s: float | None) -> Operation[T]:
        operation: Operation[T] = Operation(next(self._numbers), kind, request, budget_s)
        operation._taken = lambda: self.completions.discard(operation)
        return operation

    def submit(self, operation: Operation[T], work: Callable[[], tuple[T, Sequence[ChunkRef]]]) -> bool:
        """Queue it; returns whether there was room. Never waits. Raises `StoreError` after `close`."""
        try:
            with self._lock:
                self._check_open()
                self.completions.add(operation)
                future = self._queued(operation, lambda: operation.run(work))
            if future is not None:
                operation._unstarted = future.cancel
        except BaseException:  # closed, or an interrupt: the caller gets no handle
            self.completions.discard(operation)
            raise
        return future is not None

    def _queued(self, operation: Operation[T], job: Callable[[], None]) -> Future[None] | None:
        self._lookups = self._lookups or JobQueue("lookups", 1, 0)
        self._copies = self._copies or JobQueue("copies", 2, SAVES)
        if operation.kind == "save":
            return self._copies.write(job)
        return (self._lookups if operation.kind == "lookup" else self._copies).read(job)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed: make a new one, nothing can be submitted to this one")

    def close(self, wait_s: float) -> bool:
        """Finish queued operations, and cancel those that are not done in time; returns whether all were. Nothing can
        be submitted from now on."""
        with self._lock:
            self._closed = True
            queues = [queue for queue in (self._lookups, self._copies) if queue]
            self._lookups = self._copies = None
        budget = Budget.of(wait_s)
        ended = [queue.close(budget.within(wait_s)) for queue in queues]
        for operation in self.completions.pending() if not all(ended) else ():
            if isinstance(operation, Operation):
                operation.cancel()
        return all(ended)

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: operations of the parent stay with the parent."""
        self.completions, self._lock = Completions(), threading.Lock()
        self._lookups = self._copies = None

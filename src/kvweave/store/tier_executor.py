"""The executor of a tier: its threads, a bounded queue, deadlines, retries and circuit breakers.

A caller waits for its deadline at most. A job that ends after its timeout writes only into its own buffers. Reads are
served before writes. Lookups, reads and writes have one breaker each: a full disk can still be read, and a disk whose
index answers while its sectors cannot be read is skipped.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import PartlyRead, ReadOnly, StoreError, TierError, TierFull
from kvweave.store.breaker import CircuitBreaker
from kvweave.store.forking import register_after_fork
from kvweave.store.jobs import JobQueue, run_beside
from kvweave.store.tier import Blob, Tier, TierStats

T = TypeVar("T")
COUNTED = (
    "hits", "misses", "stored", "damaged", "late", "failed", "skipped", "retried", "read_bytes", "written_bytes",
)  # fmt: skip
"""What is counted of the questions to a tier, and of their bytes."""
Drop = Literal["no room", "queue full", "paused", "failed", "late"]
"""Why a blob was not stored: nothing could be evicted for it; the queue of writes stayed full; the tier was paused
after failures; the write failed; or it was not begun before its deadline."""
DROPS: tuple[Drop, ...] = get_args(Drop)
Write = Literal["through", "back", "off"]
LEAST_DEADLINE_S, MOST_DEADLINE_S = 0.001, 86_400
CLOSE_S = 1.0
"""Seconds that a tier has at least to close."""
PATIENCE = 4
"""A write waits for this many deadlines of its tier while the queue moves."""


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """How a tier is used.

    `write`: "through" (a save waits for this tier), "back" (a save queues for it), "off". `promote`: blobs found in
    lower tiers are put here. `inline`: each request is waited for, whatever the budget, for tiers that cannot hang. (It
    runs in a thread of the tier's all the same: an interrupt of the caller would end it half-way.) `deadline_s` is the
    time for one lookup or one batch of blobs; later it is a miss. At most `queue_jobs` writes wait; a write that finds
    the queue full is dropped when no other write left the queue for `deadline_s`, or after `PATIENCE` times that.
    `workers` is the number of threads, beside one for reads alone.
    """

    write: Write = "through"
    promote: bool = False
    inline: bool = False
    deadline_s: float = 2.0
    workers: int = 2
    queue_jobs: int = 32
    retries: int = 2
    backoff_s: float = 0.01
    failures: int = 3
    cool_s: float = 5.0

    def __post_init__(self) -> None:
        if self.write not in get_args(Write):
            raise StoreError(f"write={self.write!r}: it is one of {', '.join(get_args(Write))}")
        for name, least, most in (
            ("workers", 1, inf), ("queue_jobs", 1, inf), ("retries", 0, inf), ("failures", 1, inf),
            ("backoff_s", 0, inf), ("cool_s", 0, inf), ("deadline_s", LEAST_DEADLINE_S, MOST_DEADLINE_S),
        ):  # fmt: skip
            if not least <= (value := getattr(self, name)) <= most:
                raise StoreError(f"{name}={value}: it is {least} at least{'' if most == inf else f', {most} at most'}")


@dataclass(frozen=True, slots=True)
class TierExecutorStats:
    """Counts of the requests to one tier."""

    tier: TierStats
    hits: int
    misses: int
    stored: int
    drops: dict[str, int]
    """Blobs that were not stored, by reason (`Drop`)."""
    damaged: int
    late: int
    failed: int
    skipped: int
    retried: int
    read_bytes: int
    written_bytes: int
    queued_reads: int
    queued_writes: int
    """What waits for a thread of the tier's now."""
    open: bool
    last_error: str

    @property
    def dropped(self) -> int:
        return sum(self.drops.values())


class TierExecutor:
    """Runs the requests to one tier. Thread-safe."""

    def __init__(self, tier: Tier, policy: TierPolicy) -> None:
        self.tier, self.policy = tier, policy
        self.lookups, self.reads, self.writes = (CircuitBreaker(policy.failures, policy.cool_s) for _ in range(3))
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()
        self._last_error = ""
        self._lock, self._is_forked = threading.Lock(), False
        self._jobs = JobQueue(tier.name, policy.workers, policy.queue_jobs)
        register_after_fork(self)

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def count_drop(self, why: Drop, number: int) -> None:
        if number:
            with self._lock:
                self._drops[why] += number

    # ---- asking

    def contains_now(self, keys: Sequence[bytes]) -> NDArray[np.bool_] | None:
        """Which keys are stored, from a tier whose index is in memory; None if it is not, if it is in use by another
        thread now, or if the tier is paused."""
        ask = getattr(self.tier, "contains_now", None)
        if ask is None or self._is_forked or self.lookups.is_open or self.reads.is_open:
            return None
        with suppress(TierError):
            found: NDArray[np.bool_] | None = ask(keys)
            return found
        return None

    def touch(self, keys: Sequence[bytes], *, is_hit: bool) -> None:
        """Tell a tier that chooses what to evict that keys were used, in the caller's thread: that changes an index in
        memory. A tier that is paused is not told."""
        tell = getattr(self.tier, "touch", None)
        if tell is not None and not (self._is_forked or self.lookups.is_open or self.reads.is_open):
            with suppress(TierError):
                tell(keys, is_hit=is_hit)

    def start(self, breaker: CircuitBreaker, ask: Callable[[], T], wait_s: float = 0.0) -> Future[T] | None:
        """Start a request; None if the breaker skips the tier, or the write queue stays full for `wait_s`, or does not
        move for the deadline: then the tier hangs, which counts as a failure."""
        found_in_vain = breaker is self.lookups and self.reads.is_cooling
        if found_in_vain or self._is_forked or not breaker.passes():
            self.count("skipped")
            return None

        def job() -> T:
            return self._tried(breaker, ask, time.monotonic() + self.policy.deadline_s)

        if breaker is not self.writes or self.policy.inline:
            read = self._jobs.read(job)
            if self.policy.inline:
                read.exception()  # waits; `futures.wait` keeps the future locked when it is interrupted
            return read
        future = self._jobs.write(job, wait_s, self.policy.deadline_s)
        if future is None:
            self.count("skipped")
            if self._jobs.is_stalled(self.policy.deadline_s) and not breaker.is_open:
                breaker.failed()
        return future

    def store(
        self,
        keys: Sequence[bytes],
        blobs: Sequence[Blob],
        wait_s: float,
        lost: Callable[[Sequence[bytes]], None] = lambda _: None,
    ) -> Future[list[bool]] | None:
        """Start to write blobs. What is not stored, now or later, is counted by its reason, and told to `lost`."""

        def drop(why: Drop, dropped: Sequence[bytes]) -> None:
            self.count_drop(why, len(dropped))
            lost(dropped)

        def put() -> list[bool]:
            stored = self.tier.put(keys, blobs)
            self.count("stored", sum(stored))
            kept = zip(blobs, stored, strict=True)
            self.count("written_bytes", sum(blob.num_bytes for blob, is_kept in kept if is_kept))
            drop("no room", [key for key, is_kept in zip(keys, stored, strict=True) if not is_kept])
            return stored

        def ended(future: Future[list[bool]]) -> None:
            if future.cancelled() or future.exception():
                drop("late" if future.cancelled() else "failed", keys)

        why: Drop = "paused" if self.writes.is_open or self._is_forked else "queue full"
        future = self.start(self.writes, put, wait_s)
        if future is None:
            drop(why, keys)
        else:
            future.add_done_callback(ended)
        return future

    @property
    def patience_s(self) -> float:
        """How long a write without a budget waits for room in the queue."""
        return PATIENCE * self.policy.deadline_s

    def finish(self, breaker: CircuitBreaker, future: Future[T] | None, wait_s: float | None = None) -> T | None:
        """Wait for the result; None if it did not come in time, or the tier failed."""
        if future is None:
            return None
        deadline = self.policy.deadline_s
        wait_s = deadline if wait_s is None else max(0.0, min(wait_s, deadline))
        try:
            return future.result(wait_s)
        except Late:
            future.cancel()  # has an effect if the job is still queued
            self.count("late")
            # a request with a shorter budget than the tier's deadline does not count against the tier
            if wait_s == deadline:
                breaker.failed()
        except Exception:  # whatever the tier's library raises is a miss
            return None
        return None

    def _tried(self, breaker: CircuitBreaker, ask: Callable[[], T], until: float) -> T:
        """Try, and retry after a random pause; full and read-only tiers are not retried."""
        for attempt in range(self.policy.retries + 1):
            try:
                answer = ask()
            except PartlyRead as error:
                if not error.num_read:  # otherwise the tier works: what is lost was removed, and is not asked for again
                    breaker.failed()
                self._note(error)
                return cast(T, error.answer)
            except (TierFull, ReadOnly) as error:
                breaker.failed()
                self._note(error)
                raise
            except Exception as error:
                # Random, so that clients that failed together do not retry together.
                pause = self.policy.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                if attempt == self.policy.retries or time.monotonic() + pause > until:
                    breaker.failed()
                    self._note(error)
                    raise
                self.count("retried")
                time.sleep(pause)
            else:
                breaker.succeeded()
                return answer
        raise AssertionError("a last attempt returns or raises")

    def _note(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        self.count("failed")

    # ---- end

    def drain(self, wait_s: float) -> bool:
        """Wait until every write queued so far was tried; returns whether it was. In a forked child none is."""
        return self._is_forked or self._jobs.drain(wait_s)

    def drained(self) -> Future[None]:
        """As `drain`, for callers that must not block. One that no longer waits cancels the future."""
        return self._jobs.drained()

    def close(self, wait_s: float) -> bool:
        """Finish queued jobs and close the tier; returns whether it was closed. A tier that hangs for `wait_s`, or a
        second more in its own `close`, is abandoned as it is."""
        until = time.monotonic() + wait_s
        if not self._is_forked and not self._jobs.close(wait_s):
            return False
        closing = run_beside(self.tier.close, f"kvweave-{self.tier.name}-close")
        try:
            closing.result(max(CLOSE_S, until - time.monotonic()))
        except Late:
            return False
        return True

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: requests are skipped there."""
        self._lock, self._is_forked = threading.Lock(), True

    def stats(self) -> TierExecutorStats:
        with self._lock:
            count, drops = dict(self._counts), dict(self._drops)
        numbers = {name: count.get(name, 0) for name in COUNTED}
        queued_reads, queued_writes = self._jobs.queued
        is_open = any(breaker.is_open for breaker in (self.lookups, self.reads, self.writes))
        return TierExecutorStats(
            self.tier.stats(), **numbers, drops=drops, queued_reads=queued_reads, queued_writes=queued_writes,
            open=is_open, last_error=self._last_error,
        )  # fmt: skip

"""A stack of tiers, from near to far. A blob is read from the nearest tier that has it; a write goes to every tier
whose policy says so."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import TIMEOUT_MAX
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import PartlyRead, StoreError, TierError
from kvweave.store.batches import batches
from kvweave.store.blob import BlobCheck
from kvweave.store.closeable import Closeable
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes
from kvweave.store.removals import RemovalLog, follow
from kvweave.store.tier import ABSENT, UNREADABLE, Blob, Tier, whole
from kvweave.store.tier_executor import TierExecutor, TierExecutorStats, TierPolicy

NOWHERE = -1


class TierLookup(NamedTuple):
    """By key, the nearest tier that has it, `NOWHERE` for none; and whether any tier did not answer."""

    tiers: NDArray[np.int8]
    late: bool


class BlobRequest(NamedTuple):
    """A blob to fetch: its key and length, how to check its bytes, and the nearest tier that reported it."""

    key: bytes
    num_bytes: int
    check: Callable[[], BlobCheck]
    tier: int = 0


Fetched = list[Bytes | None]


@dataclass(frozen=True, slots=True)
class Budget:
    """The deadline of a request, over all tiers."""

    until: float | None

    @classmethod
    def of(cls, seconds: float | None) -> Budget:
        return cls(None if seconds is None or seconds >= TIMEOUT_MAX else time.monotonic() + float(seconds))

    @property
    def left_s(self) -> float | None:
        return None if self.until is None else self.until - time.monotonic()

    def within(self, seconds: float) -> float:
        """`seconds`, or what is left of the budget if that is less; no more than a lock can wait."""
        return float(min(seconds, TIMEOUT_MAX) if self.left_s is None else max(0.0, min(seconds, self.left_s)))

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing more is wanted, not even blobs that have arrived already."""
        return False

    @property
    def is_spent(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until


UNLIMITED = Budget(None)


class TierStack(Closeable):
    """Tiers with their policies, near ones first. Reads and writes never raise: a failing tier is a miss, and
    counted."""

    def __init__(self, *tiers: Tier | tuple[Tier, TierPolicy]) -> None:
        if not tiers:
            raise StoreError("a tier stack needs at least one tier")
        pairs = [tier if isinstance(tier, tuple) else (tier, TierPolicy()) for tier in tiers]
        self.executors = tuple(TierExecutor(tier, policy) for tier, policy in pairs)
        self._removals: RemovalLog | None = None

    # ---- reading

    def where(self, keys: Sequence[bytes], budget: Budget) -> TierLookup:
        """Ask each tier about the keys that nearer tiers lack. When the budget is spent, only tiers that answer at once
        are asked."""
        found, late = np.full(len(keys), NOWHERE, np.int8), False
        for number, executor in enumerate(self.executors):
            missing = np.flatnonzero(found == NOWHERE)
            if not len(missing):
                break
            asked = keys if len(missing) == len(keys) else [keys[i] for i in missing.tolist()]
            answer = self._contains(executor, asked, budget)
            if answer is not None:
                found[missing[answer]] = number
            late |= answer is None
        return TierLookup(found, late)

    @staticmethod
    def _contains(executor: TierExecutor, keys: Sequence[bytes], budget: Budget) -> NDArray[np.bool_] | None:
        """Which keys a tier has; None if it does not answer in time."""
        answer = executor.contains_now(keys)
        if answer is None and not budget.is_spent:
            future = executor.start(executor.lookups, partial(executor.tier.contains, keys))
            answer = executor.finish(executor.lookups, future, budget.left_s)
        return answer

    def fetch(self, wants: Sequence[BlobRequest], budget: Budget) -> Iterator[tuple[int, Bytes]]:
        """The index and blob of each request that could be served, in any order. What a tier cannot deliver is
        requested from the next."""
        left = dict.fromkeys(range(len(wants)))
        for number, executor in enumerate(self.executors):
            mine = [i for i in left if wants[i].tier <= number]
            for i, blob in self._fetch(executor, [(i, wants[i]) for i in mine], budget):
                del left[i]
                yield i, blob
                self._promote(number, wants[i].key, blob)
            if not left or budget.is_spent:
                return

    def _fetch(
        self, executor: TierExecutor, wants: list[tuple[int, BlobRequest]], budget: Budget
    ) -> Iterator[tuple[int, Bytes]]:
        """Fetch in batches, several in flight, yielding each as it completes. A batch that is late ends the fetch."""
        flying: deque[tuple[list[tuple[int, BlobRequest]], Future[Fetched] | None]] = deque()
        waiting = batches(wants, lambda pair: pair[1].num_bytes)
        while not budget.is_spent:
            batch = next(waiting, None)
            if batch is not None:
                ask = partial(_read, executor, [want for _, want in batch])
                flying.append((batch, executor.start(executor.reads, ask, budget.within(executor.policy.deadline_s))))
            elif not flying:
                return
            if batch is None or len(flying) > executor.policy.workers:
                landing = flying.popleft()
                yield from self._land(executor, *landing, budget)
                if landing[1] is not None and (landing[1].cancelled() or not landing[1].done()):
                    break
        for _, future in flying:
            if future:
                future.cancel()

    def _land(
        self,
        executor: TierExecutor,
        batch: list[tuple[int, BlobRequest]],
        future: Future[Fetched] | None,
        budget: Budget,
    ) -> Iterator[tuple[int, Bytes]]:
        blobs = executor.finish(executor.reads, future, budget.left_s) or [None] * len(batch)
        hits = sum(blob is not None for blob in blobs)
        executor.count("hits", hits)
        executor.count("misses", len(batch) - hits)
        executor.count("read_bytes", sum(blob.nbytes for blob in blobs if blob is not None))
        yield from ((i, blob) for (i, _), blob in zip(batch, blobs, strict=True) if blob is not None)

    def _promote(self, number: int, key: bytes, blob: Bytes) -> None:
        for executor in self.executors[:number]:
            if executor.policy.promote:
                executor.store([key], [whole(blob)], 0.0, self._lost)

    # ---- writing

    def missing(self, keys: Sequence[bytes], budget: Budget) -> NDArray[np.bool_] | None:
        """Which keys are missing in some tier that is written to and answers; None if no such tier answers."""
        written = [executor for executor in self.executors if executor.policy.write != "off"]
        answers = [self._contains(executor, keys, budget) for executor in written]
        present = [answer for answer in answers if answer is not None]
        if written and not present:
            return None
        lacking: NDArray[np.bool_] = ~np.logical_and.reduce(present, axis=0) if present else np.zeros(len(keys), bool)
        return lacking

    def touch(self, keys: Sequence[bytes], *, is_hit: bool = False) -> None:
        """Tell all tiers that these keys were used, earlier keys as the most recent. `is_hit`: a lookup found them, and
        its hit needs them."""
        for executor in self.executors if keys else ():
            executor.touch(keys, is_hit=is_hit)

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob], budget: Budget) -> NDArray[np.bool_]:
        """Store in all tiers; returns which blobs at least one tier stored or queued. Blobs must not be changed
        afterwards."""
        kept = np.zeros(len(keys), bool)
        waiting = []
        for executor in self.executors:
            if executor.policy.write != "off":
                future = executor.store(keys, blobs, budget.within(executor.patience_s), self._lost)
                waiting.append((executor, future))
        for executor, future in waiting:
            if executor.policy.write == "through":
                answer = executor.finish(executor.writes, future, budget.left_s)
                kept |= np.zeros(len(keys), bool) if answer is None else np.array(answer, bool)
            else:
                kept |= future is not None
        return kept

    def _lost(self, keys: Sequence[bytes]) -> None:
        """These were queued for a tier, and may have been announced as stored."""
        if self._removals and keys:
            self._removals.add(keys)

    # ---- the rest

    def follow_removals(self, log: RemovalLog) -> None:
        """From now on add to `log` what leaves any tier that can know, or was queued for one and not kept."""
        self._removals = log
        for executor in self.executors:
            follow(executor.tier, log)

    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for queued writes; returns whether all were tried in time."""
        budget = Budget.of(wait_s)
        drained = [executor.drain(budget.within(wait_s)) for executor in self.executors]
        return all(drained)

    def stats(self) -> tuple[TierExecutorStats, ...]:
        return tuple(executor.stats() for executor in self.executors)

    def close(self, wait_s: float = 60.0) -> bool:
        """Finish queued writes and close every tier; returns whether none hung."""
        budget = Budget.of(wait_s)
        closed = [executor.close(budget.within(wait_s)) for executor in self.executors]
        return all(closed)


def _read(executor: TierExecutor, wants: Sequence[BlobRequest]) -> Fetched:
    """The blobs that passed their checks."""
    buffers = [aligned(want.num_bytes) for want in wants]
    result = read(executor, [want.key for want in wants], buffers, [want.check() for want in wants])
    fetched = [buffer if is_fine else None for buffer, is_fine in zip(buffers, result.fine, strict=True)]
    if result.trouble:
        raise PartlyRead(result.trouble, fetched, sum(result.fine))
    return fetched


class ReadResult(NamedTuple):
    """Which blobs are intact, and the tier's error if some could not be read."""

    fine: list[bool]
    trouble: str = ""


def read(
    executor: TierExecutor, keys: Sequence[bytes], into: Sequence[Bytes], checks: Sequence[BlobCheck]
) -> ReadResult:
    """Read blobs from a tier, all at once. Damaged and unreadable ones are deleted there, so that they are stored
    again."""
    lengths = executor.tier.get(keys, into, checks)
    found = zip(lengths, into, checks, strict=True)
    fine = [length == buffer.nbytes and check.passes(buffer) for length, buffer, check in found]
    answers = zip(keys, lengths, fine, strict=True)
    damaged = [key for key, length, is_fine in answers if not is_fine and length != ABSENT]
    if damaged:
        executor.count("damaged", len(damaged))
        with suppress(TierError):  # a failed delete must not lose the blobs that were read
            executor.tier.delete(damaged)
    unreadable = lengths.count(UNREADABLE)
    return ReadResult(
        fine, f"tier {executor.tier.name!r}: {unreadable} of {len(keys)} cannot be read" if unreadable else ""
    )

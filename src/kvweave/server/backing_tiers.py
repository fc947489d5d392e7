"""The tiers behind the arena. Methods may block for long: they are called from threads, never from the event loop,
except `where` with a budget of 0, and `flush`, a coroutine: a flush may wait for an hour, and would hold a thread.

    fetch   read from the nearest tier that has the blob into an extent of the arena, check it, then make it visible
    keep    write from the arena, which keeps the extent pinned until the write is done

A job that hangs keeps its extent pinned, so it can never write into an extent that was given to another key. Its caller
has timed out by then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvweave.copying import Numbers
from kvweave.errors import PartlyRead
from kvweave.server.description import TierDescription
from kvweave.server.protocol import NO_ROOM
from kvweave.server.report import TierCleared
from kvweave.server.shared_arena import SharedArena
from kvweave.store import TierExecutorStats, TierStack
from kvweave.store.batches import batches
from kvweave.store.tier import KeyFilter, whole
from kvweave.store.tier_executor import TierExecutor
from kvweave.store.tier_stack import NOWHERE, BlobRequest, Budget, read

ROOM_POLL_S = 0.005
AT_ONCE = 64
"""Blobs of one request to a tier: a remote tier fetches them together, and the first are visible before all have
come."""


class BackingTiers:
    """A stack of tiers behind an arena. `changed` is called, from any thread, when extents or leases were freed."""

    def __init__(self, arena: SharedArena, tier_stack: TierStack | None, changed: Callable[[], None]) -> None:
        self._arena, self._tier_stack, self._changed = arena, tier_stack, changed
        self.executors: tuple[TierExecutor, ...] = tier_stack.executors if tier_stack else ()
        self._in_flight: dict[bytes, Future[None]] = {}
        self._lock = threading.Lock()

    @property
    def patience_s(self) -> float:
        """How long a request without a budget goes on, where there are tiers."""
        return max(executor.patience_s for executor in self.executors)

    def where(self, keys: Sequence[bytes], budget: Budget) -> tuple[NDArray[np.bool_], bool]:
        """Which keys any tier has, and whether any tier did not answer in time. With a budget of 0 this does not wait:
        only tiers that answer at once are asked."""
        if self._tier_stack is None:
            return np.zeros(len(keys), bool), False
        where = self._tier_stack.where(keys, budget)
        return where.tiers != NOWHERE, where.late

    def touch(self, keys: Sequence[bytes], *, is_hit: bool) -> None:
        """Tell all tiers that keys were used."""
        if self._tier_stack is not None:
            self._tier_stack.touch(keys, is_hit=is_hit)

    # ---- into the arena

    def fetch(self, wants: Sequence[BlobRequest], budget: Budget) -> bool:
        """Wait until these blobs are in the arena, as far as they can be read within the budget; returns whether any
        has come. Others may have evicted it since."""
        if self._tier_stack is None:
            return False
        arrived, (mine, others) = 0, self._claim(wants)
        try:
            tiers = self._tier_stack.where([want.key for want in mine], budget).tiers
            for number, executor in enumerate(self.executors):
                there = [mine[i] for i in np.flatnonzero(tiers == number).tolist()]
                arrived += self._fetch_from(executor, there, budget)
        finally:
            self._release(mine)
        ended = wait(others, budget.within(max(executor.policy.deadline_s for executor in self.executors))).done
        return bool(arrived or ended)

    def _claim(self, wants: Sequence[BlobRequest]) -> tuple[list[BlobRequest], list[Future[None]]]:
        """The requests that no other client has in flight, and futures for the others."""
        with self._lock:
            others = [self._in_flight[want.key] for want in wants if want.key in self._in_flight]
            mine = [want for key, want in {want.key: want for want in wants}.items() if key not in self._in_flight]
            self._in_flight.update(dict.fromkeys((want.key for want in mine), Future()))
        return mine, others

    def _release(self, wants: Sequence[BlobRequest]) -> None:
        with self._lock:
            futures = {self._in_flight.pop(want.key) for want in wants}
        for future in futures:
            future.set_result(None)

    def _fetch_from(self, executor: TierExecutor, wants: Sequence[BlobRequest], budget: Budget) -> int:
        """The number of blobs that were read in time."""
        turns = batches(wants, lambda want: want.num_bytes)
        flying = [self._start_read(executor, batch, budget) for batch in turns]
        return sum(executor.finish(executor.reads, future, budget.left_s) or 0 for future in flying)

    def _start_read(self, executor: TierExecutor, wants: Sequence[BlobRequest], budget: Budget) -> Future[int] | None:
        left = self._reserved(wants, budget.within(executor.policy.deadline_s))
        future = executor.start(executor.reads, partial(self._read, executor, left)) if left else None
        if future is None:
            self._abandon(left)
        else:
            future.add_done_callback(lambda _: self._abandon(left))
        return future

    def _reserved(self, wants: Sequence[BlobRequest], wait_s: float) -> list[tuple[BlobRequest, int]]:
        """Places of the blobs that are not stored; those that a client is writing, too: it may be killed, or stopped.
        While there is not enough room this waits, and holds nothing: two that wait for each other's places would wait
        in vain."""
        until, keys, lengths = time.monotonic() + wait_s, [w.key for w in wants], [w.num_bytes for w in wants]
        while True:
            was_held = self._arena.is_held
            starts = self._arena.reserve(keys, lengths, beside=True).tolist()
            places = [(want, start) for want, start in zip(wants, starts, strict=True) if start >= 0]
            may_come = was_held and max(lengths) <= self._arena.num_bytes
            if NO_ROOM not in starts or not may_come or time.monotonic() >= until:
                return places
            self._abandon(places)
            time.sleep(ROOM_POLL_S)

    def _abandon(self, places: list[tuple[BlobRequest, int]]) -> None:
        """Free places of blobs that are not written."""
        for want, start in places:
            self._arena.abandon(want.key, start, want.num_bytes)
        self._changed()

    def _read(self, executor: TierExecutor, left: list[tuple[BlobRequest, int]]) -> int:
        """Read into the arena, in a thread of the executor; returns how many blobs are intact. What was read or is
        damaged is taken off the list: a second attempt reads the others."""
        trouble, arrived = "", 0
        while left:
            some = left[-AT_ONCE:]
            places = [self._arena.view(start, want.num_bytes) for want, start in some]
            fine, unread = read(executor, [want.key for want, _ in some], places, [want.check() for want, _ in some])
            trouble = unread or trouble
            del left[-AT_ONCE:]
            for (want, start), is_fine in zip(some, fine, strict=True):
                (self._arena.commit if is_fine else self._arena.abandon)(want.key, start, want.num_bytes)
            arrived += sum(fine)
            executor.count("hits", sum(fine))
            executor.count("misses", len(fine) - sum(fine))
            executor.count("read_bytes", sum(place.nbytes for place, good in zip(places, fine, strict=True) if good))
        if trouble:
            raise PartlyRead(trouble, arrived, arrived)
        return arrived

    # ---- out of the arena

    def keep(self, keys: Sequence[bytes], budget: Budget) -> None:
        """Queue blobs of the arena for every tier that is written to. If a queue has no room they are dropped for
        that tier, and counted. The caller has pinned them: otherwise they could be evicted before their turn."""
        for executor in self.executors:
            if executor.policy.write != "off":
                pinned = self._arena.pin(keys)
                entries = list(zip(keys, pinned.lengths.tolist(), strict=True))
                self._arena.unpin(pinned.slots)
                for batch in batches(entries, itemgetter(1)):
                    self._queue(executor, [key for key, _ in batch], budget.within(executor.patience_s))

    def _queue(self, executor: TierExecutor, keys: Sequence[bytes], wait_s: float) -> None:
        """Queue one job, which pins its extents until it is done."""
        pinned = self._arena.pin(keys)
        entries = zip(keys, pinned.starts.tolist(), pinned.lengths.tolist(), strict=True)
        here = {key: whole(self._arena.view(start, length)) for key, start, length in entries if start >= 0}
        future = executor.store([*here], [*here.values()], wait_s) if here else None
        if future is None:
            self._arena.unpin(pinned.slots)
        else:
            future.add_done_callback(partial(self._kept, pinned.slots))

    def _kept(self, slots: Numbers, _: Future[list[bool]]) -> None:
        self._arena.unpin(slots)
        self._changed()

    # ---- the rest

    def forget_damaged(self, wants: Sequence[BlobRequest]) -> int:
        """Delete damaged blobs from the arena; returns how many were."""
        return sum(self._forget_damaged(want) for want in wants)

    def _forget_damaged(self, want: BlobRequest) -> int:
        pinned = self._arena.pin([want.key])
        try:
            if not len(pinned.slots):
                return 0
            if want.check().passes(self._arena.view(int(pinned.starts[0]), int(pinned.lengths[0]))):
                return 0
        finally:
            self._arena.unpin(pinned.slots)
        return self._arena.delete([want.key])

    def clear(self, key_filter: KeyFilter, wait_s: float) -> list[TierCleared]:
        """Delete these keys in every tier, after its queued writes."""
        budget = Budget.of(wait_s)
        return [self._clear(executor, key_filter, budget) for executor in self.executors]

    def _clear(self, executor: TierExecutor, key_filter: KeyFilter, budget: Budget) -> TierCleared:
        drained = executor.drain(budget.within(executor.policy.deadline_s))
        future = executor.start(
            executor.writes, partial(executor.tier.clear, key_filter), budget.within(executor.policy.deadline_s)
        )
        if future is None:
            return TierCleared(executor.tier.name, 0, "skipped after failures, or busy: try again")
        try:
            gone = future.result(budget.left_s)
        except TimeoutError:
            return TierCleared(executor.tier.name, 0, "not finished yet")
        except Exception as error:  # any exception of the tier's library
            return TierCleared(executor.tier.name, 0, str(error))
        return TierCleared(executor.tier.name, gone, "" if drained else "some writes were not finished before")

    def drain(self, wait_s: float) -> bool:
        """Write what is queued, and all blobs of the arena that a tier lacks; returns whether all were tried in
        time."""
        if self._tier_stack is None:
            return True
        budget, keys = Budget.of(wait_s), self._arena.keys()
        done = self._tier_stack.flush(wait_s)
        missing = self._tier_stack.missing(keys, budget)
        lacking = [keys[i] for i in np.flatnonzero(missing).tolist()] if missing is not None else []
        for first in range(0, len(lacking), AT_ONCE):
            self._keep_pinned(lacking[first : first + AT_ONCE], budget)
        return self._tier_stack.flush(budget.within(wait_s)) and done and missing is not None

    def _keep_pinned(self, keys: Sequence[bytes], budget: Budget) -> None:
        pinned = self._arena.pin(keys)
        try:
            self.keep(keys, budget)
        finally:
            self._arena.unpin(pinned.slots)

    async def flush(self, wait_s: float) -> bool:
        """Wait for queued writes; returns whether all were tried in time. When it is cancelled nothing waits on."""
        waiting = [asyncio.wrap_future(executor.drained()) for executor in self.executors]
        try:
            return not waiting or not (await asyncio.wait(waiting, timeout=wait_s))[1]
        finally:
            for each in waiting:
                each.cancel()

    def describe(self) -> list[TierDescription]:
        return [
            TierDescription(
                executor.tier.name,
                executor.tier.kind,
                executor.tier.stats().capacity_bytes,
                executor.policy.write,
                executor.policy.deadline_s,
            )
            for executor in self.executors
        ]

    def stats(self) -> tuple[TierExecutorStats, ...]:
        return self._tier_stack.stats() if self._tier_stack else ()

    def close(self, wait_s: float) -> bool:
        """Close the tiers; returns whether none hung."""
        return self._tier_stack.close(wait_s) if self._tier_stack else True

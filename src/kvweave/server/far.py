"""The tiers behind the arena. Everything here may take its time, and is called from threads, never from the loop.

    bring   read from the nearest tier that has it straight into an extent of the arena, check it, then show it
    keep    write out of the arena, which holds the extent until it is done

A job that hangs keeps its extent: it can never write into one that was given to somebody else. Whoever waited has gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import PartlyRead
from kvweave.server.description import TierDescription
from kvweave.server.report import TierCleared
from kvweave.server.shared import Places, SharedArena
from kvweave.store import Cascade, LaneStats
from kvweave.store.batches import batches
from kvweave.store.blob import Check
from kvweave.store.cascade import NOWHERE, Budget, read
from kvweave.store.lane import Lane
from kvweave.store.tier import Which, whole


class Want(NamedTuple):
    """A blob to bring: its key and length, and how to check its bytes."""

    key: bytes
    num_bytes: int
    check: Callable[[], Check]


AT_ONCE = 64
"""Blobs that a tier is asked for at a time: one that is far away brings them together, and some are shown early."""


class Far:
    """A cascade of tiers, behind an arena. `changed` is called, from any thread, when something was let go."""

    def __init__(self, arena: SharedArena, cascade: Cascade | None, changed: Callable[[], None]) -> None:
        self._arena, self._cascade, self._changed = arena, cascade, changed
        self.lanes: tuple[Lane, ...] = cascade.lanes if cascade else ()
        self._coming: dict[bytes, Future[None]] = {}
        self._lock = threading.Lock()

    def where(self, keys: Sequence[bytes], budget: Budget) -> tuple[NDArray[np.bool_], bool]:
        """Which keys some tier has, and whether some tier did not answer in time."""
        if self._cascade is None:
            return np.zeros(len(keys), bool), False
        where = self._cascade.where(keys, budget)
        return where.tiers != NOWHERE, where.late

    # ---- into the arena

    def bring(self, wants: Sequence[Want], budget: Budget) -> None:
        """Wait until these are in the arena, as far as they can be had in time."""
        if self._cascade is None:
            return
        mine, others = self._claim(wants)
        try:
            tiers = self._cascade.where([want.key for want in mine], budget).tiers
            for number, lane in enumerate(self.lanes):
                self._bring(lane, [mine[i] for i in np.flatnonzero(tiers == number).tolist()], budget)
        finally:
            self._let_go(mine)
        wait(others, budget.within(max(lane.policy.deadline_s for lane in self.lanes)))

    def _claim(self, wants: Sequence[Want]) -> tuple[list[Want], list[Future[None]]]:
        """Those that nobody brings yet, and those that somebody does."""
        with self._lock:
            others = [self._coming[want.key] for want in wants if want.key in self._coming]
            mine = [want for key, want in {want.key: want for want in wants}.items() if key not in self._coming]
            self._coming.update((want.key, Future()) for want in mine)
        return mine, others

    def _let_go(self, wants: Sequence[Want]) -> None:
        with self._lock:
            futures = [self._coming.pop(want.key) for want in wants]
        for future in futures:
            future.set_result(None)

    def _bring(self, lane: Lane, wants: Sequence[Want], budget: Budget) -> None:
        wait_s = budget.within(lane.policy.deadline_s)
        turns = batches(wants, lambda want: want.num_bytes)
        flying = [lane.start(lane.reads, partial(self._read, lane, batch), wait_s) for batch in turns]
        for future in flying:
            lane.finish(lane.reads, future, budget.left_s)

    def _read(self, lane: Lane, wants: Sequence[Want]) -> None:
        """In the lane's thread."""
        trouble = ""
        starts = self._arena.reserve([want.key for want in wants], [want.num_bytes for want in wants]).tolist()
        left = [(want, start) for want, start in zip(wants, starts, strict=True) if start >= 0]
        try:
            while left:
                some = left[-AT_ONCE:]
                places = [self._arena.view(start, want.num_bytes) for want, start in some]
                fine, unread = read(lane, [want.key for want, _ in some], places, [want.check() for want, _ in some])
                trouble = unread or trouble
                del left[-AT_ONCE:]
                for (want, start), is_fine in zip(some, fine, strict=True):
                    (self._arena.commit if is_fine else self._arena.abandon)(want.key, start, want.num_bytes)
                lane.count("hits", sum(fine))
                lane.count("misses", len(fine) - sum(fine))
        finally:
            for want, start in left:
                self._arena.abandon(want.key, start, want.num_bytes)
            self._changed()
        if trouble:
            raise PartlyRead(trouble, None)

    # ---- out of the arena

    def keep(self, keys: Sequence[bytes], wait_s: float = 0.0) -> None:
        """Queue what the arena holds of these for every tier that is written. No room in a queue: it is dropped there,
        and counted."""
        for lane in self.lanes:
            if lane.policy.write != "off":
                pinned = self._arena.pin(keys)
                entries = list(zip(keys, pinned.lengths.tolist(), strict=True))
                self._arena.unpin(pinned.slots)
                for batch in batches(entries, itemgetter(1)):
                    self._queue(lane, [key for key, _ in batch], wait_s)

    def _queue(self, lane: Lane, keys: Sequence[bytes], wait_s: float) -> None:
        """One job, which holds its extents until it is done."""
        pinned = self._arena.pin(keys)
        entries = zip(keys, pinned.starts.tolist(), pinned.lengths.tolist(), strict=True)
        here = [entry for entry in entries if entry[1] >= 0]
        future = lane.start(lane.writes, partial(self._write, lane, here), wait_s) if here else None
        if future is not None:
            future.add_done_callback(partial(self._kept, pinned.slots))
            return
        self._arena.unpin(pinned.slots)
        lane.count("dropped", len(keys))
        if here and wait_s and not lane.writes.is_open:  # nothing left its queue for so long: it hangs
            lane.writes.failed()

    def _write(self, lane: Lane, entries: Sequence[tuple[bytes, int, int]]) -> list[bool]:
        """In the lane's thread."""
        blobs = [whole(self._arena.view(start, length)) for _, start, length in entries]
        stored = lane.tier.put([key for key, _, _ in entries], blobs)
        lane.count("stored", sum(stored))
        lane.count("dropped", len(stored) - sum(stored))
        return stored

    def _kept(self, slots: Places, _: Future[list[bool]]) -> None:
        self._arena.unpin(slots)
        self._changed()

    # ---- the rest

    def forget_damaged(self, wants: Sequence[Want]) -> int:
        """Remove from the arena those that are not what they should be; how many."""
        return sum(self._forget_damaged(want) for want in wants)

    def _forget_damaged(self, want: Want) -> int:
        pinned = self._arena.pin([want.key])
        try:
            if not len(pinned.slots):
                return 0
            if want.check().passes(self._arena.view(int(pinned.starts[0]), int(pinned.lengths[0]))):
                return 0
        finally:
            self._arena.unpin(pinned.slots)
        return self._arena.delete([want.key])

    def clear(self, which: Which, wait_s: float) -> list[TierCleared]:
        """Empty every tier of these, after what is queued for it was written."""
        budget = Budget.of(wait_s)
        return [self._clear(lane, which, budget) for lane in self.lanes]

    def _clear(self, lane: Lane, which: Which, budget: Budget) -> TierCleared:
        drained = lane.drain(budget.within(lane.policy.deadline_s))
        future = lane.start(lane.writes, partial(lane.tier.clear, which), budget.within(lane.policy.deadline_s))
        if future is None:
            return TierCleared(lane.tier.name, 0, "it is left alone for now, or busy: try again")
        try:
            gone = future.result(budget.left_s)
        except TimeoutError:
            return TierCleared(lane.tier.name, 0, "it is still at it")
        except Exception as error:  # whatever a tier's library raises
            return TierCleared(lane.tier.name, 0, str(error))
        return TierCleared(lane.tier.name, gone, "" if drained else "something was still being written to it")

    def drain(self, wait_s: float) -> bool:
        """Write what is queued, and whatever else of the arena a tier lacks; whether all of it was tried in time."""
        if self._cascade is None:
            return True
        budget, keys = Budget.of(wait_s), self._arena.keys()
        done = self._cascade.flush(wait_s)
        lacking = [keys[i] for i in np.flatnonzero(self._cascade.missing(keys, budget)).tolist()]
        for first in range(0, len(lacking), 64):
            self.keep(lacking[first : first + 64], budget.within(wait_s))
        return self._cascade.flush(budget.within(wait_s)) and done

    def flush(self, wait_s: float) -> bool:
        return self._cascade.flush(wait_s) if self._cascade else True

    def describe(self) -> list[TierDescription]:
        return [
            TierDescription(
                lane.tier.name,
                lane.tier.kind,
                lane.tier.stats().capacity_bytes,
                lane.policy.write,
                lane.policy.deadline_s,
            )
            for lane in self.lanes
        ]

    def stats(self) -> tuple[LaneStats, ...]:
        return self._cascade.stats() if self._cascade else ()

    def close(self, wait_s: float) -> bool:
        """Whether no tier hung."""
        return self._cascade.close(wait_s) if self._cascade else True

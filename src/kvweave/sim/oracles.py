"""Oracles: what caches that know the future would have hit with the same bytes.

All of them are the same ideal cache: bytes are counted exactly (no super-pages, nothing held by running requests,
windows of neighbouring points counted apart), requests come one at a time, and each may find what the earlier ones
left; what the replay refuses, because it never fits, is refused here too (`Foresight`). They differ in where resume
points are, and in what is given up first:

    oracle      points                                             given up first
    placement   only where a later request will go on              least recently used; the rows of every request stay
                                                                   until they are the oldest
    belady      at the ends of prompts and sequences, and where    the point that is asked for last; what nobody asks
                a request parts from an earlier one                for is never kept
    both        only where a later request will go on              the point that is asked for last

A point that was given up takes along the rows that only it needs. Where rows suffice to go on (full attention alone)
points are everywhere, runs lose blocks from their end, `placement` is LRU over blocks, and `belady` and `both` are
Belady's MIN, the best that can be had. With states or windows `both` can be had, but need not be the best: no policy,
whatever it knows, does better than `bound` (upper_bound.py).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvweave.sim.foresight import Foresight, PlacedRequest, Run
from kvweave.sim.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Oracle:
    """`foresees_places`: points only where a later request goes on. `foresees_order`: farthest use goes first."""

    name: str
    foresees_places: bool
    foresees_order: bool


ORACLES = (Oracle("placement", True, False), Oracle("belady", False, True), Oracle("both", True, True))


class IdealCache:
    """The ideal cache. A run that ends at something worth keeping has an entry: its key, and whether one can go on from
    there; rows lie under an entry, at or below them."""

    def __init__(self, foresight: Foresight, geometry: Geometry, oracle: Oracle, capacity: int) -> None:
        self.foresight = foresight
        self.geometry = geometry
        self.oracle = oracle
        self.capacity = capacity
        self.num_bytes = 0
        count = foresight.num_runs
        self._rows = [0] * count
        """Blocks of each run that are there, from its start on."""
        self._keys: list[int | None] = [None] * count
        self._points = [False] * count
        """Whether its end has states and windows, so that one can go on from there."""
        self._entries = [0] * count
        """Entries at each run and below it."""
        self._order: list[tuple[int, int, int, Run]] = []

    def hits(self) -> list[int]:
        """The blocks that each request finds, in order."""
        return [self._request(number, placed) for number, placed in enumerate(self.foresight.requests)]

    def _request(self, number: int, placed: PlacedRequest) -> int:
        hit = self._find(placed)
        for run in placed.path:
            if (key := self._key(run, number, placed, hit)) is not None:
                self._keep(run, key, is_point=self._is_point(run, number, placed, hit))
        self._fill(placed)
        for run in reversed(placed.path):
            if self.oracle.foresees_order and (key := self._keys[run.number]) is not None and -key <= number:
                self._evict(run, partly=False)  # its last use was this one
        while self.num_bytes > self.capacity and self._order:
            key, _, _, run = heapq.heappop(self._order)
            if self._keys[run.number] == key:
                self._evict(run, partly=True)
        return hit

    def _find(self, placed: PlacedRequest) -> int:
        hit = 0
        for run in placed.path:
            whole = run.start + self._rows[run.number]
            if self.geometry.resumes_anywhere:
                hit = min(whole, placed.limit)
            elif self._points[run.number] and run.end <= placed.limit:
                hit = run.end
            if whole < run.end:
                break
        return hit

    # ---- what a request leaves

    def _key(self, run: Run, number: int, placed: PlacedRequest, hit: int) -> int | None:
        """The key of the entry at the end of a run: the smallest goes first. None: no entry is made, or one that is
        there stays as it is."""
        if self.oracle.foresees_order:
            next_use = run.next_reuse(number) if self.geometry.resumes_anywhere else run.next_resume(number)
            return -next_use if next_use is not None and self._is_point(run, number, placed, hit) else None
        used = run is placed.path[-1] or run.end == hit or (run.end > hit and run.next_resume(number) is not None)
        return number if used else None

    def _is_point(self, run: Run, number: int, placed: PlacedRequest, hit: int) -> bool:
        """Whether one can go on from the end of a run now: it was kept, or is passed by what this request computes."""
        if self.geometry.resumes_anywhere or self._points[run.number]:
            return True
        if run.end <= hit:
            return False
        if self.oracle.foresees_places:
            return run.next_resume(number) is not None
        return run is placed.path[-1] or run.end in (placed.limit, placed.overlap)

    def _keep(self, run: Run, key: int, *, is_point: bool) -> None:
        at = run.number
        if self._keys[at] is None:
            self._count_entry(run, 1)
        if is_point and not self._points[at]:
            self._points[at] = True
            self.num_bytes += self.geometry.point_bytes(run.end)
        self._keys[at] = key
        heapq.heappush(self._order, (key, -run.end, at, run))  # of equal keys the deepest goes first

    def _fill(self, placed: PlacedRequest) -> None:
        """The rows of a request are there now, as far as an entry needs them."""
        for run in placed.path:
            if not self._entries[run.number]:
                return
            self.num_bytes += (run.end - run.start - self._rows[run.number]) * self.geometry.row_bytes
            self._rows[run.number] = run.end - run.start

    def _count_entry(self, run: Run, sign: int) -> None:
        at: Run | None = run
        while at is not None:
            self._entries[at.number] += sign
            at = at.parent

    # ---- what is given up

    def _evict(self, run: Run, *, partly: bool) -> None:
        """Give up the entry of a run and the rows that only it needs; `partly`: where rows alone are of use, no more of
        them than is lacking."""
        at, key = run.number, self._keys[run.number]
        assert key is not None
        was_point, self._keys[at], self._points[at] = self._points[at], None, False
        if was_point:
            self.num_bytes -= self.geometry.point_bytes(run.end)
        self._count_entry(run, -1)
        lower: Run | None = run
        while lower is not None and lower.parent is not None and not self._entries[lower.number]:
            self._cut(lower, keep_rest=partly and (self.geometry.resumes_anywhere or not was_point))
            if self._rows[lower.number]:
                self._keep(lower, key, is_point=self.geometry.resumes_anywhere)
                return
            lower = lower.parent

    def _cut(self, run: Run, *, keep_rest: bool) -> None:
        size = self.geometry.row_bytes
        lacking = -(-max(0, self.num_bytes - self.capacity) // size) if size and keep_rest else self._rows[run.number]
        gone = min(self._rows[run.number], lacking)
        self._rows[run.number] -= gone
        self.num_bytes -= gone * size


def oracle_hits(foresight: Foresight, geometry: Geometry, oracle: Oracle, capacity: int) -> list[int]:
    """The tokens that each request would have hit."""
    return [blocks * foresight.grid for blocks in IdealCache(foresight, geometry, oracle, capacity).hits()]

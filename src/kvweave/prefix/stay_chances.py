"""Which points stay when they are used, and which are the next to go: for caches of rows alone (docs/reuse-policy.md).

In a cache of a few prompts everything may be evicted shortly before it is asked for. Then it is better to keep some
points for long than all of them for a short time. Whether that is so is seen from what is asked for after it was
evicted: the rows that went last are remembered, as a number each.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import exp, log

from kvweave.prefix.hit_density import HitDensity
from kvweave.prefix.node import Node, Point, Tokens

MOST_RUNS = 4096
"""So many evicted runs are remembered."""
YOUNG = 4
"""A new point's density is taken so many octaves below the age of eviction: at younger ages little is known, and little
is evicted."""
SHARPNESS = 8.0
"""The chance to stay is the ratio of the two densities to this power."""
LEAST = 1 / 16
"""So many points of a class always stay, so that what is kept in vain is replaced."""
UPDATE = 32
"""Chances are worked out anew after so many evictions."""
COUNTED = 128
"""Where more points than so many wait, the lives of so many of them are counted."""
GOLDEN, SILVER = 0.6180339887498949, 0.41421356237309503
"""Multiples of them, without their whole part, are spread evenly over [0, 1)."""


class EvictedRun:
    """A run that was evicted: its class, when it was used last, its age when it came to wait, and where it ends; and
    its key among the others."""

    def __init__(self, key: int, number: int, last_used: int, began: int, end: int) -> None:
        self.key = key
        self.number = number
        self.last_used = last_used
        self.began = began
        self.end = end


class StayChances:
    """A point of class `number` stays with the chance `chances[number]`: 1 unless a new one is worth less than those
    that would be evicted for it."""

    def __init__(self, priors: Sequence[float], grid: int) -> None:
        self.chances = [1.0] * len(priors)
        self.density = HitDensity(priors)
        self._grid = grid
        self._runs: dict[int, EvictedRun] = {}
        """By a number of the first block that is gone."""
        self._last_runs: list[EvictedRun | None] = [None] * MOST_RUNS
        """A ring: the next one to be replaced is the oldest."""
        self._num_runs = 0
        self._share = 1.0
        """Of the lives, so many are counted: which, follows from the time of the last use."""
        self._num_cut = 0
        self._now = 0

    def stays(self, number: int, last_used: int) -> bool:
        """Whether a point stays that was used then: the same answer for all that is left of it when it is cut."""
        chance = self.chances[number]
        return chance >= 1.0 or (last_used * GOLDEN) % 1.0 < chance

    def _is_counted(self, last_used: int) -> bool:
        return self._share >= 1.0 or (last_used * SILVER) % 1.0 < self._share

    def hit(self, number: int, point: Point, now: int, share: float) -> None:
        if self._is_counted(point.last_used):
            self.density.end(number, point.queued - point.last_used, now - point.last_used, share)

    @property
    def is_due(self) -> bool:
        """Whether chances are to be worked out anew (`update`)."""
        return self._num_cut >= UPDATE and bool(self.density.densities)

    def update(self, next_to_go: list[tuple[int, int]], log_age: float, num_waiting: int) -> None:
        """Class and age of the next points to go of those that were to stay, which are evicted at about `log_age`."""
        self._num_cut = 0
        self._share = min(1.0, COUNTED / num_waiting)
        if not next_to_go:
            return
        price = exp(sum([log(self.density.at(number, age)) for number, age in next_to_go]) / len(next_to_go))
        young = 1 << max(0, round(log_age) - YOUNG)
        for number in range(len(self.chances)):
            ratio = min(1.0, self.density.at(number, young) / price)
            self.chances[number] = max(LEAST, ratio**SHARPNESS)

    # ---- what is remembered of evicted rows

    def cut(self, number: int, point: Point, start: int, now: int) -> None:
        """Of the leaf that a point ends, the rows from `start` on go."""
        self._now = now
        self._num_cut += 1
        if not self._is_counted(point.last_used):
            return
        node = point.node
        at = start - node.start
        key = hash((_namespace(node), start, node.tokens[at : at + self._grid].tobytes()))
        run = EvictedRun(key, number, point.last_used, point.queued - point.last_used, node.end)
        slot = self._num_runs % MOST_RUNS
        for before in (self._last_runs[slot], self._runs.get(key)):
            if before is not None and self._runs.get(before.key) is before:
                del self._runs[before.key]
                self._forget(before)
        self._runs[key] = self._last_runs[slot] = run
        self._num_runs += 1

    def _forget(self, run: EvictedRun) -> None:
        self.density.end(run.number, run.began, max(run.began, self._now - run.last_used), 0.0)

    def opened(self, namespace: Hashable, prompt: Tokens, found: int) -> None:
        """A prompt comes: the runs behind what it finds, one behind the other, would have been hit."""
        at, limit = found, len(prompt) - 1
        while at + self._grid <= limit:
            run = self._runs.pop(hash((namespace, at, prompt[at : at + self._grid].tobytes())), None)
            if run is None:
                return
            share = min(1.0, (limit - at) / max(1, run.end - at))
            self.density.end(run.number, run.began, max(run.began, self._now - run.last_used), share)
            at = max(run.end, at + self._grid)


def _namespace(node: Node) -> Hashable:
    while node.parent is not None:
        node = node.parent
    namespace: Hashable = node.namespace
    return namespace

"""`Adaptive`, the default policy: a weighted LRU whose weights are learned (docs/reuse-policy.md explains it).

Each point is of a class; a class has a weight, and its points age so many times more slowly. If the chance that a point
of age `a` is hit within the next moment is `weight / a`, the point whose weight / age is least is the one to evict. The
weight is counted: hits, over the time that evictable points were there to be hit, a moment at age `a` counting `1 / a`.
Eviction only ends the time of a point, it does not distort the count, so nothing has to be known of what is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

from kvweave.pool import PagedGroup
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import Kind, Point
from kvweave.prefix.policy import Order

CLASSES = (
    "spaced",
    "branch",
    "prompt end, nothing found",
    "prompt end, less than half found",
    "prompt end, half or more found",
    "answer end, nothing found",
    "answer end, less than half found",
    "answer end, half or more found",
    "continued once",
    "hit once",
    "hit 2 or 3 times",
    "hit 4 times or more",
)
"""Points never hit, by their kind and by how much of its prompt the request that made them had found; then points that
were hit. `continued`: by a prompt that went on from the end of a leaf, as the next turn of a conversation does."""
FIRST_HIT = 8
OCTAVES = 40
BELIEF = 12.0
"""A weight is what it is for all points at first; so many hits are worth as much as that belief."""
HIT_PRIOR = 4.0
"""How many times more slowly points that were hit age at first."""
PRIORS = [HIT_PRIOR if number >= FIRST_HIT else 1.0 for number in range(len(CLASSES))]
MOST_HITS = 4096.0
"""Beyond so many, all counts are halved: what was long ago is forgotten."""


def class_of(point: Point) -> int:
    hits = point.hits
    if hits:
        return FIRST_HIT + (0 if point.continued and hits == 1 else min(hits.bit_length(), 3))
    if point.kind == Kind.SPACED:
        return 0
    if point.kind == Kind.BRANCH:
        return 1
    found = 0 if not point.found else 1 if 2 * point.found < point.position else 2
    return (2 if point.kind == Kind.PROMPT else 5) + found


class Adaptive(Order):
    num_queues = len(CLASSES)

    def __init__(self, groups: Sequence[PagedGroup]) -> None:
        super().__init__(groups)
        if any(group.is_state for group in groups):
            self.size_power = 1.0  # a state is its point's own; pages of windows are shared with neighbours
        self.weights = [*PRIORS]
        self.hits = [[0.0] * OCTAVES for _ in CLASSES]
        """By class and octave of age."""
        self.exposure = [[0.0] * OCTAVES for _ in CLASSES]
        """Points x moments, each divided by the first age of the octave."""
        self.num_hits = 0.0
        self._last_census = 0
        self._log_age = 0.0
        """Moving average of log2 of the age at which points are evicted."""
        self._num_evictions = 0

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:  # noqa: ARG002
        return class_of(point), point.last_used

    def value(self, entry: Any, is_tip: bool, now: int) -> Any:
        point: Point = entry[2]
        age = now - point.last_used + 1
        if point.kind == Kind.SPACED:
            return -float(age)  # before all others
        return self.weights[class_of(point)] * self.density(point, is_tip) / age

    # ---- learning

    def on_hit(self, point: Point, position: int, now: int) -> None:
        if point.queue is not None:  # those that nobody could evict are not counted
            start = point.node.start
            share = min(1.0, (position - start) / max(1, point.position - start))
            self.hits[class_of(point)][_octave(now - point.last_used)] += share
            self.num_hits += share

    def on_evict(self, point: Point, now: int) -> None:
        self._num_evictions += 1
        self._log_age += (log2(now - point.last_used + 1) - self._log_age) / min(self._num_evictions, 64)

    def on_census(self, queues: list[EvictionQueue], now: int) -> None:
        moments, self._last_census = now - self._last_census, now
        for number, queue in enumerate(queues):
            exposure, left, octave = self.exposure[number % len(CLASSES)], queue.size, 0
            while left:
                older = queue.count_before(now - (2 << octave) + 2)
                exposure[octave] += (left - older) * moments / (1 << octave)
                left, octave = older, octave + 1
        self._fit()

    def _fit(self) -> None:
        """Weights from the counts at ages about that of eviction, in proportion to what is believed at first."""
        first = max(0, round(self._log_age) - 1)
        hits = [sum(row[first:]) for row in self.hits]
        exposure = [sum(row[first:]) for row in self.exposure]
        expected = sum([prior * time for prior, time in zip(PRIORS[1:], exposure[1:], strict=True)])
        scale = (sum(hits[1:]) + 1) / (expected + 1)
        for number, prior in enumerate(PRIORS):
            belief = BELIEF / (prior * scale)
            self.weights[number] = (hits[number] + BELIEF) / (exposure[number] + belief) / scale
        if self.num_hits > MOST_HITS:
            self._forget()

    def _forget(self) -> None:
        self.num_hits /= 2
        self.hits = [[count / 2 for count in row] for row in self.hits]
        self.exposure = [[time / 2 for time in row] for row in self.exposure]


def _octave(age: int) -> int:
    return (age + 1).bit_length() - 1

"""`Adaptive`, the default policy: greedy-dual whose weights are learned (docs/reuse-policy.md explains it).

A point is kept for a time in proportion to its gain: the weight of its class x the tokens that it saves for its bytes.
As in every greedy-dual policy that time passes as memory is needed: the key of a point is the key of what had been
evicted last when the point was used, plus its gain. `ClassWeights` counts what a class is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvweave.pool import PagedGroup
from kvweave.prefix.class_weights import ClassWeights
from kvweave.prefix.node import Kind, Point
from kvweave.prefix.policy import Order, freed_bytes, row_bytes

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
    "rest of a cut run",
)
"""Points never hit, by their kind and by how much of its prompt the request that made them had found; then points that
were hit. `continued`: by a prompt that went on from the end of a leaf, as the next turn of a conversation does. Last,
what is left of a leaf whose end was evicted, until it is hit."""
FIRST_HIT = 8
REST = len(CLASSES) - 1
MOST_WEIGHT = 4.0
"""What was hit before is believed to be worth so much, and nothing ever more: what is kept in vain goes soon enough."""
SPACED_PRIOR = 0.1
"""Points that nobody has asked for are believed to be worth next to nothing, until hits say otherwise."""
PRIORS = [SPACED_PRIOR, *[MOST_WEIGHT if FIRST_HIT <= number < REST else 1.0 for number in range(1, len(CLASSES))]]


def class_of(point: Point) -> int:
    hits = point.hits
    if point.cut:
        return REST
    if hits:
        return FIRST_HIT + (0 if point.continued and hits == 1 else min(hits.bit_length(), 3))
    if point.kind == Kind.SPACED:
        return 0
    if point.kind == Kind.BRANCH:
        return 1
    found = 0 if not point.found else 1 if 2 * point.found < point.position else 2
    return (2 if point.kind == Kind.PROMPT else 5) + found


class Adaptive(Order):
    def __init__(self, groups: Sequence[PagedGroup]) -> None:
        super().__init__(groups)
        self.classes = ClassWeights(PRIORS, MOST_WEIGHT)
        self._has_rows_alone = all(group.is_full for group in groups)

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:  # noqa: ARG002
        return 0, (point.floor + self.classes.weights[class_of(point)] * self._density(point, is_tip), point.last_used)

    def _density(self, point: Point, is_tip: bool) -> float:
        """The tokens that a point saves for its bytes, 1 where these are rows alone. Spaced points above it do not
        count as what there is without it: they are many, and nobody may ever ask for one."""
        if self._has_rows_alone:
            return 1.0
        tokens = point.position - point.position_above(skip_spaced=True)
        return max(1, row_bytes(self.groups, tokens)) / max(1, freed_bytes(self.groups, tokens, is_tip))

    # ---- learning

    def on_hit(self, point: Point, position: int, now: int) -> None:
        waiting = point.node.first_spaced() if point.kind == Kind.SPACED else point
        if waiting is not None and waiting.queue is not None:  # those that nobody could evict are not counted
            start = point.node.start
            share = min(1.0, (position - start) / max(1, point.position - start))
            self.classes.hit(class_of(waiting), now - waiting.last_used, share)
            self._end(waiting, now)

    def on_evict(self, point: Point, now: int) -> None:
        self.floor = max(self.floor, point.entry[0][0])
        self._end(point, now)
        self.classes.evicted(now - point.last_used)

    def _end(self, point: Point, now: int) -> None:
        self.classes.end(class_of(point), point.queued - point.last_used, now - point.last_used)

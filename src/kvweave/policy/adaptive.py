"""`Adaptive`, the default policy: greedy-dual whose weights are learned (docs/reuse-policy.md explains it).

A point is kept for a time in proportion to its gain: the weight of its class x the tokens that it saves for its bytes.
As in every greedy-dual policy that time passes as memory is needed: the key of a point is the key of what had been
evicted last when the point was used, plus its gain. `ClassWeights` counts what a class is worth.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from kvweave.policy.age_counts import GoingOn
from kvweave.policy.class_weights import ClassWeights
from kvweave.policy.evicted_runs import EvictedRun, EvictedRuns
from kvweave.policy.policy import freed_bytes
from kvweave.policy.stay_chances import StayChances
from kvweave.pool import PagedGroup
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import Kind, Node, PastUse, Point, Tokens
from kvweave.prefix.order import Order

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
FIRST_HIT: Final = 8
REST: Final = len(CLASSES) - 1
MOST_WEIGHT: Final = 4.0
"""What was hit before is believed to be worth so much, and no more: what is kept in vain goes soon enough."""
MOST_PROVEN: Final = 64.0
"""Nothing is worth more, whatever hits at great ages say."""
SPACED_PRIOR: Final = 0.1
"""Points that nobody has asked for are believed to be worth next to nothing, until hits say otherwise."""
PRIORS = [SPACED_PRIOR, *[MOST_WEIGHT if FIRST_HIT <= number < REST else 1.0 for number in range(1, len(CLASSES))]]

SAMPLE: Final = 128
"""Of more points than so many that wait in a queue, each of these stands for several when weights are worked out."""
NEXT: Final = 8
LOOKED_AT: Final = 32
"""What a new point is compared with: so many of the points that are evicted next, among so many."""


def class_of(point: Point) -> int:
    return REST if point.cut else use_of(point)


def use_of(point: Point) -> int:
    """The class of a point, whether its run was cut or not."""
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
    def __init__(self, groups: Sequence[PagedGroup]) -> None:
        super().__init__(groups)
        has_rows_alone = all(group.is_full for group in groups)
        self.classes = ClassWeights(PRIORS, MOST_WEIGHT, MOST_PROVEN)
        self.stay_chances = StayChances(PRIORS) if has_rows_alone else None
        self.evicted_runs = EvictedRuns(self.grid)
        rows = [group for group in groups if group.is_full]
        self._row_bytes = sum([group.page_bytes * self.grid // group.slot_tokens for group in rows]) / self.grid
        """Of a token."""

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:  # noqa: ARG002
        number, stay_chances = class_of(point), self.stay_chances
        if stay_chances is None:
            gain = self.classes.gain(number, self._density(point, is_tip))
        else:
            gain = self.classes.weights[number] if stay_chances.stays(use_of(point), point.last_used) else 0.0
        return 0, (point.floor + gain, point.last_used)

    def _density(self, point: Point, is_tip: bool) -> float:
        """The tokens that a point saves for its bytes. Spaced points above it do not count as what there is without
        it: they are many, and nobody may ever ask for one."""
        above = point.node.last_point(point.position - 1, skip_spaced=True)
        tokens = point.position - (0 if above is None else above.position)
        return max(1, tokens * self._row_bytes) / max(1, freed_bytes(self.groups, tokens, is_tip))

    # ---- learning

    def choose(self, queues: list[EvictionQueue], now: int) -> Point | None:
        tips = queues[0]
        if self.classes.is_due:
            self.classes.fit(self._waiting(now))
        if self.stay_chances is not None and self.stay_chances.is_due and tips.size:
            next_to_go, gone = self._next_to_go(tips, now), self.evicted_runs.going_on
            self.stay_chances.update(next_to_go, self.classes.log_age, tips.size, gone)
        return super().choose(queues, now)

    def _waiting(self, now: int) -> list[GoingOn]:
        """A sample of the points that wait."""
        sample = list[GoingOn]()
        for queue in self.queues:
            each = 1 + queue.size // SAMPLE
            for point in queue.every(each):
                began, age = point.queued - point.last_used, now - point.last_used
                sample.append((class_of(point), began, age, float(each)))
        return sample

    def _next_to_go(self, queue: EvictionQueue, now: int) -> list[tuple[int, int]]:
        """Class and age of some points that were to stay and are evicted next."""
        points = [queue.at(index) for index in range(min(LOOKED_AT, queue.size))]
        staying = [point for point in points if point.entry[0] > point.floor]
        return [(use_of(point), now - point.last_used) for point in staying[:NEXT]]

    def on_hit(self, point: Point, position: int, now: int) -> None:
        waiting = point.node.first_spaced() if point.kind == Kind.SPACED else point
        if waiting is not None and waiting.queue is not None:  # those that nobody could evict are not counted
            start = point.node.start
            share = min(1.0, (position - start) / max(1, point.position - start))
            number = class_of(waiting)
            self.classes.hit(number, now - waiting.last_used, share)
            self._end(waiting, now)
            if self.stay_chances is not None:
                self.stay_chances.hit(use_of(waiting), waiting, now, share)

    def on_evict(self, point: Point, now: int) -> None:
        key: float = point.entry[0]
        self.floor = max(self.floor, key)
        self._end(point, now)
        if key > point.floor:  # it was to stay
            self.classes.evicted(now - point.last_used, gain=key - point.floor)

    def on_cut(self, point: Point, node: Node, start: int, now: int) -> None:
        stay_chances = self.stay_chances
        has_places = stay_chances is None or point.hits > 0
        is_remembered = has_places or (stay_chances is not None and stay_chances.is_counted(point.last_used))
        forgotten = self.evicted_runs.add(use_of(point), point, node, start, has_places) if is_remembered else []
        if stay_chances is not None:
            stay_chances.evicted(now, forgotten)

    def on_open(self, namespace: Hashable, prompt: Tokens, found: int, rows: int) -> dict[int, PastUse]:  # noqa: ARG002
        past, stay_chances = dict[int, PastUse](), self.stay_chances
        runs = self.evicted_runs.take(namespace, prompt, rows)
        for run in runs:
            if run.hits and run.left_at == run.end:
                past[run.end] = PastUse(run.hits)
            if stay_chances is not None:
                stay_chances.missed(run, min(1.0, (len(prompt) - 1 - run.start) / (run.end - run.start)))
        if runs and stay_chances is None:
            self._hit_again(runs[-1], len(prompt), past)
        return past

    def _hit_again(self, run: EvictedRun, num_prompt: int, past: dict[int, PastUse]) -> None:
        """A prompt would have gone on from where it leaves an evicted run: a point there has one hit more. Where
        it is the next turn of a conversation there is one only while such points are worth more than an average one."""
        whole = run.left_at == run.end
        continued = whole and not run.hits and run.left_at + self.grid < num_prompt
        if not continued or self.classes.weights[FIRST_HIT] >= 1.0:
            past[run.left_at] = PastUse(1 + (run.hits if whole else 0), continued)

    def _end(self, point: Point, now: int) -> None:
        self.classes.end(class_of(point), point.queued - point.last_used, now - point.last_used)
        if self.stay_chances is not None and self.classes.is_due:
            self.classes.fit()

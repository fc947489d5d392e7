"""The default policy: what it learns, and that it is LRU where there is nothing to learn."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvweave.cache import Cache
from kvweave.prefix import Kind
from kvweave.prefix.adaptive import CLASSES, FIRST_HIT, HIT_PRIOR, MOST_HITS, OCTAVES, Adaptive, class_of
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import Node, Point
from kvweave.prefix.policy import CENSUS
from tests.cache.plans import full_plan
from tests.prefix.test_own_policy import run

NOTHING_FOUND, MUCH_FOUND = CLASSES.index("answer end, nothing found"), CLASSES.index("answer end, half or more found")


def a_point(kind: Kind = Kind.ANSWER, hits: int = 0, *, found: int = 0, continued: bool = False) -> Point:
    point = Point(Node(0, None, 0, np.zeros(100, np.int32), []), 100, kind, ())
    point.hits, point.found, point.continued = hits, found, continued
    return point


@pytest.mark.parametrize(
    ("point", "name"),
    [
        (a_point(Kind.SPACED), "spaced"),
        (a_point(Kind.BRANCH), "branch"),
        (a_point(Kind.PROMPT), "prompt end, nothing found"),
        (a_point(Kind.PROMPT, found=49), "prompt end, less than half found"),
        (a_point(Kind.ANSWER, found=50), "answer end, half or more found"),
        (a_point(Kind.BRANCH, 1, continued=True), "continued once"),
        (a_point(Kind.BRANCH, 1), "hit once"),
        (a_point(Kind.BRANCH, 3, continued=True), "hit 2 or 3 times"),
        (a_point(Kind.BRANCH, 9), "hit 4 times or more"),
    ],
)
def test_every_point_has_a_class(point: Point, name: str) -> None:
    assert CLASSES[class_of(point)] == name


def test_where_nothing_is_ever_hit_it_is_lru() -> None:
    rng, contents = random.Random(1), []
    prompts = [[number, *rng.choices(range(50), k=rng.randrange(1, 40))] for number in range(300)]
    for policy in ("adaptive", "lru"):
        cache = Cache(full_plan(pages=60), policy=policy)
        for prompt in prompts:
            run(cache, prompt)
        contents.append([cache.lookup([*prompt, 0]) for prompt in prompts])
    assert contents[0] == contents[1]


def adaptive_after(hits_of: dict[int, float]) -> Adaptive:
    """After 200 points of two classes were there for long, and a share of each was hit at an age of 300."""
    order, now = Adaptive([]), 0
    queues = [EvictionQueue(is_tips=True) for _ in CLASSES]
    points = {
        number: [a_point(found=found) for _ in range(200)] for number, found in ((NOTHING_FOUND, 0), (MUCH_FOUND, 80))
    }
    for number, mine in points.items():
        for point in mine:
            queues[number].add(point, 0)
    for _ in range(40):
        order.on_evict(a_point(), 400)
    for now in range(CENSUS, 5 * CENSUS, CENSUS):
        order.on_census(queues, now)
    for number, share in hits_of.items():
        for point in points[number][: int(share * 200)]:
            order.on_hit(point, 100, 300)
    order.on_census(queues, now + CENSUS)
    return order


def test_a_class_that_is_asked_for_more_often_ages_more_slowly() -> None:
    weights = adaptive_after({NOTHING_FOUND: 0.5, MUCH_FOUND: 0.05}).weights
    assert weights[NOTHING_FOUND] > 3 * weights[MUCH_FOUND]
    weights = adaptive_after({NOTHING_FOUND: 0.05, MUCH_FOUND: 0.5}).weights
    assert weights[MUCH_FOUND] > 3 * weights[NOTHING_FOUND]


def test_a_class_of_which_nothing_is_known_keeps_its_place_among_the_others() -> None:
    weights = adaptive_after({NOTHING_FOUND: 0.2, MUCH_FOUND: 0.2}).weights
    assert weights[NOTHING_FOUND] == pytest.approx(weights[MUCH_FOUND])
    assert weights[NOTHING_FOUND] == pytest.approx(1, rel=0.1)
    assert weights[FIRST_HIT:] == pytest.approx([HIT_PRIOR] * 4)


def value_of(order: Adaptive, point: Point, age: int) -> float:
    point.last_used, point.weight = 1000 - age, 1.0
    return float(order.value((0, 0, point), is_tip=True, now=1000))


def test_a_greater_weight_outweighs_a_greater_age_and_spaced_points_go_first() -> None:
    order = Adaptive([])
    assert value_of(order, a_point(), 10) > value_of(order, a_point(found=80), 20)
    order.weights[MUCH_FOUND] = 3.0
    assert value_of(order, a_point(), 10) < value_of(order, a_point(found=80), 20)
    assert value_of(order, a_point(Kind.SPACED), 1) < value_of(order, a_point(), 900)
    assert value_of(order, a_point(Kind.SPACED), 1) > value_of(order, a_point(Kind.SPACED), 2)


def test_the_time_of_a_point_counts_by_its_age() -> None:
    order, queues = Adaptive([]), [EvictionQueue(is_tips=True) for _ in CLASSES]
    queues[NOTHING_FOUND].add(a_point(), 0)
    queues[NOTHING_FOUND].add(a_point(), 1020)
    order.on_census(queues, 1024)
    counted = {octave: time for octave, time in enumerate(order.exposure[NOTHING_FOUND]) if time}
    assert counted == {10: 1024 / 1024, 2: 1024 / 4}


def test_what_a_prompt_uses_of_a_run_counts_by_its_share() -> None:
    order = Adaptive([])
    point, queue = a_point(), EvictionQueue(is_tips=True)
    order.on_hit(point, 100, 7)
    assert not order.num_hits, "nobody could have evicted it"
    queue.add(point, 0)
    order.on_hit(point, 25, 7)
    assert order.num_hits == pytest.approx(0.25)


def test_its_memory_is_bounded_and_what_was_long_ago_is_forgotten() -> None:
    order, queues = Adaptive([]), [EvictionQueue(is_tips=True) for _ in CLASSES]
    point = a_point()
    queues[NOTHING_FOUND].add(point, 0)
    for number in range(3 * int(MOST_HITS)):
        order.on_hit(point, 100, 1 << (number % 30))
        if number % 100 == 0:
            order.on_census(queues, 1 << 30)
    assert order.num_hits <= MOST_HITS + 100
    assert [len(row) for row in order.hits] == [OCTAVES] * len(CLASSES)
    assert all(weight > 0 for weight in order.weights)

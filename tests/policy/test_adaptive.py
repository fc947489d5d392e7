"""The default policy: what it learns, and that it is LRU where there is nothing to learn."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from kvweave.cache import Cache
from kvweave.policy.adaptive import CLASSES, MOST_PROVEN, MOST_WEIGHT, PRIORS, REST, SPACED_PRIOR, Adaptive, class_of
from kvweave.policy.age_counts import FIT, MOST_HITS, OCTAVES, GoingOn
from kvweave.policy.class_weights import MOST_FIT, MOST_RISE, ClassWeights
from kvweave.prefix import Kind
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import Node, Point
from kvweave.spec import Full, State
from tests.cache.plans import full_plan, group, plan_of
from tests.policy.test_user_policy import run

NOTHING_FOUND, MUCH_FOUND = CLASSES.index("answer end, nothing found"), CLASSES.index("answer end, half or more found")


def a_point(
    kind: Kind = Kind.ANSWER, hits: int = 0, *, found: int = 0, continued: bool = False, cut: bool = False
) -> Point:
    point = Point(Node(0, None, 0, np.zeros(100, np.int32), []), 100, kind, ())
    point.hits, point.found, point.continued, point.cut = hits, found, continued, cut
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
        (a_point(Kind.BRANCH, 9, cut=True), "rest of a cut run"),
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


def wait(order: Adaptive, queue: EvictionQueue, point: Point, now: int, *, is_tip: bool = True) -> float:
    """A point is used, and waits; its key."""
    point.last_used, point.floor = now, order.floor
    return queued(order, queue, point, now, is_tip=is_tip)


def queued(order: Adaptive, queue: EvictionQueue, point: Point, now: int, *, is_tip: bool = True) -> float:
    point.queued = now
    _, key = order.place(point, is_tip, now)
    queue.add(point, key)
    return float(key[0])


def adaptive_after(hits_of: dict[int, float]) -> Adaptive:
    """After 200 points of two classes waited: a share of each was hit at an age of 300, the others evicted at 400."""
    order, queue = Adaptive([]), EvictionQueue(is_tips=True)
    for number, found in ((NOTHING_FOUND, 0), (MUCH_FOUND, 80)):
        for index in range(200):
            point = a_point(found=found)
            wait(order, queue, point, 1000)
            if index < hits_of[number] * 200:
                order.on_hit(point, 100, 1300)
            else:
                order.on_evict(point, 1400)
    for _ in range(FIT):  # until the weights are worked out
        order.on_evict(point, 1400)
    return order


def test_a_class_that_is_asked_for_more_often_is_kept_longer() -> None:
    weights = adaptive_after({NOTHING_FOUND: 0.5, MUCH_FOUND: 0.05}).classes.weights
    assert weights[NOTHING_FOUND] > 2 * weights[MUCH_FOUND]
    weights = adaptive_after({NOTHING_FOUND: 0.05, MUCH_FOUND: 0.8}).classes.weights
    assert weights[MUCH_FOUND] > 2 * weights[NOTHING_FOUND]


def test_a_class_of_which_nothing_is_known_keeps_its_place_among_the_others() -> None:
    weights = adaptive_after({NOTHING_FOUND: 0.2, MUCH_FOUND: 0.2}).classes.weights
    for number, (weight, prior) in enumerate(zip(weights, PRIORS, strict=True)):
        if number not in (NOTHING_FOUND, MUCH_FOUND):
            assert weight == pytest.approx(prior)


def popular(order: Adaptive, hits_at: dict[int, int]) -> float:
    """The weight of a class of which all members are hit, at some octaves of age; of another few ever are."""
    queue, point = EvictionQueue(is_tips=True), a_point(found=80)
    wait(order, queue, point, 0)
    for _ in range(FIT):
        order.on_evict(point, 400)
    for octave, count in hits_at.items():
        order.classes.hit(NOTHING_FOUND, (1 << octave) - 1, count)
        order.classes.end(NOTHING_FOUND, 0, (1 << octave) - 1, count)
    order.classes.end(MUCH_FOUND, 0, (1 << 9) - 1, 100000)
    order.classes.fit()
    return order.classes.weights[NOTHING_FOUND]


def with_states() -> Adaptive:
    return Adaptive(Cache(plan_of(group("full", Full()), group("state", State()))).state.prefix.tree.groups)


def test_no_weight_is_greater_than_the_most() -> None:
    assert popular(Adaptive([]), {9: 100}) == MOST_WEIGHT


def test_what_is_still_hit_at_great_ages_may_weigh_more() -> None:
    for order in (Adaptive([]), with_states()):
        assert 2 * MOST_WEIGHT < popular(order, {9: 100, 12: 1000}) <= MOST_PROVEN
    assert popular(Adaptive([]), {9: 100, 12: 10}) < 2 * MOST_WEIGHT, "a few hits prove little"


def test_what_waits_in_vain_counts_before_it_is_evicted() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=4096), policy="adaptive")
    order = cache.state.prefix.order
    assert isinstance(order, Adaptive)
    for number in range(40):
        run(cache, [number] * 20)
    for _ in range(5000):
        cache.state.prefix.queues.tick()
    number = CLASSES.index("prompt end, nothing found")
    order.classes.hit(MUCH_FOUND, 100, 40)
    order.classes.end(MUCH_FOUND, 0, 100, FIT)
    assert order.classes.is_due
    assert cache.state.prefix.evict_next(1)
    assert not order.classes.is_due
    assert order.classes.weights[number] < 0.5 * order.classes.weights[MUCH_FOUND]


def test_what_waits_is_looked_at_less_often_as_counts_grow() -> None:
    def gaps(waiting: list[GoingOn]) -> list[float]:
        classes, fits = ClassWeights([1.0], MOST_WEIGHT), [0.0]
        while classes.num_ended < 16 * MOST_FIT:
            classes.end(0, 0, 100)
            if classes.is_due:
                classes.fit(waiting)
                fits.append(classes.num_ended)
        return [after - before for before, after in pairwise(fits)]

    assert {*gaps([])} == {FIT}
    looked = gaps([(0, 0, 100, 1.0)])
    assert (looked[0], looked[-1]) == (FIT, MOST_FIT)
    assert looked == sorted(looked)


def seen(hits_at: dict[int, int], *, waited: int = 2000) -> ClassWeights:
    """Members of two classes waited up to an age of 2^15; of class 0 some were hit, at some octaves of age, of class 1
    one in ten. A member is evicted at an age of 2^9, at a gain of 1."""
    classes = ClassWeights([1.0, 1.0], MOST_WEIGHT)
    for octave, count in hits_at.items():
        classes.hit(0, (1 << octave) - 1, count)
    for octave in range(8, 15):
        classes.hit(1, (1 << octave) - 1, waited / 10)
    for number in (0, 1):
        classes.end(number, 0, (1 << 15) - 1, waited)
        for _ in range(10 * FIT):  # averages move slowly
            classes.evicted((1 << 9) - 1)
    classes.fit([(0, 0, 0, 1.0)])
    return classes


def test_a_gain_ends_where_hits_do() -> None:
    """Hits of octaves 8 to 11 alone: a dense member would be kept for long after the last of them."""
    classes = seen(dict.fromkeys(range(8, 11), 800))
    steady = seen(dict.fromkeys(range(8, 15), 343))
    assert classes.weights[0] == pytest.approx(steady.weights[0], rel=0.01)
    assert classes.gain(0, 1.0) <= steady.gain(0, 1.0)
    assert classes.gain(0, 8.0) == pytest.approx(4.0), "up to an age of 2^11, where hits end"
    assert steady.gain(0, 8.0) > 8.0


def test_a_gain_grows_little_with_what_is_hit_late() -> None:
    late = seen({14: 2400})
    assert late.gain(0, 8.0) == pytest.approx(8.0 * MOST_RISE * late.weights[0])


def test_a_small_belief_is_unlearned_by_fewer_hits() -> None:
    weights = []
    for prior in (0.04, 0.4):
        classes = ClassWeights([prior, 1.0], MOST_WEIGHT)
        classes.hit(0, 255, 8)
        classes.end(0, 0, 255, 64)
        classes.hit(1, 255, 8)
        classes.end(1, 0, 255, 64)
        classes.fit()
        weights.append(classes.weights[0] / classes.weights[1])
    assert weights[0] > 0.2, "after 8 hits it is five times what is believed at first"
    assert weights[1] > weights[0]


def test_a_gain_counts_from_what_was_evicted_last() -> None:
    order, queue = Adaptive([]), EvictionQueue(is_tips=True)
    first = a_point()
    assert wait(order, queue, first, 1) == 1.0
    assert wait(order, queue, a_point(hits=1), 1) == MOST_WEIGHT
    order.on_evict(first, 2)
    assert wait(order, queue, a_point(), 2) == 2.0


def test_time_counts_from_the_last_use_however_late_a_point_comes_to_wait() -> None:
    order, queue = Adaptive([]), EvictionQueue(is_tips=True)
    child, parent = a_point(), a_point(cut=True)
    wait(order, queue, child, 5)
    parent.last_used = 5
    order.on_evict(child, 20)
    assert queued(order, queue, parent, 20) == child.entry[0], "it is the next to go"
    order.on_hit(parent, 100, 68)
    assert order.classes.hits[REST][6] == 1.0, "it was hit at an age of 63"
    assert order.classes.began[REST][4] == 1.0, "it came to wait at an age of 15"


def test_what_is_left_of_a_run_inherits_the_time_of_its_end() -> None:
    cache = Cache(full_plan(pages=12), policy="adaptive")
    run(cache, [*range(40)])
    run(cache, [*range(100, 120)])
    first = cache.state.prefix.tree.match("", np.arange(40, dtype=np.int32)).node
    second = cache.state.prefix.tree.match("", np.arange(100, 120, dtype=np.int32)).node
    assert first
    assert second
    assert first.points[-1].cut
    assert first.points[-1].floor == 0.0
    assert second.points[-1].floor > 0.0


def test_a_hit_makes_a_run_whole_again() -> None:
    cache = Cache(full_plan(pages=12), policy="adaptive")
    prompt = [*range(40)]
    run(cache, prompt)
    run(cache, [*range(100, 120)])
    node = cache.state.prefix.tree.match("", np.array(prompt, np.int32)).node
    assert node
    assert node.points[-1].cut, "the end of the first prompt was evicted"
    run(cache, prompt[: node.end + 1])
    assert not any(point.cut for point in node.points)


def test_what_a_state_saves_does_not_depend_on_spaced_ones_above_it() -> None:
    node = Node(0, Node(0, None, 0, np.zeros(0, np.int32), []), 0, np.zeros(96, np.int32), [])
    for position, kind in ((16, Kind.BRANCH), (32, Kind.SPACED), (64, Kind.SPACED), (96, Kind.PROMPT)):
        node.points.append(Point(node, position, kind, ()))
    assert node.last_point(node.points[3].position - 1) is node.points[2]
    assert node.last_point(node.points[3].position - 1, skip_spaced=True) is node.points[0]
    order = Adaptive(Cache(plan_of(group("full", Full()), group("state", State()))).state.prefix.tree.groups)
    keys = [order.place(node.points[number], is_tip=False, now=0)[1][0] for number in (2, 3)]
    assert keys[1] == pytest.approx(80 / 48 * keys[0] / SPACED_PRIOR)


def test_what_a_prompt_uses_of_a_run_counts_by_its_share() -> None:
    order = Adaptive([])
    point, queue = a_point(), EvictionQueue(is_tips=True)
    order.on_hit(point, 100, 7)
    assert not order.classes.num_hits, "nobody could have evicted it"
    wait(order, queue, point, 0)
    order.on_hit(point, 25, 7)
    assert order.classes.num_hits == pytest.approx(0.25)


def test_the_spaced_points_of_a_run_are_hit_together() -> None:
    order, queue, first = Adaptive([]), EvictionQueue(is_tips=False), a_point(Kind.SPACED)
    first.position = 50
    second = Point(first.node, 100, Kind.SPACED, ())
    first.node.points = [first, second]
    order.on_hit(second, 100, 7)
    assert not order.classes.num_hits
    wait(order, queue, first, 0, is_tip=False)
    order.on_hit(second, 100, 7)
    assert order.classes.hits[0][3] == 1.0


def test_its_memory_is_bounded_and_what_was_long_ago_is_forgotten() -> None:
    order, queue, point = Adaptive([]), EvictionQueue(is_tips=True), a_point()
    wait(order, queue, point, 0)
    for number in range(3 * int(MOST_HITS)):
        order.on_hit(point, 100, 1 << (number % 30))
    assert order.classes.num_hits <= MOST_HITS + FIT
    for table in (order.classes.hits, order.classes.began, order.classes.ended):
        assert [len(row) for row in table] == [OCTAVES] * len(CLASSES)
    assert all(weight > 0 for weight in order.classes.weights)

"""What is remembered of evicted rows: prompts that come back to them, and the hits of points that are made again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvweave.cache import Cache
from kvweave.plan import Plan
from kvweave.policy import evicted_runs
from kvweave.policy.adaptive import FIRST_HIT, Adaptive
from kvweave.policy.evicted_runs import EvictedRuns
from kvweave.prefix import Kind, PastUse, Point
from kvweave.spec import Full, LayerCache, State, Window
from tests.cache.plans import full_plan, group, plan_of
from tests.policy.test_user_policy import run

DOCUMENT = [*range(1000, 1024)]


def order_of(cache: Cache) -> Adaptive:
    order = cache.state.prefix.order
    assert isinstance(order, Adaptive)
    return order


def point_after(cache: Cache, tokens: list[int]) -> Point | None:
    """The point at the end of some tokens, if they are cached and a run ends there."""
    match = cache.state.prefix.tree.match("", np.array(tokens, np.int32))
    return match.node.point_at(len(tokens)) if match.node and match.length == len(tokens) else None


def point_in(cache: Cache, tokens: list[int]) -> Point | None:
    """The point behind some tokens, if they are cached and there is one."""
    match = cache.state.prefix.tree.match("", np.array(tokens, np.int32))
    return match.node.point_at(len(tokens)) if match.node else None


def ask(cache: Cache, question: int) -> None:
    run(cache, [*DOCUMENT, *[question] * 8])


def forget(cache: Cache, tokens: list[int] = DOCUMENT) -> None:
    """Other prompts, until nothing of some tokens is left."""
    number = 0
    while cache.state.prefix.tree.match("", np.array(tokens, np.int32)).length:
        number += 1
        run(cache, [2000 + number] * 40)


def asked_before(plan: Plan, questions: int) -> Cache:
    """A cache in which so many questions about a document were asked, and all of it was evicted since."""
    cache = Cache(plan, policy="adaptive")
    for question in range(questions):
        ask(cache, question)
    forget(cache)
    return cache


def test_the_end_of_a_shared_prefix_comes_back_with_its_hits() -> None:
    cache = asked_before(full_plan(pages=24), questions=4)
    ask(cache, 10)
    point = point_after(cache, DOCUMENT)
    assert point, "the run of the document ends where the questions began"
    assert point.hits == 3
    ask(cache, 11)
    assert point.hits == 4


def test_a_prompt_that_nobody_shares_comes_back_as_a_new_one() -> None:
    cache = asked_before(full_plan(pages=24), questions=1)
    ask(cache, 10)
    assert point_after(cache, DOCUMENT) is None


def test_a_conversation_that_goes_on_after_its_eviction_leaves_no_point_at_its_old_end() -> None:
    cache, turn = Cache(full_plan(pages=24), policy="adaptive"), [*range(16)]
    run(cache, turn)
    run(cache, [*turn, *[1] * 8])
    point = point_after(cache, turn)
    assert point
    assert point.continued
    forget(cache, turn)
    run(cache, [*turn, *[1] * 8, *[2] * 8])
    assert point_after(cache, turn) is None


def test_another_prompt_with_the_same_start_is_not_taken_for_the_document() -> None:
    cache = Cache(full_plan(pages=24), policy="adaptive")
    for question in range(4):
        ask(cache, question)
    order, point = order_of(cache), point_after(cache, DOCUMENT)
    assert point
    for prompt, hits in (
        ([*DOCUMENT[:12], *[5] * 20], {}),
        (DOCUMENT, {}),
        ([*DOCUMENT, 1], {len(DOCUMENT): PastUse(3)}),
    ):
        order.evicted_runs.add(0, point, point.node, 0, True)
        assert order.on_open("", np.array(prompt, np.int32), 0, 0) == hits


def test_another_namespace_has_a_memory_of_its_own() -> None:
    cache = asked_before(full_plan(pages=24), questions=4)
    sequence = cache.open([*DOCUMENT, 1], namespace="another")
    assert not sequence.remembered
    cache.close(sequence)
    sequence = cache.open([*DOCUMENT, 1])
    assert sequence.remembered == {len(DOCUMENT): PastUse(3)}
    cache.close(sequence)


def test_a_prompt_that_looks_again_makes_the_same_points() -> None:
    cache = asked_before(full_plan(pages=24), questions=4)
    waiting = cache.open([*DOCUMENT, *[1] * 8])
    run(cache, [*DOCUMENT[:8], 1])
    assert cache.rematch(waiting) == 8
    assert waiting.remembered == {len(DOCUMENT): PastUse(3)}
    cache.close(waiting)


def test_a_fork_makes_the_same_points() -> None:
    cache = asked_before(full_plan(pages=24), questions=4)
    sequence = cache.open([*DOCUMENT, *[1] * 8])
    (child,), _ = cache.fork(sequence)
    assert child.remembered == sequence.remembered
    cache.close(child)
    cache.close(sequence)


BESIDE_ROWS = (group("state", State()), group("window", Window(6)))


@pytest.mark.parametrize("beside", BESIDE_ROWS)
def test_a_prompt_leaves_a_point_where_it_parts_from_one_that_was_evicted(beside: LayerCache) -> None:
    cache = asked_before(plan_of(group("full", Full()), beside, pages=24), questions=1)
    ask(cache, 10)
    point = point_in(cache, DOCUMENT)
    assert point, "the document ends where the two questions part"
    assert (point.kind, point.hits) == (Kind.BRANCH, 1)
    assert cache.lookup([*DOCUMENT, *[11] * 8]) == len(DOCUMENT)


@pytest.mark.parametrize("beside", BESIDE_ROWS)
def test_a_point_that_comes_back_with_states_or_windows_has_a_hit_more(beside: LayerCache) -> None:
    cache = asked_before(plan_of(group("full", Full()), beside, pages=24), questions=4)
    ask(cache, 10)
    point = point_in(cache, DOCUMENT)
    assert point
    assert point.hits == 3, "the first question left no point there, the second made it, two hit it; and one came back"


@pytest.mark.parametrize(("weight", "is_left"), [(1.0, True), (0.9, False)])
def test_a_next_turn_after_eviction_leaves_a_point_if_such_points_are_worth_an_average_one(
    weight: float, is_left: bool
) -> None:
    cache = asked_before(plan_of(group("full", Full()), group("state", State()), pages=24), questions=1)
    order_of(cache).classes.weights[FIRST_HIT] = weight
    end = len(DOCUMENT) + 4
    sequence = cache.open([*DOCUMENT, *[0] * 4, *[1] * 12])
    assert sequence.remembered == ({end: PastUse(1, continued=True)} if is_left else {})
    cache.close(sequence)


def test_the_point_of_a_next_turn_that_comes_back_is_known_as_one() -> None:
    cache = asked_before(plan_of(group("full", Full()), group("state", State()), pages=24), questions=1)
    order_of(cache).classes.weights[FIRST_HIT] = 1.0
    run(cache, [*DOCUMENT, *[0] * 4, *[1] * 12])
    point = point_in(cache, [*DOCUMENT, *[0] * 4])
    assert point
    assert (point.hits, point.continued) == (1, True)


def test_a_hit_stops_before_a_point_that_comes_back_where_blocks_are_dropped() -> None:
    cache = asked_before(plan_of(group("full", Full()), group("state", State()), pages=24), questions=1)
    sequence = cache.open([*DOCUMENT, *[10] * 8], drop_last_blocks=1)
    assert sequence.remembered == {len(DOCUMENT) - cache.grid: PastUse(1)}
    cache.close(sequence)


def test_the_end_of_a_leaf_goes_without_the_point_above_it() -> None:
    cache = asked_before(plan_of(group("full", Full()), group("state", State()), pages=24), questions=1)
    ask(cache, 10)
    prefix, point = cache.state.prefix, point_in(cache, DOCUMENT)
    assert point
    assert point.node.end > len(DOCUMENT), "a part of the question is in the same run"
    for leaf in (*point.node.children.values(), point.node):
        prefix._evict(leaf.points[-1], leaf.end)
    assert point.alive
    assert point.node.end == len(DOCUMENT)


def test_rows_above_an_evicted_point_that_go_with_it_are_remembered() -> None:
    """The point at the end of the prompt goes before that of the answer, and the prompt's rows with the latter."""
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=64), policy="adaptive")
    answer = cache.open(DOCUMENT)
    for count in (20, 4, 8):
        iter(cache.extend(answer, count, tokens=None if answer.length < len(DOCUMENT) else [7] * count))
        iter(cache.commit(answer))
    cache.close(answer)
    prefix = cache.state.prefix
    (node, *_), points = prefix.tree.nodes(), [point for node in prefix.tree.nodes() for point in node.points]
    for point in points[:-1]:
        prefix.drop_point(point)
    assert node.children, "the answer is a run of its own"
    prefix.evict_next(4)
    assert not [*prefix.tree.nodes()]
    assert order_of(cache).on_open("", np.array([*DOCUMENT, 1], np.int32), 0, 0) == {len(DOCUMENT): PastUse(1)}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted_runs, "MOST_RUNS", 20)
    cache, rng = Cache(full_plan(pages=12), policy="adaptive"), random.Random(1)
    for number in range(200):
        run(cache, [number, *rng.choices(range(50), k=30)])
    runs = order_of(cache).evicted_runs
    assert 10 < len(runs._runs) <= 20
    assert len(runs._last) == 20
    assert [*runs._runs.values()] == sorted(runs._runs.values(), key=lambda run: run.last_used), "the last ones"


def test_runs_that_are_forgotten_are_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted_runs, "MOST_RUNS", 2)
    cache = Cache(full_plan(pages=24), policy="adaptive")
    for number in range(3):
        run(cache, [number] * 8)
    points = [point for node in cache.state.prefix.tree.nodes() for point in node.points]
    runs = EvictedRuns(cache.grid)
    assert [len(runs.add(0, points[index], points[index].node, 0, True)) for index in (0, 0, 1, 2)] == [0, 1, 0, 1]


def test_few_long_runs_are_remembered_as_their_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted_runs, "MOST_BYTES", 120)
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=12), policy="adaptive")
    for number in range(100):
        run(cache, [number] * 40)
    runs = order_of(cache).evicted_runs
    assert 0 < sum(len(run.last_tokens) for run in runs._last) == runs._num_bytes <= 120


def share_hit(policy: str) -> float:
    """Four documents, one of them in every seventh request, between prompts that come once, in memory for six."""
    cache, rng, found, asked = Cache(full_plan(pages=60), policy=policy), random.Random(2), 0, 0
    for number in range(2000):
        document = rng.randrange(4) if rng.random() < 0.15 else 4 + number
        prompt = [*[document] * 32, *[10000 + number] * 4]
        if number > 1000:
            found, asked = found + cache.lookup(prompt), asked + len(prompt)
        run(cache, prompt)
    return found / asked


def test_what_is_asked_for_again_and_again_is_kept_though_it_was_evicted_each_time() -> None:
    assert share_hit("lru") < 0.06
    assert share_hit("adaptive") > 0.9 * share_hit("lfu") > 0.1

"""What is remembered of evicted rows: prompts that come back to them, and the hits of points that are made again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvweave.cache import Cache
from kvweave.plan import Plan
from kvweave.policy import evicted_runs
from kvweave.policy.adaptive import Adaptive
from kvweave.policy.evicted_runs import EvictedRuns
from kvweave.prefix import Point
from kvweave.spec import Full, State
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


def ask(cache: Cache, question: int) -> None:
    run(cache, [*DOCUMENT, *[question] * 8])


def forget(cache: Cache, tokens: list[int] = DOCUMENT) -> None:
    """Other prompts, until nothing of some tokens is left."""
    number = 0
    while cache.lookup([*tokens, 0]):
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
        ([*DOCUMENT, 1], {len(DOCUMENT): 3}),
    ):
        order.evicted_runs.add(0, point, 0)
        assert order.on_open("", np.array(prompt, np.int32), 0) == hits


def test_another_namespace_has_a_memory_of_its_own() -> None:
    cache = asked_before(full_plan(pages=24), questions=4)
    sequence = cache.open([*DOCUMENT, 1], namespace="another")
    assert not sequence.remembered
    cache.close(sequence)
    sequence = cache.open([*DOCUMENT, 1])
    assert sequence.remembered == {len(DOCUMENT): 3}
    cache.close(sequence)


def test_a_fork_makes_the_same_points() -> None:
    cache = asked_before(full_plan(pages=24), questions=4)
    sequence = cache.open([*DOCUMENT, *[1] * 8])
    (child,), _ = cache.fork(sequence)
    assert child.remembered == sequence.remembered
    cache.close(child)
    cache.close(sequence)


def test_states_and_windows_remember_nothing() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=24), policy="adaptive")
    for number in range(50):
        run(cache, [number] * 40)
    assert cache.state.prefix.has_evicted
    assert not order_of(cache).evicted_runs._runs


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
    assert [len(runs.add(0, points[index], 0)) for index in (0, 0, 1, 2)] == [0, 1, 0, 1]


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

"""Policies of users: what they are told, and that none of them can break a cache."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.cache import Cache
from kvweave.errors import PolicyFailed
from kvweave.policy import EvictionCandidate, Ghost, Policy
from kvweave.prefix import Kind
from kvweave.spec import Full, State
from tests.cache.engine import check_books
from tests.cache.lives import Life
from tests.cache.plans import full_plan, group, plan_of

NAN = float("nan")
Answer = Callable[[random.Random], Any]


def _raise(rng: random.Random) -> Any:
    if rng.random() < 0.2:
        raise ZeroDivisionError("on purpose")
    return rng.random()


ANSWERS: dict[str, Answer] = {
    "random": lambda rng: rng.random(),
    "constant": lambda rng: 7,
    "nan": lambda rng: rng.choice([NAN, 1.0, float("inf"), -float("inf")]),
    "nan in a tuple": lambda rng: (rng.choice([NAN, 0]), rng.random()),
    "raising": _raise,
    "text now and then": lambda rng: rng.choice([1, 2, 3, "4"]),
    "nothing": lambda rng: None,
    "tuples of any length": lambda rng: rng.choice([(1,), (1, 2), 3]),
}


class Hostile:
    """A class that answers whatever it likes, in every hook."""

    def __init__(self, answer: Answer, seed: int) -> None:
        self.answer, self.rng = answer, random.Random(seed)

    def value(self, point: EvictionCandidate) -> float:
        return self.answer(self.rng)  # type: ignore[no-any-return]

    def on_hit(self, point: EvictionCandidate) -> None:
        self.value(point)

    on_evict = on_hit

    def on_ghost_hit(self, ghost: Ghost) -> None:
        self.answer(self.rng)


def hostile(answer: Answer, seed: int, *, as_class: bool) -> Policy:
    rng = random.Random(seed)
    return Hostile(answer, seed) if as_class else lambda candidate: answer(rng)


def run(cache: Cache, tokens: list[int]) -> None:
    sequence = cache.open(tokens)
    iter(cache.extend(sequence, len(tokens) - sequence.num_cached, checkpoints=True))
    iter(cache.commit(sequence))
    cache.close(sequence)


def run_some(cache: Cache) -> None:
    for number in (0, 1, 2, 3, 1, 4, 2, 5, 6, 5, 2, 7, 8, 7):
        run(cache, [number] * 17)


@given(st.integers(0, 10**6), st.sampled_from(sorted(ANSWERS)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_policy_however_hostile_breaks_the_books(seed: int, name: str, as_class: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyFailed)
        Life(seed, hostile(ANSWERS[name], seed, as_class=as_class)).run(40)


@pytest.mark.parametrize("as_class", [False, True])
def test_a_policy_that_raises_is_named_and_lru_goes_on(as_class: bool) -> None:
    class Broken:
        def value(self, point: EvictionCandidate) -> float:
            return point.tokens / (0 if point.position else 1)

    policy: Policy = Broken() if as_class else Broken().value
    cache, other = Cache(full_plan(pages=17), policy=policy), Cache(full_plan(pages=17), policy="lru")
    with pytest.warns(PolicyFailed, match=r"Broken.* failed: ZeroDivisionError: .* LRU decides") as warned:
        run_some(cache)
    run_some(other)
    prompts = [[number] * 17 for number in range(9)]
    assert [cache.lookup(prompt) for prompt in prompts] == [other.lookup(prompt) for prompt in prompts]
    assert len(warned) == 1


@pytest.mark.parametrize("as_class", [False, True])
@pytest.mark.parametrize("failure", [lambda: NAN, lambda: sys.exit(3)])
def test_an_answer_without_an_order_and_an_exit_are_failures_too(failure: Callable[[], Any], as_class: bool) -> None:
    policy = hostile(lambda rng: failure(), 0, as_class=as_class)
    cache, other = Cache(full_plan(pages=17), policy=policy), Cache(full_plan(pages=17), policy="lru")
    with pytest.warns(PolicyFailed, match=r"failed: (ValueError: NaN has no order|SystemExit: 3); from now on LRU"):
        run_some(cache)
    run_some(other)
    prompts = [[number] * 17 for number in range(9)]
    assert [cache.lookup(prompt) for prompt in prompts] == [other.lookup(prompt) for prompt in prompts]


@pytest.mark.parametrize("as_class", [False, True])
def test_an_error_whose_text_raises_is_a_failure_too(as_class: bool) -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError("in its text")

    def fail() -> Any:
        raise Unreadable

    cache = Cache(full_plan(pages=17), policy=hostile(lambda rng: fail(), 0, as_class=as_class))
    with pytest.warns(PolicyFailed, match="failed: Unreadable, whose text cannot be read; from now on LRU decides"):
        run_some(cache)
    assert cache.lookup([7] * 17) == 16
    check_books(cache)


def test_a_policy_that_fails_is_named_once_even_where_warnings_are_errors() -> None:
    def broken(candidate: EvictionCandidate) -> object:
        raise KeyError(candidate.position)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = Cache(full_plan(pages=9), policy=broken)
        for number in range(5):
            run(cache, [number] * 16)
    assert cache.lookup([4] * 17) == 16


def test_a_value_is_asked_when_something_must_go_so_it_may_fall_with_age() -> None:
    class NewestFirst:
        def value(self, point: EvictionCandidate) -> float:
            return point.age

    cache = Cache(full_plan(pages=13), policy=NewestFirst())
    for number in range(6):
        run(cache, [number] * 16)
    assert [cache.lookup([number] * 17) > 0 for number in range(6)] == [True, True, False, False, False, True]


def test_a_class_is_told_of_hits_evictions_and_of_what_would_have_hit() -> None:
    told: list[tuple[str, Kind, int, int]] = []

    class Noting:
        def value(self, point: EvictionCandidate) -> float:
            return -point.age

        def on_hit(self, point: EvictionCandidate) -> None:
            told.append(("hit", point.kind, point.position, point.hits))

        def on_evict(self, point: EvictionCandidate) -> None:
            told.append(("evict", point.kind, point.position, point.hits))

        def on_ghost_hit(self, ghost: Ghost) -> None:
            told.append(("ghost", ghost.kind, ghost.position, ghost.hits))

    cache = Cache(full_plan(pages=9), policy=Noting())
    run(cache, [1] * 16)
    run(cache, [1] * 17)
    assert told == [("hit", Kind.ANSWER, 16, 0)]
    run(cache, [2] * 16)
    run(cache, [3] * 16)
    assert ("evict", Kind.BRANCH, 16, 1) in told
    assert not cache.lookup([1] * 17), "asking does not count"
    told.clear()
    cache.close(cache.open([1] * 20))
    cache.close(cache.open([1] * 20))
    assert told == [("ghost", Kind.BRANCH, 16, 1)], "once"


def test_a_point_tells_its_bytes_tokens_and_age() -> None:
    asked: dict[int, tuple[int, int, int]] = {}

    class Noting:
        def value(self, point: EvictionCandidate) -> float:
            asked[point.position] = (point.tokens, point.num_bytes, point.age)
            return 0

    plan = plan_of(group("full", Full()), group("state", State()), pages=12)
    cache = Cache(plan, policy=Noting())
    for number in range(12):
        run(cache, [number] * 17)
    tokens, num_bytes, age = asked[16]
    assert tokens == 16
    assert num_bytes == plan.stride_bytes("state") + plan.stride_bytes("full") * 4
    assert age > 0


@pytest.mark.parametrize("as_class", [False, True])
def test_a_policy_that_calls_the_cache_it_serves_is_refused_and_lru_decides(as_class: bool) -> None:
    def call(_: object) -> Any:
        return cache.open([1]).num_cached

    policy: Policy = hostile(call, 0, as_class=True) if as_class else call
    cache = Cache(full_plan(pages=20), policy=policy)
    with pytest.warns(PolicyFailed, match="NotSettled: the cache is in the midst of a call"):
        run_some(cache)
    assert cache.stats().sequences == 0
    check_books(cache)


def test_a_ghost_lies_beyond_what_a_prompt_found_and_leaves_a_token_to_compute() -> None:
    told: list[int] = []

    class Noting:
        def value(self, point: EvictionCandidate) -> float:
            return -point.age

        def on_ghost_hit(self, ghost: Ghost) -> None:
            told.append(ghost.position)

    cache = Cache(full_plan(pages=9), policy=Noting())
    for token in (1, 2, 3):
        run(cache, [token] * 16)
    assert not cache.lookup([1] * 17)
    run(cache, [1] * 16)
    assert cache.lookup([1] * 17) == 16
    cache.close(cache.open([1] * 17))
    assert told == []

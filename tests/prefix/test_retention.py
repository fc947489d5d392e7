"""Where resume points are left on the way: close together while memory is free, far apart once it is full."""

from __future__ import annotations

import pytest

from kvweave.cache import Cache
from kvweave.plan import Plan
from kvweave.prefix import Retention
from kvweave.prefix.retention import SPARSE
from kvweave.spec import Full, State, Window
from tests.cache.plans import group, plan_of
from tests.policy.test_user_policy import run


def hybrid(pages: int = 64) -> Plan:
    return plan_of(group("full", Full()), group("window", Window(6)), pages=pages)


def num_spaced(cache: Cache) -> int:
    """Points that a new prompt of 120 tokens would leave on its way."""
    with cache.open(range(500, 620)) as sequence:
        return len(sequence.prompt_points) - len(sequence.asked_points)


def fill(cache: Cache) -> None:
    for number in range(8):
        run(cache, [number] * 60)


def test_points_on_the_way_are_far_apart_once_something_was_evicted() -> None:
    cache = Cache(hybrid())
    run(cache, [*range(60)])
    assert num_spaced(cache) == 7, "memory is free"
    fill(cache)
    assert num_spaced(cache) == 0


def test_points_are_close_together_again_when_the_cache_is_emptied() -> None:
    cache = Cache(hybrid())
    fill(cache)
    cache.reset()
    assert num_spaced(cache) == 7


def test_a_distance_that_was_asked_for_stays() -> None:
    cache = Cache(hybrid(), retention=Retention(every=16))
    fill(cache)
    assert num_spaced(cache) == 7


@pytest.mark.parametrize(("retention", "points"), [(Retention(), [8192, 16384]), (Retention(unit=3000), [9000, 18000])])
def test_far_apart_is_the_same_all_along_a_prompt(retention: Retention, points: list[int]) -> None:
    assert retention.sparse_spacing(hybrid(), 4).between(0, 20000) == points


def test_points_are_never_closer_than_while_memory_is_free() -> None:
    plan = plan_of(group("full", Full()), group("state", State(), width=1 << 18))
    assert Retention().sparse_spacing(plan, 4).tokens == Retention().spacing(plan, 4).tokens > SPARSE

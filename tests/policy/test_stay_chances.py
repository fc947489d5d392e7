"""Which points stay in a cache of rows alone, and what is learned from those that were evicted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvweave.cache import Cache
from kvweave.policy.adaptive import PRIORS, Adaptive
from kvweave.policy.age_counts import FIT
from kvweave.policy.hit_density import Life
from kvweave.policy.stay_chances import COUNTED, LEAST, UPDATE, StayChances
from kvweave.spec import Full, State
from tests.cache.plans import full_plan, group, plan_of
from tests.policy.test_user_policy import run


def chances_of(cache: Cache) -> StayChances:
    order = cache.state.prefix.order
    assert isinstance(order, Adaptive)
    assert order.stay_chances is not None
    return order.stay_chances


def test_states_and_windows_keep_everything_that_is_used() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), policy="adaptive")
    order = cache.state.prefix.order
    assert isinstance(order, Adaptive)
    assert order.stay_chances is None


def in_turns(policy: str, prompts: int, rounds: int) -> float:
    """The share hit of prompts of 40 tokens that come in turns, in memory for a few of them."""
    cache, found = Cache(full_plan(pages=60), policy=policy), 0
    for _ in range(rounds):
        for number in range(prompts):
            found += cache.lookup([number] * 40)
            run(cache, [number] * 40)
    return found / (40 * prompts * rounds)


def test_where_everything_comes_back_after_its_eviction_some_of_it_stays() -> None:
    """A cache for 6 prompts, 12 in turns: LRU evicts each just before it comes again."""
    assert in_turns("lru", 12, 200) == 0.0
    assert in_turns("adaptive", 12, 200) > 0.08


def test_where_all_fits_everything_stays() -> None:
    assert in_turns("adaptive", 4, 50) == in_turns("lru", 4, 50) > 0.8


def after(price_age: int, *, hits_at: int) -> StayChances:
    """After lives of the third class of which half were hit at an age; the next to go are of another age."""
    learned = StayChances(PRIORS)
    for _ in range(2 * FIT):
        learned.density.end(Life(2, 0, 0, hits_at), 1.0)
        learned.density.end(Life(2, 0, 0, 4000), 0.0)
    for _ in range(4):
        learned.update([(2, price_age)] * 3, float(price_age.bit_length()), 10, [])
    return learned


def test_points_stay_with_a_chance_where_those_that_go_next_are_worth_more() -> None:
    learned = after(price_age=150, hits_at=300)
    assert LEAST <= learned.chances[2] < 0.7
    staying = sum(learned.stays(2, moment) for moment in range(1000)) / 1000
    assert staying == pytest.approx(learned.chances[2], abs=0.01)


def test_all_points_stay_where_hits_come_soon() -> None:
    assert after(price_age=500, hits_at=20).chances[2] == 1.0


def test_a_rest_of_a_run_stays_as_the_run_did() -> None:
    learned = after(price_age=150, hits_at=300)
    for moment in range(100):
        assert len({learned.stays(2, moment) for _ in range(3)}) == 1


def test_points_that_were_kept_in_vain_make_room_for_new_ones() -> None:
    learned = after(price_age=150, hits_at=300)
    for _ in range(10):
        learned.update([(2, 3000)] * 3, 8.0, 10, [])
    assert learned.chances[2] == 1.0


def test_where_no_point_that_stays_is_next_chances_are_as_they_were() -> None:
    learned = after(price_age=150, hits_at=300)
    before = [*learned.chances]
    learned.update([], 8.0, 10, [])
    assert learned.chances == before


def test_before_anything_is_known_all_points_stay() -> None:
    cache = Cache(full_plan(pages=12), policy="adaptive")
    for number in range(2 * UPDATE):
        run(cache, [number] * 40)
    assert not chances_of(cache).density.densities
    assert set(chances_of(cache).chances) == {1.0}


def test_a_cache_whose_prompts_change_does_not_hold_on_to_the_old_ones() -> None:
    """First 12 prompts in turns, of which some stay; then others, which all fit."""
    cache, found = Cache(full_plan(pages=60), policy="adaptive"), 0
    for number in range(1200):
        run(cache, [number % 12] * 40)
    for number in range(400):
        found += cache.lookup([100 + number % 4] * 40)
        run(cache, [100 + number % 4] * 40)
    assert found > 0.8 * 400 * 40


def test_of_many_points_some_are_counted_whether_they_stay_or_not() -> None:
    learned = after(price_age=150, hits_at=300)
    learned.update([(2, 150)] * 3, 8.0, 4 * COUNTED, [])
    moments = [moment for moment in range(4000) if learned.is_counted(moment)]
    assert len(moments) == pytest.approx(1000, rel=0.01)
    staying = sum(learned.stays(2, moment) for moment in moments) / len(moments)
    assert staying == pytest.approx(learned.chances[2], abs=0.03)


def hits_of_evicted(cache: Cache) -> float:
    return chances_of(cache).density.num_hits


def test_what_was_evicted_piece_by_piece_is_recognised_as_a_whole() -> None:
    cache = Cache(full_plan(pages=12), policy="adaptive")
    run(cache, [1] * 40)
    for number in range(2, 12):
        run(cache, [number] * 9)
    assert cache.lookup([1] * 40) == 0, "all of it was evicted"
    before, lives = hits_of_evicted(cache), np.sum(chances_of(cache).density.ended)
    run(cache, [1] * 40)
    pieces = np.sum(chances_of(cache).density.ended) - lives
    assert pieces > 1, "it went in several pieces"
    assert pieces - 1 <= hits_of_evicted(cache) - before <= pieces


@pytest.mark.parametrize(("namespace", "hits"), [("", True), ("another", False)])
def test_what_another_namespace_asks_for_is_no_hit(namespace: str, hits: bool) -> None:
    cache = Cache(full_plan(pages=12), policy="adaptive")
    run(cache, [1] * 40)
    run(cache, [2] * 40)
    before = hits_of_evicted(cache)
    cache.close(cache.open([1] * 40, namespace=namespace))
    assert (hits_of_evicted(cache) > before) == hits


def asked_again_soon(policy: str) -> float:
    """The share hit of prompts of which a third come once more, after 1 to 9 others, in memory for 5."""
    cache, found, rng = Cache(full_plan(pages=60), policy=policy), 0, random.Random(0)
    due: dict[int, list[int]] = {}
    for number in range(1500):
        if rng.random() < 0.35:
            due.setdefault(number + rng.randrange(1, 10), []).append(number)
        for prompt in (number, *due.get(number, [])):
            found += cache.lookup([prompt] * 40)
            run(cache, [prompt] * 40)
    return found / (40 * 1500)


def test_prompts_that_nobody_asks_for_again_count_as_lives_without_a_hit() -> None:
    """Else it would seem that all are hit at some time, and old ones would be kept for it."""
    assert asked_again_soon("adaptive") > 0.97 * asked_again_soon("lru")

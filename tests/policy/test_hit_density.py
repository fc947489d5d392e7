"""The most hits for the time that keeping something brings, by its age."""

from __future__ import annotations

import random
from itertools import pairwise
from math import exp

import pytest

from kvweave.policy.age_counts import MOST_HITS, OCTAVES
from kvweave.policy.hit_density import MOST_FIT, HitDensity, Life, densities_of


def by_trying_all(hazards: list[float]) -> list[float]:
    """The definition: from each octave on, every end is tried."""
    found = []
    for start in range(len(hazards)):
        alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for octave in range(start, len(hazards)):
            left = exp(-hazards[octave])
            hits += alive * (1 - left)
            time += alive * (1 << octave) * (1 - left) / hazards[octave]
            alive *= left
            best = max(best, hits / time)
        found.append(best)
    return [*found, found[-1]]


@pytest.mark.parametrize("seed", range(50))
def test_a_density_is_the_best_over_all_times_to_stop(seed: int) -> None:
    rng = random.Random(seed)
    hazards = [rng.choice((1e-6, 0.01, 0.3, 2.0)) * rng.random() + 1e-9 for _ in range(rng.randrange(1, 16))]
    assert densities_of(hazards) == pytest.approx(by_trying_all(hazards), rel=1e-6)


def test_a_density_is_never_nothing() -> None:
    assert min(densities_of([4.0] * OCTAVES)) > 0.0
    assert min(densities_of([1e-12] * OCTAVES)) > 0.0
    assert min(densities_of([4.0] * 20 + [1e-9] * 12)) > 0.0


def test_where_a_hit_is_as_likely_in_every_octave_the_density_falls_with_age() -> None:
    densities = densities_of([0.1] * OCTAVES)
    assert all(later < earlier for earlier, later in pairwise(densities[:-1]))


def test_where_hits_take_a_while_the_density_rises_until_they_come() -> None:
    densities = densities_of([1e-6] * 6 + [0.5] * 2 + [1e-6] * 8)
    assert all(densities[octave] < densities[octave + 1] for octave in range(6))
    assert densities[8] < densities[0]


def learned(hits_at: dict[int, int], lives: int = 1000) -> HitDensity:
    """Of so many lives of the first of two classes, known up to an age of 1,000, some were hit at some ages."""
    density = HitDensity([1.0, 1.0])
    for age, hits in hits_at.items():
        for _ in range(hits):
            density.end(Life(0, 0, 0, age), 1.0)
    for _ in range(lives - sum(hits_at.values()) + MOST_FIT):
        density.end(Life(0, 0, 0, 1000), 0.0)
    density.fit([], 1, 1000)
    return density


def test_hits_that_come_late_make_older_members_worth_more_than_new_ones() -> None:
    density = learned({200: 300})
    assert density.at(0, 120) > 1.5 * density.at(0, 15)
    assert density.at(0, 600) < density.at(0, 15)


def test_hits_that_come_soon_make_new_members_worth_more_than_older_ones() -> None:
    density = learned({10: 300})
    assert density.at(0, 120) < density.at(0, 8)


@pytest.mark.parametrize("number", [0, 1])
def test_without_any_hit_what_is_older_is_worth_less(number: int) -> None:
    density = learned({})
    values = [density.at(number, age) for age in (1, 3, 10, 50, 200, 700, 3000, 1 << 20, 1 << 40)]
    assert values == sorted(values, reverse=True)


def test_what_was_never_asked_for_again_makes_hits_rarer() -> None:
    """Of the first class all were hit; of the second as many, and as many again go on without a hit."""
    density = HitDensity([1.0, 1.0])
    for number in (0, 1):
        for _ in range(200):
            density.end(Life(number, 0, 0, 200), 1.0)
    density.fit([Life(1, 0, 0, 4000)] * 100, 2, 4000)
    assert density.at(1, 10) < 0.7 * density.at(0, 10)


def test_a_life_that_went_on_while_counts_were_halved_counts_half() -> None:
    density = HitDensity([1.0])
    for _ in range(int(MOST_HITS) + 1):
        density.end(Life(0, 0, 0, 200), 1.0)
    density.fit([], 1, 1000)
    before = density.num_hits
    density.end(Life(0, 999, 0, 200), 1.0)
    assert density.num_hits == before + 0.5
    density.end(Life(0, 1000, 0, 200), 1.0)
    assert density.num_hits == before + 1.5


def test_a_class_without_lives_is_like_all_others() -> None:
    density = learned({200: 300})
    assert density.at(1, 200) == pytest.approx(density.at(0, 200), rel=0.2)


def test_its_memory_is_bounded_and_what_was_long_ago_is_forgotten() -> None:
    density = HitDensity([1.0])
    for number in range(3 * int(MOST_HITS)):
        density.end(Life(0, number, 0, 1 << (number % 50)), 1.0)
        if density.is_due:
            density.fit([], 1, number)
    assert density.num_hits <= MOST_HITS + MOST_FIT
    assert [len(row) for row in (*density.hits, *density.began, *density.ended)] == [OCTAVES] * 3
    assert density.at(0, 1 << 60) >= 0.0

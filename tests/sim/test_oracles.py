"""Oracles against a search over everything that a cache could keep, on tiny traces."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvweave.sim.foresight import Foresight
from kvweave.sim.geometry import Geometry
from kvweave.sim.oracles import ORACLES, Oracle, oracle_hits
from kvweave.sim.trace import Request, Trace
from kvweave.sim.upper_bound import bound_tokens

PLACEMENT, BELADY, BOTH = ORACLES
ROWS = Geometry(grid=1, row_bytes=1, state_bytes=0)
STATES = Geometry(grid=1, row_bytes=1, state_bytes=2)


def trace(*prompts: str) -> Trace:
    """A request a word: letters are tokens, and one token more is asked for."""
    requests = (
        Request(float(number), np.array([*map(ord, word)], np.int32), len(word) + 1)
        for number, word in enumerate(prompts)
    )
    return Trace("tiny", "tiny", 1, tuple(requests))


def hits(
    oracle: Oracle, geometry: Geometry, capacity: int, *prompts: str, refused: frozenset[int] = frozenset()
) -> list[int]:
    return oracle_hits(Foresight(trace(*prompts), geometry.grid, refused), geometry, oracle, capacity)


def best(prompts: tuple[str, ...], refused: frozenset[int], geometry: Geometry, capacity: int) -> int:
    """The most tokens that any cache could have hit, by trying everything that could be kept after each request.

    A cache is a set of prefixes (the rows: each prefix stands for its last token) and a set of points. Rows are there
    if kept or computed by this request; a point can be made where this request computes, or be kept.
    """
    everywhere = geometry.resumes_anywhere

    @cache
    def after(number: int, kept: frozenset[str], points: frozenset[str]) -> int:
        if number == len(prompts):
            return 0
        if number in refused:
            return after(number + 1, kept, points)
        word = prompts[number]
        prefixes = [word[:end] for end in range(1, len(word) + 1)]
        found = 0
        for end, prefix in enumerate(prefixes, 1):
            if prefix not in kept:
                break
            found = end if everywhere or prefix in points else found
        rows = kept | set(prefixes)
        could = points | {prefix for end, prefix in enumerate(prefixes, 1) if end > found}
        return found + max(after(number + 1, *choice) for choice in choices(rows, frozenset() if everywhere else could))

    def choices(rows: frozenset[str], could: frozenset[str]) -> list[tuple[frozenset[str], frozenset[str]]]:
        """All sets of points that fit with the rows that lead to them; where rows suffice, all prefixes' rows."""
        ends = sorted(rows if everywhere else could)
        found = set()
        for flags in product((False, True), repeat=len(ends)):
            chosen = frozenset(end for end, flag in zip(ends, flags, strict=True) if flag)
            needed = frozenset(end[:size] for end in chosen for size in range(1, len(end) + 1))
            points = frozenset() if everywhere else chosen
            if len(needed) * geometry.row_bytes + len(points) * geometry.state_bytes <= capacity:
                found.add((needed, points))
        return list(found)

    return after(0, frozenset(), frozenset())


TINY = st.lists(st.text("ab", min_size=1, max_size=3), min_size=2, max_size=5).map(tuple)
REFUSED = st.frozensets(st.integers(0, 4), max_size=2)


@settings(max_examples=200, deadline=None)
@given(TINY, REFUSED, st.integers(0, 6))
@example(("aa", "a", "aa"), frozenset(), 1)
@example(("aaa", "b", "aaa", "b"), frozenset({2}), 1)
def test_with_rows_alone_belady_and_both_are_the_best_that_can_be_had(
    prompts: tuple[str, ...], refused: frozenset[int], capacity: int
) -> None:
    most = best(prompts, refused, ROWS, capacity)
    assert sum(hits(BOTH, ROWS, capacity, *prompts, refused=refused)) == most
    assert sum(hits(BELADY, ROWS, capacity, *prompts, refused=refused)) == most
    assert bound_tokens(Foresight(trace(*prompts), 1, refused), ROWS, capacity) == most
    assert sum(hits(PLACEMENT, ROWS, capacity, *prompts, refused=refused)) <= most


@settings(max_examples=200, deadline=None)
@given(TINY, REFUSED, st.integers(0, 12))
def test_with_states_no_oracle_beats_the_best_and_the_bound_is_never_below_it(
    prompts: tuple[str, ...], refused: frozenset[int], capacity: int
) -> None:
    most = best(prompts, refused, STATES, capacity)
    for oracle in ORACLES:
        assert sum(hits(oracle, STATES, capacity, *prompts, refused=refused)) <= most, oracle.name
    foresight = Foresight(trace(*prompts), 1, refused)
    assert most <= bound_tokens(foresight, STATES, capacity) <= foresight.overlap_tokens


def test_the_bound_is_not_below_what_takes_all_of_the_memory() -> None:
    """A price of a byte and a fraction a token, times the tokens, is rounded to more than the memory."""
    for row_bytes, state_bytes, tokens in product((1, 3, 7), (1, 5, 11), range(1, 100)):
        geometry = Geometry(1, row_bytes, state_bytes)
        foresight, capacity = Foresight(trace("a" * tokens, "a" * tokens), 1), tokens * row_bytes + state_bytes
        assert oracle_hits(foresight, geometry, BOTH, capacity)[1] == tokens
        assert bound_tokens(foresight, geometry, capacity) == tokens


def plain_lru(prompts: tuple[str, ...], capacity: int) -> list[int]:
    """LRU over blocks, of one age the deepest first."""
    ages: dict[str, tuple[int, int]] = {}
    found = []
    for number, word in enumerate(prompts):
        prefixes = [word[:end] for end in range(1, len(word) + 1)]
        found.append(next((end for end, prefix in enumerate(prefixes) if prefix not in ages), len(word)))
        ages |= {prefix: (number, -end) for end, prefix in enumerate(prefixes)}
        for prefix in sorted(ages, key=lambda prefix: ages[prefix])[: max(0, len(ages) - capacity)]:
            del ages[prefix]
    return found


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=12).map(tuple), st.integers(0, 12))
def test_with_rows_alone_placement_is_lru_over_blocks(prompts: tuple[str, ...], capacity: int) -> None:
    assert hits(PLACEMENT, ROWS, capacity, *prompts) == plain_lru(prompts, capacity)


@pytest.mark.parametrize("geometry", [ROWS, STATES])
@given(prompts=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=12).map(tuple))
def test_with_all_the_memory_the_oracles_that_place_points_hit_the_overlap(
    geometry: Geometry, prompts: tuple[str, ...]
) -> None:
    foresight = Foresight(trace(*prompts), 1)
    overlaps = [placed.overlap for placed in foresight.requests]
    for oracle in (PLACEMENT, BOTH):
        assert oracle_hits(foresight, geometry, oracle, 10**6) == overlaps
    assert bound_tokens(foresight, geometry, 10**6) == sum(overlaps)


def test_a_first_sibling_is_lost_without_foresight_of_places() -> None:
    """The second request parts inside the first one's prompt, where only foresight leaves a point."""
    assert hits(BOTH, STATES, 100, "aabb", "aacc", "aadd") == [0, 2, 2]
    assert hits(BELADY, STATES, 100, "aabb", "aacc", "aadd") == [0, 0, 2]


def test_lru_keeps_what_nobody_asks_for_and_belady_does_not() -> None:
    prompts = ("aaaa", "bbbb", "cccc", "aaaa")
    assert hits(PLACEMENT, ROWS, 8, *prompts) == [0, 0, 0, 0]
    assert hits(BOTH, ROWS, 8, *prompts) == [0, 0, 0, 4]
    assert hits(BOTH, ROWS, 3, *prompts) == [0, 0, 0, 3]


def test_a_point_costs_its_state() -> None:
    prompts = ("aaa", "bbb", "aaa")
    assert hits(BOTH, STATES, 5, *prompts) == [0, 0, 3]
    assert hits(BOTH, STATES, 4, *prompts) == [0, 0, 0]

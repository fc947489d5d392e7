"""The replay against infinite radix trees, engines that take other steps, and itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import Retention
from kvweave.cache import Cache
from kvweave.errors import LengthsOnly
from kvweave.plan import Plan
from kvweave.policy import EvictionCandidate
from kvweave.sim import Foresight, Geometry, Request, Trace, bound_tokens, replay, usable_bytes
from kvweave.sim.result import splits, timeline, total
from tests.sim.plans import FULL, GRID, MODELS, STATES, plan_of, trace_of, traces

EVERYWHERE = Retention(every=1, decode_every=1)


def overlaps(trace: Trace) -> list[int]:
    return [placed.overlap * GRID for placed in Foresight(trace, GRID).requests]


@given(traces())
def test_with_enough_memory_full_attention_hits_the_overlap(trace: Trace) -> None:
    assert replay(trace, plan_of(FULL)).hits.tolist() == overlaps(trace)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=50, deadline=None)
@given(trace=traces())
def test_with_enough_memory_perfect_places_hit_the_overlap(model: str, trace: Trace) -> None:
    done = replay(trace, plan_of(MODELS[model]), placement=Foresight(trace, GRID))
    assert done.hits.tolist() == overlaps(trace)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=50, deadline=None)
@given(trace=traces(), kilobytes=st.integers(2, 8), every=st.sampled_from([None, 0, 8]))
def test_no_replay_beats_the_bound_and_its_split_adds_up(
    model: str, trace: Trace, kilobytes: int, every: int | None
) -> None:
    plan = plan_of(MODELS[model], kilobytes * 1024)
    foresight, geometry = Foresight(trace, GRID), Geometry.of(plan)
    for done in (replay(trace, plan, retention=Retention(every=every)), replay(trace, plan, placement=foresight)):
        split = total(splits(foresight, done))
        fits = Foresight(trace, GRID, np.flatnonzero(done.refused))
        assert split.hit == done.hit_tokens <= bound_tokens(fits, geometry, usable_bytes(plan))
        assert split.hit + split.evicted + split.no_point + split.never_seen == split.prompt == trace.prompt_tokens
        assert min(split.hit, split.evicted, split.no_point, split.never_seen) >= 0
        assert split.overlap == foresight.overlap_tokens
        assert sum(bucket.split.hit for bucket in timeline(trace, splits(foresight, done))) == split.hit


STEP = 32


def engine(trace: Trace, plan: Plan, policy: str) -> tuple[list[int], int]:
    """An engine that stops where states are wanted, and generates token by token: its hits, and what it evicted."""
    hits = []
    with Cache(plan, policy=policy) as cache:
        for request in trace.requests:
            tokens = trace.tokens(request)
            sequence = cache.open(tokens[: request.prompt_tokens])
            hits.append(sequence.num_cached)
            while sequence.length < request.prompt_tokens:
                end = min(sequence.stop or request.prompt_tokens, request.prompt_tokens, sequence.length + STEP)
                list(cache.extend(sequence, end - sequence.length))
                list(cache.commit(sequence))
            for token in tokens[request.prompt_tokens :].tolist():
                list(cache.extend(sequence, tokens=[token]))
                list(cache.commit(sequence))
            cache.close(sequence)
        return hits, sum(pages.num_evicted for pages in cache.state.pages)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150, deadline=None)
@given(trace=traces())
def test_the_replay_hits_what_an_engine_hits_token_by_token(model: str, trace: Trace) -> None:
    plan = plan_of(MODELS[model])
    assert replay(trace, plan, step_tokens=STEP).hits.tolist() == engine(trace, plan, "adaptive")[0]


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
@pytest.mark.parametrize("model", MODELS)
def test_the_replay_hits_what_an_engine_hits_where_it_must_evict(model: str, policy: str) -> None:
    for seed in range(20):
        trace, plan = long_trace(seed), plan_of(MODELS[model], 6 * 1024)
        hits, evicted = engine(trace, plan, policy)
        done = replay(trace, plan, policy=policy, step_tokens=STEP, whole_outputs=False)
        assert done.hits.tolist() == hits
        assert evicted > 20
        assert sum(hits) > 0


def long_trace(seed: int) -> Trace:
    """Sixty requests that go on from one another, with outputs."""
    rng, words = random.Random(seed), list[list[int]]()
    for _ in range(60):
        start = rng.choice(words) if words and rng.random() < 0.6 else []
        words.append([*start[: rng.randint(0, min(90, len(start)))], *rng.choices([0, 1], k=rng.randint(1, 30))])
    return trace_of(words, [rng.randint(0, min(20, len(word) - 1)) for word in words])


@given(traces())
def test_two_replays_are_the_same(trace: Trace) -> None:
    one, other = (replay(trace, plan_of(STATES, 4096)) for _ in range(2))
    assert one.hits.tolist() == other.hits.tolist()
    assert (one.evicted_bytes, one.occupancy) == (other.evicted_bytes, other.occupancy)


def test_the_kind_of_point_is_that_before_it_was_hit() -> None:
    same = [*range(20)]
    done = replay(trace_of([same, same, same]), plan_of(STATES), retention=Retention(every=0))
    assert done.hits.tolist() == [0, 16, 16]
    assert done.hits_by_kind() == {"prompt": (1, 16), "branch": (1, 16)}


def test_rows_without_a_point_are_told_from_rows_that_are_gone() -> None:
    trace = trace_of([[*range(20)], [*range(12), *range(50, 60)], [*range(12), *range(70, 80)]])
    done = replay(trace, plan_of(STATES), retention=Retention(every=0))
    assert done.hits.tolist() == [0, 0, 12]
    assert done.rows.tolist() == [0, 12, 12]
    split = total(splits(Foresight(trace, GRID), done))
    assert (split.no_point, split.evicted) == (12, 0)


def test_what_never_fits_is_refused_and_takes_nothing_from_the_others() -> None:
    trace = trace_of([[1] * 21, [2] * 21, [3] * 4000, [1] * 21, [2] * 21])
    done = replay(trace, plan_of(FULL, 4096))
    assert done.refused.tolist() == [False, False, True, False, False]
    assert done.hits.tolist() == [0, 0, 0, 20, 20]


def test_windows_that_have_no_room_for_long_steps_take_shorter_ones() -> None:
    plan = plan_of(MODELS["window"], 64 * 1024)
    trace = trace_of([[7] * 2000])
    assert not replay(trace, plan, step_tokens=2000).refused.any()
    assert replay(trace, plan, step_tokens=2000).occupancy[-1].cached_bytes[0] > 0


def test_occupancy_grows_until_something_is_evicted() -> None:
    trace = trace_of([[number] * 40 for number in range(30)])
    plan = plan_of(FULL, 4096)
    done = replay(trace, plan)
    cached = [sum(at.cached_bytes) for at in done.occupancy]
    assert cached[:3] == [640, 1280, 1920]
    assert max(cached) <= usable_bytes(plan)
    assert done.evicted_bytes == 30 * 640 - cached[-1]


def test_a_policy_of_ones_own_decides() -> None:
    def newest_first(candidate: EvictionCandidate) -> object:
        return -candidate.last_used

    trace = trace_of([*([number] * 21 for number in range(1, 11)), [1] * 21])
    assert replay(trace, plan_of(FULL, 2048)).hits[-1] == 0
    assert replay(trace, plan_of(FULL, 2048), policy=newest_first).hits[-1] == 20


def test_lengths_alone_cannot_be_replayed() -> None:
    nothing = Trace("azure", "azure", 0, (Request(0.0, np.empty(0, np.int32), 10),))
    with pytest.raises(LengthsOnly):
        replay(nothing, plan_of(FULL))

"""What a cache promises, case by case."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvweave.cache import Batch, Cache, Sequence
from kvweave.cache.sequence import FIELDS
from kvweave.errors import (
    BadOption,
    BadSequence,
    BadTokens,
    BadType,
    CacheError,
    CannotTruncate,
    EventLost,
    NeverFits,
    NotSettled,
    OutOfPages,
    UnknownName,
    WrongThread,
)
from kvweave.plan import Parallel, PoolRequest, make_plan
from kvweave.policy import POLICIES, EvictionCandidate
from kvweave.pool import NULL
from kvweave.prefix import Event, Kind, Node, Replica, Retention, Spacing, Span
from kvweave.prefix.held_points import PATIENCE
from kvweave.prefix.window_pages import MOST_SHIELDED
from kvweave.spec import Chunk, Full, Layer, ModelSpec, Reach, SinkWindow, State, Window
from tests.cache.engine import Engine, check_books, longest_hit
from tests.cache.plans import full_plan, group, plan_of

ENGINES: list[tuple[Cache, Engine]] = []


def engine_of(cache: Cache) -> Engine:
    """The one engine that has written into a cache's pages."""
    for owner, engine in ENGINES:
        if owner is cache:
            return engine
    ENGINES[:] = [(cache, Engine(cache))]
    return ENGINES[0][1]


def run(cache: Cache, tokens: object, *, close: bool = True, **more: object) -> Sequence:
    """Open, compute to the end with stops where they are wanted, and close."""
    sequence = cache.open(tokens, **more)  # type: ignore[arg-type]
    engine = engine_of(cache)
    while sequence.length < sequence.num_prompt:
        start, end = sequence.length, sequence.stop or sequence.num_prompt
        engine.carry_out(cache.extend(sequence, end - start))
        engine.step(sequence, start)
        engine.carry_out(cache.commit(sequence))
    if close:
        cache.close(sequence)
    return sequence


def test_the_same_prompt_again_hits_all_but_its_last_block() -> None:
    cache = Cache(full_plan())
    assert run(cache, range(16)).num_cached == 0
    assert run(cache, range(16)).num_cached == 12, "at least one token stays to be computed"
    assert run(cache, range(17)).num_cached == 16
    assert run(cache, [0, 1, 2, 9]).num_cached == 0
    assert run(cache, [0, 1, 2, 3, 9, 9]).num_cached == 4


def test_namespaces_never_share() -> None:
    cache = Cache(full_plan())
    run(cache, range(16), namespace=("model", "adapter-1"))
    assert run(cache, range(16), namespace=("model", "adapter-2")).num_cached == 0
    assert run(cache, range(16), namespace=("model", "adapter-1")).num_cached == 12


def test_equal_tokens_that_stand_for_different_images_do_not_share() -> None:
    cache = Cache(full_plan())
    cat, dog = [Span(5, b"the bytes of a cat")], [Span(5, b"the bytes of a dog")]
    run(cache, range(16), spans=cat)
    assert run(cache, range(16), spans=dog).num_cached == 4, "what comes before the image is shared"
    assert run(cache, range(16), spans=cat).num_cached == 12
    assert run(cache, range(16)).num_cached == 4
    with pytest.raises(BadTokens, match="a span starts at 99, outside the prompt of 4 tokens"):
        cache.open(range(4), spans=[Span(99, b"")])


def test_a_draft_aware_engine_can_ask_for_the_hit_to_stop_a_block_earlier() -> None:
    cache = Cache(full_plan())
    run(cache, range(17))
    assert cache.open(range(17), drop_last_blocks=1).num_cached == 12
    assert cache.open(range(17), drop_last_blocks=9).num_cached == 0
    assert cache.open(range(17), reuse=False).num_cached == 0


def test_what_is_not_committed_is_not_seen_by_others() -> None:
    cache = Cache(full_plan())
    first = cache.open(range(16))
    cache.extend(first, 16)
    assert cache.open(range(16)).num_cached == 0
    cache.commit(first, 9)
    assert cache.open(range(16)).num_cached == 8
    cache.commit(first)
    assert cache.open(range(17)).num_cached == 16


def test_publishing_the_same_prefix_from_two_sequences_gives_the_duplicates_back() -> None:
    cache = Cache(full_plan())
    one, two = cache.open(range(16)), cache.open(range(16))
    for sequence in (one, two):
        cache.extend(sequence, 16)
    assert cache.stats().group("full").held == 8
    for sequence in (one, two):
        cache.commit(sequence)
    cache.publish()
    assert cache.stats().group("full").cached == 4
    assert cache.stats().group("full").held == 0
    assert cache.table("full")[one.row, :4].tolist() == cache.table("full")[two.row, :4].tolist()
    check_books(cache)


def test_a_window_group_resumes_where_its_head_was_dropped() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    first = run(cache, range(40), close=False)
    assert cache.table("window")[first.row, :8].tolist() == [NULL] * 8, "what the window has passed is NULL"
    assert (cache.table("window")[first.row, 8:10] != NULL).all()
    cache.close(first)
    second = run(cache, [*range(40), 99, 98], close=False)
    assert second.num_cached == 40
    assert cache.stats().group("window").cached < cache.stats().group("full").cached


def test_the_first_sibling_hits_too_because_points_are_kept_on_the_way() -> None:
    for trailing in (Window(6), State()):
        cache = Cache(plan_of(group("full", Full()), group("trailing", trailing)), retention=Retention(every=8))
        run(cache, range(40))
        assert run(cache, [*range(18), 99, 98, 97]).num_cached == 16


def test_the_second_sibling_hits_at_the_branch_even_when_no_points_are_kept_on_the_way() -> None:
    for trailing in (Window(6), State()):
        cache = Cache(plan_of(group("full", Full()), group("trailing", trailing)), retention=Retention(every=0))
        run(cache, range(40))
        assert run(cache, [*range(20), 99, 98, 97]).num_cached == 0
        assert run(cache, [*range(20), 77, 76, 75]).num_cached == 20


def test_the_first_sibling_hits_where_it_was_expected_to_leave() -> None:
    for trailing in (Window(6), State()):
        cache = Cache(plan_of(group("full", Full()), group("trailing", trailing)), retention=Retention(every=0))
        run(cache, range(40), branches=[21, 90])
        assert run(cache, [*range(21), 99, 98, 97]).num_cached == 20


def test_a_position_or_a_number_that_is_not_whole_changes_nothing() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(30), close=False)
    before = cache.stats()
    for call in (lambda: cache.fork(sequence, 1.5), lambda: cache.truncate(sequence, 29.5)):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            call()
    assert cache.stats() == before
    waiting = cache.open(range(50, 80))
    with pytest.raises(TypeError):
        cache.add_branch(waiting, 8.5)  # type: ignore[arg-type]
    list(cache.extend(waiting, 8))
    check_books(cache)


NOT_NUMBERS: tuple[Any, ...] = (None, "2", 2.0, float("nan"), [2], np.array([2, 3]), np.float64(2), ...)


@pytest.mark.parametrize("wrong", NOT_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_named_and_changes_nothing(wrong: Any) -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    sequence, waiting = run(cache, range(30), close=False), cache.open(range(50, 80))
    before = cache.stats()
    calls: list[Callable[[], object]] = [
        lambda: cache.open([1], priority=wrong),
        lambda: cache.open([1], drop_last_blocks=wrong),
        lambda: cache.open([1], points=[wrong]),
        lambda: cache.open([1], branches=[wrong]),
        lambda: cache.open([1], spans=[Span(wrong, b"cat")]),
        lambda: cache.lookup([1], drop_last_blocks=wrong),
        lambda: cache.add_branch(waiting, wrong),
        lambda: cache.check_fits(wrong),
        lambda: cache.check_fits(9, wrong),
        lambda: cache.extend(waiting, 4, lookahead=wrong),
        lambda: cache.extend(waiting, 4, drafts=wrong),
        lambda: cache.can_extend(waiting, wrong),
        lambda: cache.load_to(waiting, wrong),
        lambda: cache.fork(sequence, wrong),
        lambda: cache.reorder([sequence], [wrong]),
        lambda: cache.truncate(sequence, wrong),
        lambda: cache.slots(sequence, "full", wrong),
        lambda: Cache(cache.plan, rows=wrong),
        lambda: Cache(cache.plan, max_tokens=wrong),
        lambda: Cache(cache.plan, max_drafts=wrong),
    ]
    for call in calls:
        with pytest.raises(BadType):
            call()
    assert cache.stats() == before
    assert (sequence.length, waiting.length) == (30, 0)
    check_books(cache)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int64, np.uint64])
def test_whole_numbers_of_numpy_are_whole_numbers(kind: Any) -> None:
    cache = Cache(full_plan(blocks=16), rows=kind(2), max_tokens=kind(120), max_drafts=kind(3))
    run(cache, range(100))
    assert cache.table("full").shape == (2, 8)
    assert cache.lookup(range(100), drop_last_blocks=kind(5)) == 16
    sequence = cache.open(range(100), drop_last_blocks=kind(5), priority=kind(1), branches=[kind(9)])
    assert sequence.num_cached == 16
    assert cache.can_extend(sequence, kind(80))
    cache.check_fits(kind(100), kind(30))
    cache.load_to(sequence, kind(96))
    cache.commit(sequence, kind(96))
    cache.extend(sequence, kind(4), lookahead=kind(2), drafts=kind(1))
    assert len(cache.slots(sequence, "full", kind(96), kind(100))) == 4
    cache.truncate(sequence, kind(98))
    cache.commit(sequence)
    assert len(cache.fork(sequence, kind(1))[0]) == 1
    assert sequence.length == 98
    check_books(cache)


def test_arguments_of_the_wrong_type_are_named_and_change_nothing() -> None:
    cache = Cache(full_plan())
    sequence = run(cache, range(30), close=False)
    before = cache.stats()
    wrong: Any
    ragged: Any
    many: tuple[Any, ...] = (cache.extend, cache.commit, cache.slot_mapping, Batch)
    one: tuple[Any, ...] = (cache.close, cache.fork, cache.rematch)
    for wrong in (None, 5, "text", [sequence, 5], [None]):
        for call in many:
            with pytest.raises(BadSequence):
                call(wrong)
    for wrong in (None, [sequence], Batch([sequence])):
        for call in one:
            with pytest.raises((BadSequence, TypeError)):  # compiled, the types of arguments are checked before
                call(wrong)
    pair = [sequence, cache.open([1])]
    for ragged in ([[1], [1, 2]], [1, [2]]):
        for name in ("lengths", "tokens"):
            with pytest.raises((BadSequence, BadTokens)):
                cache.commit(pair, **{name: ragged})
        with pytest.raises(BadTokens):
            cache.extend(pair, [1, 2], tokens=ragged)
        with pytest.raises(BadSequence):
            cache.extend(pair, ragged)
    cache.close(pair[1])
    before = cache.stats()
    for wrong in (5, None):
        with pytest.raises(BadType, match="branches must be a list of whole numbers"):
            cache.open([1], branches=wrong)
    for wrong in ([], {}, np.zeros(2)):
        with pytest.raises(BadType, match="a namespace must be hashable"):
            cache.open([1], namespace=wrong)
    for wrong in (7, [7], [(1, 5)], [(1, "cat")], [(1, b"cat", 2)], [(1, None)]):
        with pytest.raises(BadType, match="spans are pairs of a position and bytes"):
            cache.open([1, 2], spans=wrong)
    with pytest.raises((BadSequence, TypeError)):
        cache.unpin(None)  # type: ignore[arg-type]
    assert cache.stats() == before


def test_a_span_that_is_refused_names_no_content() -> None:
    events: list[Event] = []
    cache = Cache(full_plan(), on_event=events.append)
    with pytest.raises(BadTokens, match="a span starts at 9"):
        cache.open(range(4), spans=[Span(1, b"cat"), Span(9, b"dog")])
    assert not events


def test_states_are_restored_into_a_live_page_of_their_own() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    run(cache, range(16))
    second = cache.open([*range(12), 99])
    assert second.num_cached == 12
    (copy,) = cache.extend(second, 1)
    assert copy.tag == "state"
    assert copy.dst.tolist() == [cache.table("state")[second.row, 0]]
    assert copy.src.tolist() != copy.dst.tolist()


def test_a_commit_at_a_wanted_stop_asks_for_a_snapshot() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = cache.open(range(16))
    assert sequence.stop == 12
    cache.extend(sequence, 12)
    (copy,) = cache.commit(sequence)
    assert copy.src.tolist() == [cache.table("state")[sequence.row, 0]]
    assert sequence.stop is None


def test_kernels_that_write_states_on_the_way_need_no_stop() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=4))
    sequence = cache.open(range(16))
    cache.extend(sequence, 16, checkpoints=True)
    assert [checkpoint.position for checkpoint in sequence.checkpoints] == [4, 8, 12]
    cache.commit(sequence)
    cache.close(sequence)
    assert cache.open([*range(9), 99]).num_cached == 8
    check_books(cache)


def test_rejected_drafts_step_back_across_a_block_boundary_and_to_the_right_state() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(7), close=False)
    engine = engine_of(cache)
    engine.carry_out(cache.extend(sequence, 4, tokens=[7, 8, 9, 10], drafts=3))
    assert np.count_nonzero(cache.table("state")[sequence.row]) == 4
    engine.step(sequence, 7)
    assert not cache.truncate(sequence, 8)
    assert np.count_nonzero(cache.table("full")[sequence.row]) == 2
    engine.carry_out(cache.commit(sequence))
    engine.carry_out(cache.extend(sequence, 1, tokens=[5]))
    engine.step(sequence, 8)  # checks that the live state is the one after 8 tokens
    check_books(cache)


def test_truncate_refuses_what_cannot_be_gone_back_to() -> None:
    cache = Cache(plan_of(group("state", State())))
    sequence = run(cache, range(10), close=False)
    with pytest.raises(CannotTruncate, match="holds the state after 10 tokens, not after 9"):
        cache.truncate(sequence, 9)
    window = Cache(plan_of(group("window", Window(4))))
    sequence = run(window, range(30), close=False)
    with pytest.raises(CannotTruncate):
        window.truncate(sequence, 10)
    assert sequence.length == 30


def test_every_field_of_a_sequence_is_named_so_that_beams_can_swap_it() -> None:
    sequence = Cache(full_plan()).open([1])
    if not hasattr(sequence, "__dict__"):
        pytest.skip("compiled: a class has the fields that its methods set")
    assert sorted(vars(sequence)) == sorted(FIELDS)


def test_forks_share_full_blocks_and_copy_the_last_one() -> None:
    cache = Cache(full_plan())
    parent = run(cache, range(10), close=False)
    (child, other), copies = cache.fork(parent, 2)
    table = cache.table("full")
    assert table[child.row, :2].tolist() == table[parent.row, :2].tolist() == table[other.row, :2].tolist()
    assert len({int(table[s.row, 2]) for s in (parent, child, other)}) == 3
    assert [copy.src.tolist() for copy in copies] == [[int(table[parent.row, 2])] * 2]
    check_books(cache)
    for sequence in (parent, child, other):
        cache.close(sequence)
    check_books(cache)


def test_beams_are_reparented_all_or_nothing() -> None:
    cache = Cache(full_plan(pages=12))
    first = run(cache, range(6), close=False)
    made, copied = cache.fork(first, 2)
    assert len(list(copied)) == 1
    beams = [first, *made]
    pages = [int(cache.table("full")[beam.row, 1]) for beam in beams]
    copies = list(cache.reorder(beams, [1, 1, 0]))
    assert len(copies) == 1
    assert copies[0].src.tolist() == [pages[1]]
    check_books(cache)
    with pytest.raises(BadSequence, match="do not name 3 sequences"):
        cache.reorder(beams, [0, 1, 7])
    for beam in beams:
        cache.close(beam)
    check_books(cache)


def test_extend_is_all_or_nothing_and_says_what_is_missing() -> None:
    cache = Cache(full_plan(pages=9))
    batch = [cache.open([i, *range(20)]) for i in range(2)]
    cache.extend(batch, 12)
    before = cache.table("full").copy()
    with pytest.raises(OutOfPages) as error:
        cache.extend(batch, 9)
    assert error.value.shortages == (("full", 6, 2, 0),)
    assert error.value.sequences == (batch[0], batch[1]), "not even the first one fits"
    assert error.value.preemptible == ()
    assert (cache.table("full") == before).all()
    assert [sequence.length for sequence in batch] == [12, 12]
    with pytest.raises(NeverFits, match="takes 10 super-pages of pool 'full', which has 8"):
        cache.extend(cache.open(range(40)), 40)


def test_eviction_takes_exactly_what_is_needed_from_the_end_of_the_least_recently_used() -> None:
    cache = Cache(full_plan(pages=9))
    run(cache, [1] * 16)
    run(cache, [2] * 16)
    run(cache, [1] * 17, close=True)
    sequence = cache.open([3] * 8)
    cache.extend(sequence, 8)
    assert cache.stats().evicted_pages == 2
    assert cache.open([1] * 16).num_cached == 12
    assert cache.open([2] * 16).num_cached == 8


def test_what_runs_is_never_evicted_and_pinned_prefixes_stay() -> None:
    cache = Cache(full_plan(pages=9))
    run(cache, [1] * 16)
    pinned = cache.pin([1] * 8)
    assert pinned is not None
    run(cache, [2] * 24)
    assert cache.open([1] * 16).num_cached == 8
    cache.unpin(pinned)
    with pytest.raises(BadSequence, match="not pinned"):
        cache.unpin(pinned)


def test_pressure_in_one_group_does_not_empty_another() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), own_pools=None, pages=40))
    for i in range(12):
        run(cache, [i] * 9)
    cached = cache.stats().group("full").cached
    for i in range(40):
        run(cache, [100 + i] * 5)
    assert cache.stats().group("full").cached > cached // 2


def test_a_policy_is_any_function_of_what_is_known() -> None:
    def biggest_first(candidate: EvictionCandidate) -> object:
        return -candidate.tokens

    cache = Cache(full_plan(pages=17), policy=biggest_first)
    run(cache, [1] * 40)
    run(cache, [2] * 16)
    run(cache, [3] * 12)
    assert cache.open([2] * 17).num_cached == 16
    assert cache.open([1] * 41).num_cached < 40


def test_what_was_hit_outlives_what_was_made_later_but_not_for_ever() -> None:
    cache = Cache(full_plan(pages=9))
    run(cache, [1] * 16)
    cache.close(cache.open([1] * 17))
    run(cache, [2] * 16)
    run(cache, [3] * 16)
    assert [cache.lookup([i] * 17) for i in (1, 2, 3)] == [16, 0, 16]
    for i in range(10, 30):
        run(cache, [i] * 16)
    assert cache.lookup([1] * 17) < 16


def test_a_policy_is_told_the_bytes_that_a_point_takes() -> None:
    num_bytes: dict[int, int] = {}

    def noting(candidate: EvictionCandidate) -> object:
        num_bytes[candidate.position] = candidate.num_bytes
        return candidate.last_used

    plan = plan_of(group("full", Full()), group("window", Window(6)), group("state", State()))
    cache = Cache(plan, retention=Retention(every=16), policy=noting)
    run(cache, range(33))
    full, window, state = (plan.stride_bytes(tag) for tag in ("full", "window", "state"))
    size = cache.state.groups[0].slot_tokens
    assert num_bytes[16] == state + window * 6 // size, "a point on the way: its state, and a window"
    assert num_bytes[32] == state + window * 6 // size + full * 16 // size, "the end of a leaf: its rows as well"


@pytest.mark.parametrize("priority", [2**31, -(2**31), 2**70, 0.5, "high"])
def test_a_priority_that_is_no_whole_number_of_31_bits_changes_nothing(priority: Any) -> None:
    cache = Cache(full_plan(pages=9), rows=1)
    with pytest.raises((BadSequence, TypeError)):
        cache.open([1, 2], priority=priority)
    assert cache.stats().sequences == 0
    assert cache.open([1, 2]).row == 0, "its row is free"


def test_a_higher_priority_outlives_a_later_use() -> None:
    cache = Cache(full_plan(pages=9), policy="priority")
    run(cache, [1] * 16, priority=5)
    run(cache, [2] * 16)
    run(cache, [3] * 16)
    assert cache.open([1] * 17).num_cached == 16


def test_an_admission_reserve_keeps_room_for_running_sequences() -> None:
    cache = Cache(full_plan(pages=11), admission_reserve=0.3)
    running = cache.open([1] * 20)
    cache.extend(running, 20)
    cache.commit(running)
    with pytest.raises(OutOfPages):
        cache.extend(cache.open([2] * 12), 12)
    cache.extend(running, 12, tokens=[1] * 12)


@pytest.mark.parametrize("trailing", [(), (group("window", Window(6)),), (group("state", State()),)])
def test_several_sequences_can_be_extended_just_as_far_as_extend_goes(trailing: tuple[Any, ...]) -> None:
    cache = Cache(plan_of(group("full", Full()), *trailing, pages=11))
    sequences = [cache.open([number] * 40) for number in range(3)]
    fits = [count for count in range(1, 40) if cache.can_extend(sequences, count)]
    assert fits == list(range(1, fits[-1] + 1))
    assert cache.can_extend(sequences[0], fits[-1] + 1), "one alone could go further"
    with pytest.raises(OutOfPages):
        cache.extend(sequences, fits[-1] + 1)
    list(cache.extend(sequences, fits[-1]))


def test_super_pages_move_between_groups_as_demand_moves() -> None:
    plan = plan_of(group("full", Full(), 4), group("state", State(), 64), pools="auto", blocks=4)
    assert len(plan.pools) == 1
    cache = Cache(plan)
    supers = cache.state.pools[0].num_superpages
    per_super = plan.group("full").pages_per_superpage
    longest = cache.open(range(2))
    cache.extend(longest, 2)
    many = [cache.open([i, 1]) for i in range(min(40, supers - 2))]
    for sequence in many:
        cache.extend(sequence, 2)
    states = cache.state.pages[cache.state.states[0].number]
    held = (states.num_allocated + states.free_pages.size) // states.per_superpage
    for sequence in (*many, longest):
        cache.close(sequence)
    assert held >= len(many)
    full = cache.open(np.zeros(per_super * 4 * 3, np.int32))
    cache.extend(full, per_super * 4 * 3)
    check_books(cache)


def test_states_have_no_slots_of_tokens() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(9), close=False)
    with pytest.raises(BadOption, match="group 'state' keeps states, no rows of tokens"):
        cache.slots(sequence, "state", 0)


def test_context_parallel_ranks_hold_every_other_block_in_equal_tables() -> None:
    caches = (group("full", Full(), context_split=True), group("indexer", Full()))
    ranks = [Cache(plan_of(*caches, parallel=Parallel(cp=2, cp_rank=rank))) for rank in range(2)]
    sequences = [cache.open(range(20)) for cache in ranks]
    for cache, sequence in zip(ranks, sequences, strict=True):
        cache.extend(sequence, 20)
    assert (ranks[0].table("full") == ranks[1].table("full")).all()
    assert np.count_nonzero(ranks[0].table("full")[0]) == 3, "blocks of 4 tokens, two ranks: 8 tokens a slot"
    slots = [cache.slots(sequence, "full", 0) for cache, sequence in zip(ranks, sequences, strict=True)]
    mine = np.arange(20) // 4 % 2
    assert ((slots[0] >= 0) == (mine == 0)).all()
    assert ((slots[1] >= 0) == (mine == 1)).all()
    assert (ranks[0].slots(sequences[0], "indexer", 0) >= 0).all()
    ranks[0].commit(sequences[0])
    ranks[0].close(sequences[0])
    assert ranks[0].open(range(20)).num_cached == 16, "the reuse unit is a block of every rank"


def test_the_slots_of_a_context_parallel_rank_are_inside_its_pages() -> None:
    cache = Cache(plan_of(group("full", Full(), context_split=True), parallel=Parallel(cp=2, cp_rank=1)))
    sequence = cache.open(range(16))
    cache.extend(sequence, 16)
    first, second = cache.table("full")[sequence.row, :2].tolist()
    others = [-1] * 4
    expected = [*others, *range(first * 4, first * 4 + 4), *others, *range(second * 4, second * 4 + 4)]
    assert cache.slots(sequence, "full", 0).tolist() == expected


def test_a_pipeline_stage_without_the_layers_of_a_window_goes_on_from_anywhere() -> None:
    events: list[Event] = []
    stage = Parallel(pp=2, pp_rank=0)
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6)), parallel=stage), on_event=events.append)
    run(cache, range(40))
    replica = Replica(cache.plan)
    replica.apply(events)
    for length in range(1, 45):
        prompt = [*range(length), 99]
        assert cache.lookup(prompt) == replica.hit(prompt) == min(length, 40) // 4 * 4


def test_kernel_blocks_stay_in_step_with_pages() -> None:
    cache = Cache(plan_of(group("full", Full()), blocks=8, kernel_tokens=2))
    sequence = cache.open(range(20))
    cache.extend(sequence, 20)
    pages, kernels = cache.table("full")[sequence.row], cache.kernel_table("full")[sequence.row]
    assert kernels[:4].tolist() == [pages[0] * 4 + i for i in range(4)]
    assert kernels[12:16].tolist() == [NULL] * 4
    assert cache.slots(sequence, "full", 9, 11).tolist() == [pages[1] * 8 + 1, pages[1] * 8 + 2]


def test_sinks_and_chunks_keep_what_they_must() -> None:
    cache = Cache(plan_of(group("sink", SinkWindow(4, 6)), group("chunk", Chunk(8))))
    sequence = run(cache, range(42), close=False)
    sink, chunk = cache.table("sink")[sequence.row], cache.table("chunk")[sequence.row]
    assert (sink != NULL).tolist()[:11] == [True] + [False] * 7 + [True, True, True]
    assert (chunk != NULL).tolist()[:11] == [False] * 10 + [True]


def test_a_batch_of_decode_steps_crosses_blocks_at_different_times() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(5)), pages=200))
    sequences = [run(cache, [i] * (4 + i), close=False) for i in range(5)]
    engine = engine_of(cache)
    batch = Batch(sequences)
    for step in range(20):
        starts = [sequence.length for sequence in sequences]
        engine.carry_out(cache.extend(batch, 1, tokens=np.full(5, step)))
        for sequence, start in zip(sequences, starts, strict=True):
            engine.step(sequence, start)
        engine.carry_out(cache.commit(batch))
        check_books(cache)
    assert sequences[2].tokens.tolist() == [2] * 6 + list(range(20))


def test_ids_are_handed_to_a_few_sequences_at_a_time() -> None:
    cache = Cache(full_plan(pages=20_000, blocks=16), rows=384, max_tokens=1024)
    batch, log = Batch([cache.open([i]) for i in range(384)]), cache.state.counters
    cache.extend(batch, 1)
    for step in range(600):
        before = [s._num_tokens for s in batch.sequences]
        cache.extend(batch, 1, tokens=np.arange(384) + step)
        assert sum(s._num_tokens > n for s, n in zip(batch.sequences, before, strict=True)) <= 2
    assert (log.known[batch.rows] == 601).all()
    for i, sequence in enumerate(batch.sequences):
        assert sequence.tokens.tolist() == [i, *range(i, i + 600)]


def test_stats_tell_requests_and_hits() -> None:
    cache = Cache(full_plan(pages=6))
    run(cache, [1] * 16)
    run(cache, [2] * 16)
    run(cache, [1] * 16)
    stats = cache.stats()
    assert (stats.requests, stats.prompt_tokens) == (3, 48)
    assert stats.hit_tokens < 12


def test_bad_input_is_named_and_changes_nothing() -> None:
    cache, other = Cache(full_plan()), Cache(full_plan())
    sequence = run(cache, range(9), close=False)
    for bad in ([], [1.5], ["a"], [[1, 2]], [-1], [2**40], None):
        with pytest.raises(BadTokens):
            cache.open(bad)
    for call in (
        lambda: cache.extend(sequence, 0),
        lambda: cache.extend(sequence, 1, lookahead=-1),
        lambda: cache.commit(sequence, 99),
        lambda: cache.commit(sequence, 3),
        lambda: other.extend(sequence, 1),
        lambda: cache.extend([sequence, sequence], 1),
        lambda: cache.fork(sequence, 0),
        lambda: cache.slots(sequence, "full", 3, 99),
        cache.reset,
    ):
        with pytest.raises(BadSequence):
            call()
    with pytest.raises(BadTokens, match="3 tokens for 1 sequences that get 2"):
        cache.extend(sequence, 2, tokens=[1, 2, 3])
    assert sequence.length == 9
    batch = Batch([sequence])
    cache.close(sequence)
    with pytest.raises(BadSequence, match="closed"):
        cache.close(sequence)
    with pytest.raises(BadSequence, match="closed"):
        cache.extend(batch, 1)
    check_books(cache)


def test_a_closed_sequence_answers_with_an_error_not_with_another_row() -> None:
    cache = Cache(full_plan(), rows=1)
    sequence = run(cache, range(9))
    other = run(cache, range(50, 55), close=False)
    for ask in (lambda: sequence.length, lambda: sequence.tokens, lambda: sequence.stop):
        with pytest.raises(BadSequence, match="closed"):
            ask()
    assert other.length == 5
    assert repr(sequence) == "<Sequence closed, 0 cached>"


def test_a_cache_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="unknown policy 'lruu'; did you mean 'lru'"):
        Cache(full_plan(), policy="lruu")
    for wrong in ({"rows": 0}, {"max_tokens": 0}, {"admission_reserve": 1.5}, {"policy": None}):
        with pytest.raises(BadOption):
            Cache(full_plan(), **wrong)
    mistyped: dict[str, Any]
    for mistyped in ({"plan": "plan.json"}, {"retention": "all"}, {"on_event": []}, {"admission_reserve": "0.1"}):
        with pytest.raises((CacheError, TypeError)):  # compiled, types are checked before
            Cache(**({"plan": full_plan()} | mistyped))


def test_the_callers_array_is_the_callers_before_and_after() -> None:
    cache = Cache(full_plan())
    buffer = np.arange(16, dtype=np.int32)
    sequence = run(cache, buffer, close=False)
    buffer[:] = 77
    cache.close(sequence)
    assert cache.open(np.full(16, 77)).num_cached == 0, "tokens that were never computed"
    again = cache.open(range(16))
    assert again.num_cached == 12
    assert again.tokens.tolist() == list(range(16))
    fresh = np.arange(100, 120, dtype=np.int32)
    other = run(cache, fresh, close=False, reuse=False)
    cache.truncate(other, 18)
    cache.extend(other, 1, tokens=[5])
    assert other.tokens.tolist() == [*range(100, 118), 5]
    assert fresh.tolist() == list(range(100, 120))


def test_more_sequences_than_rows_make_more_rows_and_lose_nothing() -> None:
    cache = Cache(plan_of(group("full", Full()), blocks=8, kernel_tokens=2, pages=200), rows=2)
    sequences = [run(cache, [i] * 20, close=False) for i in range(7)]
    before = [cache.table("full")[s.row, :3].tolist() for s in sequences[:2]]
    assert len(cache.table("full")) == 8
    assert all(page != NULL for pages in before for page in pages)
    check_books(cache)


def test_a_cache_belongs_to_one_thread() -> None:
    cache = Cache(full_plan())
    caught: list[BaseException] = []

    def trespass() -> None:
        try:
            cache.open([1])
        except WrongThread as error:
            caught.append(error)

    thread = threading.Thread(target=trespass)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_thread_that_adopts_a_cache_owns_it() -> None:
    cache = Cache(full_plan())
    opened: list[Sequence] = []

    def adopt() -> None:
        cache.bind_thread()
        opened.append(cache.open([1]))

    thread = threading.Thread(target=adopt)
    thread.start()
    thread.join()
    assert len(opened) == 1
    with pytest.raises(WrongThread):
        cache.close(opened[0])


def test_who_is_told_of_events_cannot_break_the_cache_by_what_it_raises_or_calls() -> None:
    caches: list[Cache] = []
    for call in (lambda cache: cache.lookup(range(20)), lambda cache: cache.open([1]), lambda cache: cache.no_method):
        told: list[Event] = []

        def on_event(event: Event, call: Any = call, told: list[Event] = told) -> None:
            told.append(event)
            call(caches[-1])

        caches.append(Cache(plan_of(group("full", Full()), group("window", Window(6)), pages=20), on_event=on_event))
        for start in range(0, 40, 10):
            with pytest.warns(EventLost, match=r"on_event failed: .*; it was not told of"):
                run(caches[-1], range(start, start + 17))
            check_books(caches[-1])
        assert run(caches[-1], range(30, 47)).num_cached == 16
        replica = Replica(caches[-1].plan)
        replica.apply(told)
        assert replica.hit(range(30, 47)) == 16


def test_an_event_whose_loss_is_an_error_changes_nothing_either() -> None:
    cache = Cache(full_plan(), on_event=lambda event: 1 // 0)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(cache, range(17)).num_cached == 0
        assert run(cache, range(17)).num_cached == 16
    check_books(cache)


def test_tables_keep_their_addresses_within_rows_and_max_tokens() -> None:
    cache = Cache(
        plan_of(group("full", Full()), group("window", Window(6)), group("state", State())), rows=4, max_tokens=120
    )
    addresses = {tag: cache.table(tag).ctypes.data for tag in ("full", "window", "state")}
    sequences = [cache.open([i, *range(20)]) for i in range(4)]
    for sequence in sequences:
        list(cache.extend(sequence, 21))
        cache.commit(sequence)
    list(cache.extend(sequences[0], 99 - 15, drafts=15))
    with pytest.raises(NeverFits, match="121 tokens are more than the 120"):
        cache.extend(sequences[1], 100)
    with pytest.raises(BadSequence, match="16 drafts, of which there can be 15"):
        cache.extend(sequences[1], 16, drafts=16)
    assert {tag: cache.table(tag).ctypes.data for tag in addresses} == addresses


def test_beams_are_reordered_within_the_rows_that_they_have() -> None:
    cache = Cache(full_plan(), rows=2)
    first = run(cache, range(6), close=False)
    made, copied = cache.fork(first)
    beams, address = [first, *made], cache.table("full").ctypes.data
    rows = {beam.row for beam in beams}
    list(copied)
    assert len(list(cache.reorder(beams, [1, 1]))) == 1
    assert cache.table("full").ctypes.data == address
    assert {beam.row for beam in beams} == rows
    check_books(cache)


def test_arriving_takes_only_the_pages_that_the_reach_there_needs_and_leaves_a_resume_point() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6)), group("state", State())))
    sequence = cache.open(range(40))
    cache.load_to(sequence, 32)
    assert sequence.length == 32
    held = {g.tag: g.held for g in cache.stats().groups}
    assert held == {"full": 8, "window": 2, "state": 2}, "a live state, and a page for its snapshot"
    assert cache.table("window")[sequence.row, :6].tolist() == [NULL] * 6, "what the window has passed is NULL"
    assert cache.open(range(40)).num_cached == 0, "nothing is seen before the commit"
    engine_of(cache).load(sequence)
    engine_of(cache).carry_out(cache.commit(sequence))
    run(cache, range(40))
    assert cache.open(range(33)).num_cached == 32
    assert cache.open(range(32)).num_cached == 0, "positions on the way were not loaded for windows and states"
    check_books(cache)


def test_an_arrival_whose_load_failed_leaves_nothing_behind() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = cache.open(range(40))
    cache.load_to(sequence, 32)
    cache.close(sequence, keep=False)
    assert cache.open(range(40)).num_cached == 0
    assert all(g.held == g.cached == 0 for g in cache.stats().groups)


@pytest.mark.parametrize("position", [-4, 0, 4, 14, 20, 24])
def test_arriving_where_one_cannot_is_refused_and_changes_nothing(position: int) -> None:
    cache = Cache(full_plan())
    run(cache, range(5))
    sequence = cache.open(range(20))
    with pytest.raises(BadSequence, match=f"cannot load to {position}: .* a multiple of 4 after 4 and before 20"):
        cache.load_to(sequence, position)
    cache.extend(sequence, 1)
    with pytest.raises(BadSequence, match="right after open"):
        cache.load_to(sequence, 16)
    assert sequence.length == 5


def test_an_arrival_for_which_there_are_no_pages_is_refused_as_an_extend_is() -> None:
    cache = Cache(full_plan(pages=8))
    running = run(cache, range(12), close=False)
    sequence = cache.open(range(100, 140))
    with pytest.raises(NeverFits):
        cache.load_to(sequence, 36)
    with pytest.raises(OutOfPages):
        cache.load_to(sequence, 24)
    assert (sequence.length, running.length) == (0, 12)
    cache.load_to(sequence, 16)


def test_points_on_the_way_are_multiples_of_the_retentions_unit() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=8, unit=12))
    sequence = cache.open(range(60))
    assert [sequence.stop, cache.grid] == [12, 4]


def test_an_arrival_beyond_a_hit_leaves_the_hits_window_behind_and_keeps_the_state_that_was_loaded() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6)), group("state", State())))
    run(cache, range(17))
    sequence = cache.open(range(60))
    assert sequence.num_cached == 16
    cache.load_to(sequence, 48)
    assert cache.table("window")[sequence.row, :10].tolist() == [NULL] * 10
    engine_of(cache).load(sequence)
    engine_of(cache).carry_out(cache.commit(sequence))
    assert not cache.extend(sequence, 12), "the snapshot of the hit would overwrite the state"
    engine_of(cache).step(sequence, 48)
    check_books(cache)


# ---- steps


def test_a_batch_with_one_row_of_undecided_drafts_is_not_extended() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    one, two = (run(cache, [i] * 5, close=False) for i in range(2))
    list(cache.extend(one, 3, tokens=[1, 2, 3], drafts=2))
    with pytest.raises(NotSettled, match="neither accepted nor rejected"):
        cache.extend([one, two], 1)
    assert (one.length, two.length) == (8, 5)


@pytest.mark.parametrize("rows", [1, 2])
def test_drafts_get_state_columns_where_pages_suffice_too(rows: int) -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), blocks=64))
    sequences = [run(cache, [i] * 5, close=False) for i in range(rows)]
    list(cache.extend(sequences, 3, tokens=[1, 2, 3] * rows, drafts=2))
    for sequence in sequences:
        assert np.count_nonzero(cache.table("state")[sequence.row]) == 3


def test_a_draft_that_may_be_rejected_is_no_checkpoint() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(decode_every=4))
    sequence = run(cache, range(5), close=False)
    list(cache.extend(sequence, 4, tokens=[5, 6, 7, 8], drafts=3, checkpoints=True))
    assert sequence.checkpoints == [], "the state after 8 tokens is a column of its own"
    cache.accept(sequence, 9)
    cache.commit(sequence)
    list(cache.extend(sequence, 4, tokens=[9, 10, 11, 12], checkpoints=True))
    assert [checkpoint.position for checkpoint in sequence.checkpoints] == [12]


@pytest.mark.parametrize("rows", [1, 2])
def test_the_slot_mapping_is_where_the_last_step_writes(rows: int) -> None:
    cache = Cache(full_plan())
    sequences = [cache.open([i] * 20) for i in range(rows)]
    cache.extend(sequences, 5)
    cache.extend(sequences, list(range(3, 3 + rows)))
    expected = np.concatenate([cache.slots(sequence, "full", 5) for sequence in sequences])
    assert cache.slot_mapping(sequences)["full"].tolist() == expected.tolist()
    cache.accept(sequences, 2)
    assert cache.slot_mapping(sequences)["full"].tolist() == [], "the first step is cut too"


@pytest.mark.parametrize("rows", [1, 2])
def test_lookahead_keeps_pages_for_tokens_after_the_step(rows: int) -> None:
    cache = Cache(full_plan())
    sequences = [cache.open([i] * 20) for i in range(rows)]
    cache.extend(sequences, 3, lookahead=9)
    for sequence in sequences:
        assert sequence.length == np.count_nonzero(cache.table("full")[sequence.row]) == 3


@pytest.mark.parametrize("rows", [1, 2])
def test_the_end_of_a_sequence_is_resumed_at_the_last_position_of_the_grid(rows: int) -> None:
    cache = Cache(
        plan_of(group("full", Full()), group("window", Window(2)), blocks={"full": 8, "window": 1}),
        retention=Retention(False, False, 0),
    )
    sequences = [cache.open([i] * 3) for i in range(rows)]
    for count in (7, 7, 8):
        cache.extend(sequences, count, tokens=np.repeat(range(rows), count))
        cache.commit(sequences)
    for sequence in sequences:
        cache.close(sequence)
    assert [cache.lookup([i] * 22) for i in range(rows)] == [16] * rows
    check_books(cache)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_commit_at_the_stops_of_a_batch_asks_for_all_their_snapshots(rows: int) -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequences = [cache.open([i] * 16) for i in range(rows)]
    for count in (2, 7, 3):
        assert not cache.extend(sequences, count)
    (copy,) = cache.commit(sequences)
    assert copy.src.tolist() == [cache.table("state")[sequence.row, 0] for sequence in sequences]


def test_a_commit_that_leaves_drafts_out_leaves_them_open() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(7), close=False)
    engine = engine_of(cache)
    engine.carry_out(cache.extend(sequence, 4, tokens=[7, 8, 9, 10], drafts=3))
    engine.step(sequence, 7)
    engine.carry_out(cache.commit(sequence, 9))
    assert np.count_nonzero(cache.table("state")[sequence.row]) == 4
    cache.accept(sequence, 9)
    engine.carry_out(cache.extend(sequence, 1, tokens=[5]))
    engine.step(sequence, 9)  # checks that the live state is the one after 9 tokens


def test_drafts_that_are_all_accepted_are_settled() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(7), close=False)
    list(cache.extend(sequence, 4, tokens=[7, 8, 9, 10], drafts=3))
    cache.accept(sequence, 11)
    assert np.count_nonzero(cache.table("state")[sequence.row]) == 1
    list(cache.extend(sequence, 1, tokens=[5]))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_within_the_pages_of_an_earlier_lookahead_takes_and_gives_none(rows: int) -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequences = [cache.open([i] * 6) for i in range(rows)]
    list(cache.extend(sequences, 3, lookahead=9))
    list(cache.extend(cache.open([9] * 8), 8))
    list(cache.extend(sequences, 1))
    for sequence in sequences:
        assert np.count_nonzero(cache.table("full")[sequence.row]) == 3
    check_books(cache)


def test_the_live_state_at_the_end_of_a_sequence_is_a_resume_point() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(5), close=False)
    list(cache.extend(sequence, 7, tokens=range(5, 12)))
    cache.commit(sequence)
    cache.close(sequence)
    assert cache.lookup(range(13)) == 12
    check_books(cache)


# ---- what others find of a running sequence


def generate(cache: Cache, sequence: Sequence, tokens: range) -> None:
    """One token a step."""
    engine = engine_of(cache)
    for token in tokens:
        engine.carry_out(cache.extend(sequence, 1, tokens=[token]))
        engine.step(sequence, sequence.length - 1)
        engine.carry_out(cache.commit(sequence))
        check_books(cache)


def test_while_generating_the_last_state_is_kept_with_the_window_that_it_needs() -> None:
    caches = group("full", Full()), group("window", Window(6)), group("state", State())
    cache = Cache(plan_of(*caches), retention=Retention(every=0, decode_every=8))
    sequence = run(cache, range(5), close=False)
    generate(cache, sequence, range(5, 31))
    assert sequence.retained, "the window has passed what the state after 24 tokens needs"
    assert cache.stats().group("state").cached == 1, "that of the prompt"
    assert cache.lookup(range(31)) == 24
    assert not sequence.retained
    assert cache.stats().group("state").cached == 2
    run(cache, [*range(31), 99])
    generate(cache, sequence, range(31, 50))
    cache.close(sequence)
    check_books(cache)
    run(cache, range(60))
    assert cache.lookup([*range(48), 99]) == 48


def test_a_state_is_found_as_soon_as_the_step_that_ends_there_is_committed() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=8))
    sequence, engine = cache.open(range(40)), engine_of(cache)
    for start in (0, 8, 16):
        engine.carry_out(cache.extend(sequence, 8))
        engine.step(sequence, start)
        assert cache.lookup(range(40)) == start
        engine.carry_out(cache.commit(sequence))
        assert cache.lookup(range(40)) == start + 8
    run(cache, [*range(20), 99])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_window_keeps_what_points_on_the_way_need_however_short_the_steps(rows: int) -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))), retention=Retention(every=8))
    sequences = [cache.open([i] * 40) for i in range(rows)]
    for _ in range(10):
        cache.extend(sequences, 4)
        cache.commit(sequences)
        check_books(cache)
    assert [cache.lookup([*[i] * 18, 99]) for i in range(rows)] == [16] * rows
    check_books(cache)


def test_a_window_keeps_no_more_than_points_on_the_way_need() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))), retention=Retention(every=16))
    sequence = cache.open(range(60))
    for count in (12, 20):
        cache.extend(sequence, count)
        cache.commit(sequence)
    assert cache.stats().group("window").held == 4, "two blocks before 16, two before 32"


def test_who_walks_by_finds_more_of_a_run_that_was_growing() -> None:
    cache = Cache(full_plan())
    sequence = run(cache, range(4), close=False)
    for start in (4, 12, 20):
        cache.extend(sequence, 8, tokens=range(start, start + 8))
        cache.commit(sequence)
        if start < 20:
            cache.publish()
    assert cache.lookup(range(40)) == 28
    check_books(cache)


def test_what_is_generated_enters_the_tree_only_when_somebody_asks() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    sequence = run(cache, range(9), close=False)
    generate(cache, sequence, range(9, 20))
    full = cache.stats().group("full")
    assert (full.cached, full.held) == (2, 3)


def test_of_the_points_left_while_generating_only_the_last_is_kept() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    sequence = run(cache, range(9), close=False)
    for start, end in ((9, 12), (12, 20)):
        generate(cache, sequence, range(start, end))
        cache.publish()
    check_books(cache)
    assert cache.lookup([*range(12), 99]) == 8
    assert cache.lookup([*range(20), 99]) == 20


def points_of(cache: Cache) -> dict[int, Kind]:
    """The kind of each point in the tree, by position."""
    return {point.position: point.kind for node in cache.state.prefix.tree.nodes() for point in node.points}


def test_a_point_of_an_answer_that_a_prompt_asked_for_stays_when_the_answer_goes_on() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    sequence = run(cache, range(9), close=False)
    generate(cache, sequence, range(9, 12))
    cache.publish()
    run(cache, [*range(12), 99])
    generate(cache, sequence, range(12, 20))
    cache.publish()
    assert cache.lookup([*range(12), 98]) == 12
    check_books(cache)


def test_of_the_states_taken_while_generating_only_the_last_is_held() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(decode_every=4))
    sequence = run(cache, range(9), close=False)
    for token in range(9, 40):
        generate(cache, sequence, range(token, token + 1))
        assert cache.stats().group("state").held <= 3, "the live state, the last one taken, and the next one's page"
    cache.close(sequence)
    assert [position for position, kind in points_of(cache).items() if kind == Kind.ANSWER] == [40]
    check_books(cache)


def test_where_prompts_to_come_will_part_is_a_branch() -> None:
    for trailing in (Window(6), State()):
        cache = Cache(plan_of(group("full", Full()), group("trailing", trailing)), retention=Retention(every=0))
        run(cache, range(40), branches=[21])
        assert points_of(cache)[20] == Kind.BRANCH


def test_an_end_whose_state_was_evicted_is_no_point_of_a_sequence_that_has_gone_on() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = run(cache, range(9), close=False)
    assert set(points_of(cache)) == {8}
    cache.state.prefix.drop_point(sequence.node.points[-1])
    cache.close(sequence)
    assert 8 not in points_of(cache)
    assert cache.lookup(range(9)) == 0
    check_books(cache)


def test_beams_that_were_swapped_and_closed_are_looked_for_nowhere() -> None:
    cache = Cache(full_plan())
    beams = [run(cache, [i, *range(8)], close=False) for i in range(2)]
    tree = cache.state.prefix.tree
    list(cache.reorder(beams, [1, 0]))
    list(cache.reorder(beams, [1, 1]))
    for beam in beams:
        cache.close(beam)
    assert not any(node.running for node in (*tree.roots.values(), *tree.nodes()))


def test_beams_with_drafts_are_not_forked() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    beams = [run(cache, range(9), close=False), run(cache, range(50, 59), close=False)]
    list(cache.extend(beams, 3, tokens=[1, 2, 3] * 2, drafts=2))
    with pytest.raises(NotSettled, match="2 drafts cannot be forked"):
        cache.reorder(beams, [1, 1])
    cache.accept(beams, [10, 11])
    list(cache.commit(beams))
    list(cache.reorder(beams, [1, 1]))
    assert [beam.length for beam in beams] == [11, 11]
    check_books(cache)


def test_a_policy_is_told_why_a_point_is_there() -> None:
    kinds: list[Kind] = []

    def noting(candidate: EvictionCandidate) -> object:
        kinds.append(candidate.kind)
        return candidate.last_used

    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=16), policy=noting)
    for tokens, expected in (
        (range(9), {Kind.PROMPT}),
        ([*range(100, 140), 1], {Kind.SPACED, Kind.PROMPT}),
        ([*range(100, 124), 7, 7, 7, 7, 7], {Kind.BRANCH, Kind.PROMPT}),
    ):
        sequence = run(cache, tokens, close=False)
        assert set(kinds) >= expected
        assert Kind.ANSWER not in kinds
        kinds.clear()
    generate(cache, sequence, range(50, 53))
    cache.close(sequence)
    assert Kind.ANSWER in kinds


def test_the_end_of_a_prompt_is_an_end_though_no_point_was_asked_for_there() -> None:
    retention = Retention(prompt_end=False, branches=False, every=8)
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))), retention=retention)
    kinds = [(point.position, point.kind) for point in run(cache, range(17)).node.points]
    assert kinds == [(8, Kind.SPACED), (16, Kind.ANSWER)]


# ---- what is private


def test_a_private_prompt_with_states_has_nothing_to_publish_step_by_step() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=0))
    sequence = run(cache, range(9), close=False)
    private = cache.open(range(100, 112))
    for count in (8, 4):
        list(cache.extend(private, count))
        list(cache.commit(private, share=False))
    for each in (sequence, private):
        list(cache.extend(each, 1, tokens=[5]))
        list(cache.commit(each))
        assert cache.state.counters.next_point_of[each.row] > each.length + 1
    cache.close(private)
    assert cache.lookup(range(100, 112)) == 0


@pytest.mark.parametrize("forked", [False, True])
def test_what_is_private_is_found_by_nobody_not_from_a_fork_either(forked: bool) -> None:
    cache = Cache(full_plan())
    sequence = run(cache, range(8), close=False)
    cache.extend(sequence, 8, tokens=range(8, 16))
    cache.commit(sequence, share=False)
    assert sequence.committed == 8
    if forked:
        (child,), copies = cache.fork(sequence)
        list(copies)
        cache.close(child)
    cache.close(sequence)
    assert cache.lookup(range(17)) == 8
    check_books(cache)


# ---- reorder and truncate


def test_what_a_private_sequence_finds_is_shared_all_the_same() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    waiting = cache.open(range(20))
    cache.commit(waiting, share=False)
    run(cache, range(14))
    assert cache.rematch(waiting) == 12
    assert waiting.committed == 12
    run(cache, range(18))
    assert cache.rematch(waiting) == 16
    (child,), copies = cache.fork(waiting)
    assert not copies
    list(cache.extend([waiting, child], 4))
    list(cache.commit([waiting, child]))
    cache.close(waiting)
    cache.close(child)
    check_books(cache)
    assert cache.lookup(range(30)) == 16, "what they wrote is theirs"


def test_beams_that_only_change_places_need_no_pages() -> None:
    cache = Cache(full_plan(pages=5))
    beams = [run(cache, [i] * 6, close=False) for i in range(2)]
    assert not cache.reorder(beams, [1, 0])
    assert [beam.tokens.tolist() for beam in beams] == [[1] * 6, [0] * 6]


def test_a_batch_made_before_a_reorder_is_refused() -> None:
    cache = Cache(full_plan())
    beams = [run(cache, [i] * 6, close=False) for i in range(2)]
    batch = Batch(beams)
    cache.extend(batch, 1)
    cache.reorder(beams, [1, 0])
    with pytest.raises(BadSequence, match="reordered since"):
        cache.extend(batch, 1)


def test_a_batch_of_which_one_was_closed_is_refused_whatever_came_into_its_row() -> None:
    cache = Cache(full_plan())
    first, second = cache.open([1]), cache.open([2])
    batch = Batch([first, second])
    cache.extend(batch, 1)
    cache.commit(batch)
    row = second.row
    cache.close(second)
    (child,), _ = cache.fork(first)
    assert child.row == row
    with pytest.raises(BadSequence, match="closed, or was reordered"):
        cache.extend(batch, 1, tokens=[3, 3])
    cache.close(child)
    assert cache.open([4]).row == row
    with pytest.raises(BadSequence, match="closed, or was reordered"):
        cache.extend(batch, 1, tokens=[3, 3])


def test_what_was_committed_before_a_reorder_is_still_found() -> None:
    cache = Cache(full_plan())
    beams = [run(cache, [i] * 6, close=False) for i in range(2)]
    cache.reorder(beams, [1, 0])
    assert [cache.lookup([i] * 6) for i in range(2)] == [4, 4]


def test_a_fork_at_the_end_of_a_window_block_needs_no_page() -> None:
    cache = Cache(plan_of(group("window", Window(8)), pages=3))
    sequence = run(cache, range(8), close=False)
    (child,), copies = cache.fork(sequence)
    assert not copies
    assert cache.table("window")[child.row, :2].tolist() == cache.table("window")[sequence.row, :2].tolist()


def test_a_fork_shares_window_blocks_that_are_in_the_tree_and_copies_the_others() -> None:
    caches = group("full", Full()), group("window", Window(8))
    cache = Cache(plan_of(*caches, blocks={"full": 8, "window": 4}, own_pools={"window": PoolRequest(pages=4)}))
    sequence = run(cache, range(12), close=False)
    (child,), copies = cache.fork(sequence)
    assert [(copy.tag, len(copy.src)) for copy in copies] == [("full", 1), ("window", 1)]
    table = cache.table("window")[[sequence.row, child.row], :3]
    assert (table[0] == table[1]).tolist() == [True, True, False]
    assert not cache.truncate(child, 10), "what it goes back into is its own"
    check_books(cache)


def test_a_fork_copies_no_window_block_that_is_gone() -> None:
    caches = group("full", Full()), group("window", Window(4))
    cache = Cache(plan_of(*caches, blocks={"full": 16, "window": 4}, own_pools={"window": PoolRequest(pages=8)}))
    sequence = run(cache, range(28), close=False)
    other = cache.open([99] * 28)
    cache.extend(other, 28)
    cache.commit(other)
    assert np.count_nonzero(cache.table("window")[sequence.row]) == 1, "the others were taken in a shortage"
    cache.close(other, keep=False)
    children, copies = cache.fork(sequence, 4)
    assert [(copy.tag, len(copy.src)) for copy in copies] == [("full", 4), ("window", 4)]
    engine_of(cache).carry_out(copies)
    engine_of(cache).run()
    for child in children:
        engine_of(cache).check_committed(child, list(range(28)))
    check_books(cache)


def test_a_fork_can_go_back_as_far_as_its_parent() -> None:
    caches = group("full", Full()), group("window", Window(4))
    cache = Cache(plan_of(*caches, blocks={"full": 16, "window": 4}))
    (child,), copies = cache.fork(run(cache, range(28), close=False))
    engine_of(cache).carry_out(copies)
    engine_of(cache).run()
    cache.truncate(child, 18)
    engine_of(cache).check_committed(child, list(range(18)))
    check_books(cache)


def test_a_fork_for_whose_window_block_there_is_no_page_changes_nothing() -> None:
    caches = group("full", Full()), group("window", Window(12))
    cache = Cache(plan_of(*caches, blocks={"full": 8, "window": 4}, own_pools={"window": PoolRequest(pages=3)}))
    sequence = run(cache, range(12), close=False)
    with pytest.raises(OutOfPages):
        cache.fork(sequence)
    check_books(cache)


def test_tokens_of_a_prompt_that_are_rejected_are_still_known() -> None:
    cache = Cache(full_plan())
    sequence = cache.open(range(20))
    cache.extend(sequence, 8)
    cache.accept(sequence, 3)
    assert (sequence.length, sequence.tokens.tolist()) == (3, list(range(20)))


def test_after_a_truncation_others_find_what_was_written_then() -> None:
    cache = Cache(full_plan())
    sequence = run(cache, range(8), close=False)
    cache.truncate(sequence, 3)
    cache.extend(sequence, 5, tokens=[9] * 5)
    cache.commit(sequence)
    assert cache.lookup([0, 1, 2, 9, 9]) == 4
    assert cache.lookup(range(8)) == 0


def test_a_truncation_inside_the_window_is_possible() -> None:
    cache = Cache(plan_of(group("window", Window(8))))
    sequence = run(cache, range(30), close=False)
    cache.truncate(sequence, 29)
    assert (sequence.length, sequence.num_prompt) == (29, 29)


# ---- refusals


def test_a_refusal_names_the_sequences_that_do_not_fit_and_whom_to_preempt() -> None:
    cache = Cache(full_plan(pages=13))
    important, old, young = (cache.open([i, 1], priority=priority) for i, priority in enumerate((1, 0, 0)))
    cache.extend([important, old, young], 2)
    asking = [cache.open([10 + i] * 40) for i in range(4)]
    cache.extend(asking, 4)
    with pytest.raises(OutOfPages) as error:
        cache.extend(asking, 8)
    assert error.value.sequences == tuple(asking[2:]), "five pages are free: two of four fit"
    assert error.value.preemptible == (young, old, important)


def test_a_sequence_that_takes_every_page_fits() -> None:
    cache = Cache(full_plan(pages=9))
    cache.check_fits(32)
    with pytest.raises(NeverFits):
        cache.check_fits(33)


def test_a_load_leaves_the_admission_reserve_to_those_that_run() -> None:
    for trailing in ((), (group("state", State()),)):
        cache = Cache(plan_of(group("full", Full()), *trailing, pages=11), admission_reserve=0.3)
        running = cache.open([1] * 20)
        list(cache.extend(running, 20))
        sequence = cache.open([2] * 20)
        with pytest.raises(OutOfPages):
            cache.load_to(sequence, 12)
        cache.load_to(sequence, 8)


# ---- what is reclaimed


def test_no_point_is_left_where_a_part_of_its_window_was_reclaimed() -> None:
    caches = group("full", Full()), group("window", Window(6))
    own = {"window": PoolRequest(pages=20)}
    cache = Cache(
        plan_of(*caches, blocks={"full": 8, "window": 1}, own_pools=own), retention=Retention(False, False, 0)
    )
    sequence = run(cache, range(3), close=False)
    generate(cache, sequence, range(3, 18))
    assert cache.stats().group("window").held == 7, "from 11 on, for a point at 16"
    other = cache.open([50] * 15)
    cache.extend(other, 15)
    assert cache.stats().group("window").held == 20, "from 13 on"
    cache.close(sequence)
    assert cache.lookup(range(18)) == 0
    check_books(cache)


def test_a_point_fills_the_gaps_of_the_runs_above_it() -> None:
    own = {"window": PoolRequest(pages=5)}
    cache = Cache(
        plan_of(group("full", Full()), group("window", Window(6)), own_pools=own), retention=Retention(every=0)
    )
    first = cache.open(range(17))
    for count in (8, 8, 1):
        cache.extend(first, count)
        cache.commit(first)
    cache.close(first)
    second = cache.open([*range(16), 50, 51, 52, 53, 54])
    assert second.num_cached == 16
    run(cache, [7] * 9)
    third = cache.open([8] * 9)
    cache.extend(third, 9)  # evicts the point that the second stands on, whose window pages are the second's, and [7]
    cache.close(third, keep=False)
    cache.extend(second, 5)
    cache.commit(second)
    cache.publish()
    check_books(cache)
    assert cache.lookup([*range(16), 50, 51, 52, 53, 9]) == 20


def test_window_pages_of_points_that_lie_close_together_are_retained_as_one_run() -> None:
    cache = Cache(plan_of(group("window", Window(6))), retention=Retention(every=4))
    sequence = cache.open(range(65))
    cache.extend(sequence, 32)
    cache.commit(sequence)
    ((first, pages),) = sequence.retained[0]
    assert (first, len(pages)) == (0, 6), "the blocks before those that the next token sees"
    cache.extend(sequence, 33)
    cache.commit(sequence)
    assert [cache.lookup([*range(end), 99]) for end in range(4, 65, 4)] == [*range(4, 65, 4)]
    check_books(cache)


def test_what_is_parked_is_reclaimed_for_others() -> None:
    caches = group("full", Full()), group("window", Window(6)), group("state", State())
    own = {"window": PoolRequest(pages=7)}
    cache = Cache(plan_of(*caches, own_pools=own), retention=Retention(every=0, decode_every=8))
    sequence = run(cache, range(5), close=False)
    generate(cache, sequence, range(5, 31))
    assert sequence.retained
    other = cache.open([50] * 20)
    list(cache.extend(other, 20))
    assert not sequence.retained
    check_books(cache)
    generate(cache, sequence, range(31, 32))


def test_a_snapshot_that_is_to_be_copied_is_given_up_for_others_but_not_one_that_a_step_writes() -> None:
    caches = group("full", Full()), group("state", State())
    for checkpoints in (False, True):
        cache = Cache(plan_of(*caches, own_pools={"state": PoolRequest(pages=3)}))
        first, second, third = (cache.open([i] * 16) for i in range(3))
        assert not cache.extend(first, 12, checkpoints=checkpoints)
        assert not cache.extend(second, 2)
        if checkpoints:
            with pytest.raises(OutOfPages):
                cache.extend(third, 2)
        else:
            assert not cache.extend(third, 2)
        assert not cache.commit(first)
        assert not cache.extend(first, 1), "no copy waits any more"
        check_books(cache)


def num_points(cache: Cache) -> int:
    return sum(len(node.points) for node in cache.state.prefix.tree.nodes())


def cache_of_one_pool(num_superpages: int, window: int, **options: Any) -> Cache:
    """Of full attention and a window, a super-page a page."""
    cache = Cache(plan_of(group("full", Full()), group("window", Window(window)), pools="shared"), **options)
    (pool,) = cache.state.pools
    assert pool.is_whole
    pool.free_superpages.replace(np.arange(1, num_superpages + 1, dtype=np.int32))
    pool.num_superpages = num_superpages
    return cache


def test_what_would_free_no_page_is_not_evicted() -> None:
    cache = cache_of_one_pool(12, window=6, retention=Retention(every=0))
    for tokens in ([7] * 9, range(17)):
        compute(cache, cache.open(tokens), 4)
    standing = cache.open(range(17))
    assert (standing.num_cached, cache.lookup([7] * 9)) == (16, 8)
    cache.extend(cache.open([8] * 12), 12)
    assert (cache.lookup(range(17)), cache.lookup([7] * 9)) == (16, 0), "its window pages are those of a table"


def held_pool(policy: str = "adaptive") -> tuple[Cache, list[Sequence]]:
    """20 sequences of 9 tokens, which have left a point each, hold all pages but 6."""
    cache = cache_of_one_pool(126, window=9, policy=policy)
    return cache, [run(cache, [i] * 9, close=False) for i in range(20)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_points_whose_pages_tables_name_are_not_evicted(policy: str) -> None:
    cache, running = held_pool(policy)
    run(cache, [99] * 9)
    for _ in range(3):
        cache.extend(running[0], 4)
    assert (num_points(cache), cache.stats().evicted_pages) == (20, 4), "that of the sequence that has ended went"
    assert all(cache.lookup([i] * 9) == 8 for i in range(20))
    check_books(cache)


def test_a_point_before_that_of_a_hit_is_not_evicted_while_the_table_names_its_pages() -> None:
    cache = cache_of_one_pool(14, window=17, policy="lru", retention=Retention(every=0))
    for tokens in ([1] * 9, [1] * 17, [2] * 9):
        run(cache, tokens)
    assert (cache.open([1] * 17).num_cached, num_points(cache)) == (16, 3)
    cache.extend(cache.open([3] * 9), 9)
    assert (cache.lookup([2] * 9), num_points(cache)) == (0, 2)


def test_points_are_evicted_when_tables_have_let_go_of_their_pages() -> None:
    cache, running = held_pool()
    cache.extend(running[1], 8, tokens=[50] * 8)
    cache.commit(running[1])
    assert cache.stats().group("window").evictable == 2, "its window has passed its point"
    cache.extend(running[0], 4)
    assert (num_points(cache), cache.stats().evicted_pages) == (20, 0)
    cache.extend(running[0], 4)
    assert (num_points(cache), cache.stats().evicted_pages) == (19, 2)
    assert [cache.lookup([i] * 9) for i in range(20)] == [8, 0, *[8] * 18]
    check_books(cache)


def test_points_that_tables_have_let_go_of_are_evicted_in_their_turn() -> None:
    cache = cache_of_one_pool(18, window=9, policy="lru")
    sequence = run(cache, [1] * 9, close=False)
    run(cache, [2] * 9)
    cache.extend(sequence, 16, tokens=[5] * 16)
    cache.commit(sequence)
    for _ in range(PATIENCE):
        cache.open([2] * 9).close()
    for _ in range(2):
        cache.extend(cache.open([3] * 4), 4)
    assert cache.stats().evicted_pages == 2
    assert (cache.lookup([1] * 9), cache.lookup([2] * 9)) == (0, 8), "the one that was used longest ago went"


@pytest.mark.parametrize(("width", "found"), [(64, (0, 8)), (4, (8, 0))])
def test_a_point_whose_window_a_table_names_goes_for_its_state_where_that_is_most_of_it(
    width: int, found: tuple[int, int]
) -> None:
    caches = group("full", Full()), group("window", Window(9)), group("state", State(), width)
    cache = Cache(plan_of(*caches, own_pools={"state": PoolRequest(pages=4)}), policy="lru")
    run(cache, [1] * 9, close=False)
    run(cache, [2] * 9)
    for _ in range(2):
        cache.extend(cache.open([3] * 4), 4)
    assert (cache.lookup([1] * 9), cache.lookup([2] * 9)) == found


def test_a_point_is_evicted_for_pages_between_those_that_tables_name() -> None:
    plan = plan_of(group("full", Full()), group("window", Window(25)), own_pools={"window": PoolRequest(pages=10)})
    cache = Cache(plan, retention=Retention(every=0))
    behind = run(cache, range(25), close=False)
    before = cache.open(range(9))
    cache.extend(behind, 15)
    cache.commit(behind)
    assert (before.num_cached, cache.stats().group("window").evictable) == (8, 2)
    cache.extend(before, 4)
    assert cache.stats().evicted_pages == 2
    assert cache.lookup(range(25)) == 8
    check_books(cache)


def test_points_on_the_way_whose_window_a_table_names_are_evicted_for_the_pages_of_a_chunk() -> None:
    """Where a chunk ends nothing is needed of it, so that the first of them has no page to give."""
    caches = group("full", Full()), group("window", Window(30)), group("chunk", Chunk(8))
    cache = Cache(plan_of(*caches, own_pools={"chunk": PoolRequest(pages=5)}), retention=Retention(every=4))
    run(cache, range(5))
    sequence = run(cache, range(18), close=False)
    assert [(point.position, point.kind) for point in sequence.node.points[:2]] == [(8, Kind.SPACED), (12, Kind.SPACED)]
    assert cache.stats().group("chunk").evictable == 2
    cache.extend(cache.open([9] * 13), 13)
    assert cache.stats().evicted_pages == 2
    check_books(cache)


def test_of_points_on_the_way_those_stay_whose_pages_tables_name() -> None:
    plan = plan_of(group("full", Full()), group("window", Window(9)), own_pools={"window": PoolRequest(pages=11)})
    cache = Cache(plan, retention=Retention(every=8))
    sequence = cache.open(range(60))
    cache.extend(sequence, 40)
    cache.commit(sequence)
    cache.publish()
    points = sequence.node.points
    assert [(point.position, point.kind) for point in points] == [(8 * i, Kind.SPACED) for i in range(1, 6)]
    cache.extend(cache.open([99] * 9), 9)
    assert [point.position for point in points] == [40]
    check_books(cache)


# ---- token ids


def test_ids_told_one_by_one_are_kept_however_many_and_whoever_else_is_in_the_batch() -> None:
    cache = Cache(full_plan(pages=400), rows=1)
    one = run(cache, [1] * 3, close=False)
    for token in range(100):
        cache.extend(one, 1, tokens=[token])
    two = run(cache, [2] * 3, close=False)
    for token in range(200):
        cache.extend([one, two], 2, tokens=[token, 7, token, 8])
    assert one.tokens.tolist() == [1] * 3 + list(range(100)) + [x for t in range(200) for x in (t, 7)]
    assert two.tokens.tolist() == [2] * 3 + [x for t in range(200) for x in (t, 8)]


def test_ids_that_contradict_the_prompt_or_leave_a_gap_are_refused() -> None:
    cache = Cache(full_plan())
    sequence = cache.open(range(8))
    with pytest.raises(BadTokens, match="not the ids of the tokens from 0 on"):
        cache.extend(sequence, 2, tokens=[0, 7])
    one, two = (run(cache, [i] * 5, close=False) for i in range(2))
    cache.extend(one, 1)
    with pytest.raises(BadTokens, match="tokens 5 to 5 of a sequence are not known"):
        cache.extend([one, two], 1, tokens=[1, 1])
    cache.extend(sequence, 7, tokens=range(7))
    cache.extend(sequence, 3, tokens=[7, 8, 9])
    assert sequence.tokens.tolist() == list(range(10))


# ---- what is evicted first


def test_what_is_left_of_an_evicted_run_is_as_old_as_the_run() -> None:
    cache = Cache(full_plan(pages=9))
    run(cache, [1] * 16)
    run(cache, [2] * 16)
    sequence = cache.open([3] * 8)
    for _ in range(2):
        cache.extend(sequence, 4)
    assert [cache.lookup([i] * 17) for i in (1, 2)] == [8, 16]


def test_what_is_left_of_an_evicted_run_is_as_young_as_the_run() -> None:
    def longest_first(candidate: EvictionCandidate) -> object:
        return (candidate.position <= 8, candidate.last_used)

    cache = Cache(full_plan(pages=7), policy=longest_first)
    run(cache, [1] * 8)
    longer = cache.open([1] * 16)
    run(cache, [2] * 8)
    engine_of(cache).carry_out(cache.extend(longer, 8))
    cache.commit(longer)
    cache.close(longer)
    sequence = cache.open([3] * 16)
    for _ in range(3):
        cache.extend(sequence, 4)
    assert [cache.lookup([i] * 17) for i in (1, 2)] == [8, 4], "the end of the long run, then the older prompt"


def test_what_is_left_of_an_evicted_run_is_as_important() -> None:
    cache = Cache(full_plan(pages=9), policy="priority")
    run(cache, [1] * 16, priority=5)
    run(cache, [2] * 20, priority=3)
    run(cache, [3] * 8)
    assert [cache.lookup([i] * 21) for i in (1, 2)] == [12, 12]


def test_a_hit_of_a_higher_priority_makes_a_prefix_more_important() -> None:
    cache = Cache(full_plan(pages=9), policy="priority")
    run(cache, [1] * 16)
    run(cache, [2] * 16, priority=1)
    cache.close(cache.open([1] * 17, priority=2))
    run(cache, [3] * 16)
    assert [cache.lookup([i] * 17) for i in (1, 2)] == [16, 0]


def test_a_prefix_on_which_somebody_stands_is_kept_though_it_was_used_least_recently() -> None:
    cache = Cache(full_plan(pages=9))
    run(cache, [1] * 8)
    standing = cache.open([1] * 9)
    run(cache, [2] * 16)
    run(cache, [3] * 16)
    assert standing.num_cached == cache.lookup([1] * 9) == 8
    check_books(cache)


def test_a_hit_makes_a_point_inside_a_run_younger() -> None:
    def first_blocks_first(candidate: EvictionCandidate) -> object:
        return (candidate.position != 8, candidate.last_used)

    own = {"window": PoolRequest(pages=12)}
    plan = plan_of(group("full", Full()), group("window", Window(6)), own_pools=own)
    cache = Cache(plan, policy=first_blocks_first, retention=Retention(every=0))
    for prefix in (1, 2):
        for suffix in (5, 6, 7):
            run(cache, [prefix] * 8 + [suffix] * 5)
    assert [cache.lookup([prefix] * 8 + [9]) for prefix in (1, 2)] == [8, 8]
    cache.close(cache.open([1] * 8 + [9]))
    free = 12 - cache.stats().group("window").cached
    sequence = cache.open([3] * 60)
    cache.extend(sequence, free * 4 + 4)
    assert [cache.lookup([prefix] * 8 + [9]) for prefix in (1, 2)] == [8, 0]
    check_books(cache)


def test_a_point_on_the_way_that_was_hit_counts_as_asked_for() -> None:
    kinds: dict[int, Kind] = {}

    def noting(candidate: EvictionCandidate) -> object:
        kinds[candidate.position] = candidate.kind
        return candidate.last_used

    plan = plan_of(group("full", Full()), group("state", State()))
    cache = Cache(plan, retention=Retention(every=16), policy=noting)
    run(cache, range(60))
    assert kinds.pop(16) == Kind.SPACED
    cache.close(cache.open([*range(20), 99]))
    assert kinds.pop(16) == Kind.BRANCH


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize(
    "trailing",
    [(), (Window(6),), (SinkWindow(9, 5),), (State(),), (Window(9), State()), (SinkWindow(5, 3), Window(14))],
    ids=lambda reaches: "+".join(type(reach).__name__ for reach in reaches) or "full",
)
def test_whatever_is_evicted_under_shortage_books_balance_and_hits_are_right(
    trailing: tuple[Reach, ...], policy: str
) -> None:
    caches = [group(f"trailing{i}", reach) for i, reach in enumerate(trailing)]
    own = {cache.tag: PoolRequest(pages=22 if cache.reach.per_token else 9) for cache in caches}
    plan = plan_of(group("full", Full()), *caches, pages=40, own_pools=own)
    cache, rng = Cache(plan, policy=policy, retention=Retention(every=8)), random.Random(len(trailing))
    texts: list[list[int]] = [[]]
    standing: list[Sequence] = []
    for _ in range(120):
        old = rng.choice(texts[-8:])
        text = old[: rng.randint(0, len(old))] + [rng.randint(0, 1) for _ in range(rng.randint(1, 24))]
        texts.append(text[:60])
        assert cache.lookup(text[:60]) == longest_hit(cache, "", text[:60])
        standing.append(cache.open(text[:60]))
        if len(standing) > 2:
            compute(cache, standing.pop(rng.randrange(3)), rng.randint(3, 20))
        check_books(cache)
    assert cache.stats().evicted_pages > 100
    for sequence in standing:
        cache.close(sequence)
    cache.reset()


def compute(cache: Cache, sequence: Sequence, step: int) -> None:
    """Compute a prompt so many tokens a step at most, or as far as there are pages, and close it."""
    engine = engine_of(cache)
    with contextlib.suppress(OutOfPages):
        while sequence.length < sequence.num_prompt:
            start = sequence.length
            end = min(sequence.stop or sequence.num_prompt, start + step)
            engine.carry_out(cache.extend(sequence, end - start))
            engine.step(sequence, start)
            engine.carry_out(cache.commit(sequence))
    cache.close(sequence)


def test_a_state_that_was_restored_can_be_evicted_while_its_sequence_runs() -> None:
    own = {"state": PoolRequest(pages=2)}
    cache = Cache(plan_of(group("full", Full()), group("state", State()), own_pools=own))
    run(cache, range(9))
    sequence = cache.open(range(9))
    with pytest.raises(OutOfPages):
        cache.extend([cache.open([50 + i]) for i in range(2)], 1)
    list(cache.extend(sequence, 1))
    assert not cache.extend(cache.open([60]), 1)
    assert cache.stats().group("state").cached == 0
    check_books(cache)


def test_lru_evicts_points_on_the_way_before_others_on_both_sides_of_a_hit() -> None:
    own = {"state": PoolRequest(pages=10)}
    plan = plan_of(group("full", Full()), group("state", State()), own_pools=own)
    cache = Cache(plan, policy="lru", retention=Retention(every=4))
    run(cache, range(39))
    assert cache.stats().group("state").cached == 9
    standing = cache.open([*range(8), 99])
    assert standing.num_cached == 8
    for i, cached in enumerate((9, 8, 2)):
        assert not cache.extend(cache.open([50 + i]), 1)
        assert cache.stats().group("state").cached == cached, "one was free, 4 goes, then 12 to 32 go"
    assert cache.lookup(range(39)) == 36


@pytest.mark.parametrize(("span", "num_tokens", "memory"), [(33, 161, 120_000), (17, 201, 200_000), (33, 201, 60_000)])
def test_as_many_sequences_run_as_the_plan_promises_though_points_keep_window_pages(
    span: int, num_tokens: int, memory: int
) -> None:
    caches = group("full", Full(), 8), group("window", Window(span), 52)
    ample = make_plan(ModelSpec("test", tuple(Layer((cache,)) for cache in caches)), "1GB", block_tokens=4)
    pool = ample.pools[0]
    plan = replace(ample, pools=(replace(pool, num_superpages=memory // pool.unit_bytes),))
    assert plan.group("window").pages_per_superpage > 1
    cache, random = Cache(plan, retention=Retention(every=16)), np.random.default_rng(0)
    for _ in range(plan.sequences(num_tokens)):
        sequence = cache.open(random.integers(0, 1000, num_tokens))
        while sequence.length < num_tokens:
            cache.extend(sequence, min(8, num_tokens - sequence.length))
            cache.commit(sequence)


def test_where_any_page_helps_a_window_that_lacks_some_has_no_more_evicted_than_it_lacks() -> None:
    """Dropping one of many points of a chat frees no page of a long window, but pages of others."""
    kinds: dict[str, Reach] = {"full": Full(), "near": Window(8), "far": Window(400), "state": State()}
    caches = [group(tag, kind) for tag, kind in kinds.items()]
    spec = ModelSpec("test", tuple(Layer((cache,)) for cache in caches))
    cache = Cache(make_plan(spec, 64 * 800, block_tokens=4), policy="lru")
    for length in range(9, 973, 4):
        run(cache, range(length))
    assert cache.stats().evicted_pages == 0
    for i in range(1, 20):
        before = cache.stats().evicted_pages
        run(cache, [1000 + i] * 9)
        assert cache.stats().evicted_pages - before <= 16, "11 pages were wanted"


def test_nothing_is_evicted_for_a_group_of_which_nothing_is_cached() -> None:
    """A chunk keeps no page where it ends, so that only pages of full attention can be evicted for it."""
    caches = group("full", Full(), 8), group("chunk", Chunk(8), 4)
    plan = make_plan(ModelSpec("test", tuple(Layer((cache,)) for cache in caches)), 128 * 40, block_tokens=4)
    assert [g.pages_per_superpage for g in plan.groups] == [1, 2]
    cache = Cache(plan)
    for i in range(18):
        run(cache, [i] * 9)
    assert (cache.stats().group("chunk").evictable, cache.stats().evicted_pages) == (0, 0)
    cache.extend([cache.open([99]) for _ in range(8)], 1)
    assert 0 < cache.stats().evicted_pages <= 12


def test_points_on_the_way_stay_where_only_pages_of_full_attention_lack() -> None:
    own = {"full": PoolRequest(pages=12)}
    plan = plan_of(group("full", Full()), group("state", State()), own_pools=own)
    cache = Cache(plan, retention=Retention(every=8))
    run(cache, [2] * 17)
    run(cache, range(25))
    list(cache.extend(cache.open([3] * 12), 12))
    assert cache.lookup([2] * 17) == 8, "its end was evicted"
    assert cache.lookup([*range(10), 99]) == 8


def test_a_pin_keeps_a_prefix_to_its_last_block() -> None:
    cache = Cache(full_plan())
    run(cache, range(12))
    run(cache, [*range(4), 99])  # the run is split there
    pinned = cache.pin(range(8))
    assert pinned is not None
    assert pinned.length == 8


# ---- loads, rematches, statistics


def test_where_a_load_ends_is_a_resume_point_of_windows_too() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))), retention=Retention(every=0))
    sequence = cache.open(range(60))
    cache.load_to(sequence, 32)
    cache.commit(sequence)
    cache.extend(sequence, 28)
    cache.commit(sequence)
    cache.close(sequence)
    assert [cache.lookup([*range(end), 99]) for end in (32, 56)] == [32, 56]
    check_books(cache)


def test_points_of_a_prompt_whose_hits_stop_earlier_are_where_it_is_hit() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=0))
    assert cache.open(range(20), drop_last_blocks=1).stop == 12
    assert cache.open(range(20)).stop == 16


def test_a_rematch_lets_go_of_the_old_hit_and_counts_as_hit_what_it_finds() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    run(cache, range(5))
    waiting = cache.open(range(16))
    assert waiting.num_cached == 4
    run(cache, range(16))
    assert (cache.rematch(waiting), cache.stats().hit_tokens) == (12, 4 + 4 + 8)
    assert cache.table("window")[waiting.row, :1].tolist() == [NULL], "what the shorter hit saw is let go"
    check_books(cache)
    cache.close(waiting)
    check_books(cache)


@pytest.mark.parametrize("num", [1, 2])
def test_no_ids_may_be_told_to_commit_however_many_are_known(num: int) -> None:
    cache = Cache(full_plan(pages=200))
    batch = Batch([cache.open([i, 1]) for i in range(num)])
    cache.extend(batch, 2)
    for token in range(100):
        cache.commit(batch, tokens=[])
        cache.extend(batch, 1, tokens=[token] * num)
    assert [sequence.tokens.tolist() for sequence in batch.sequences] == [[i, 1, *range(100)] for i in range(num)]


def test_ids_of_a_chunk_with_an_image_are_told_as_any_others() -> None:
    cache = Cache(full_plan())
    told = [5, 6, 0, 0, 7, 8]  # an engine's own ids stand where the image is
    sequences = [cache.open(told, spans=[Span(2, b"a cat")]), cache.open([1])]
    list(cache.extend(sequences, [4, 1], tokens=[*told[:4], 1]))
    with pytest.raises(BadTokens, match="not the ids of the tokens from 4 on"):
        cache.extend(sequences, [2, 1], tokens=[7, 9, 2])
    list(cache.extend(sequences, [2, 1], tokens=[7, 8, 2]))
    cache.commit(sequences)
    assert cache.lookup([*told, 1], spans=[Span(2, b"a cat")]) == 4
    assert cache.lookup([*told, 1]) == 0


def test_a_truncation_commits_nothing_of_a_step_in_flight() -> None:
    cache = Cache(full_plan())
    sequence = cache.open(range(12))
    cache.extend(sequence, 10)
    cache.truncate(sequence, 9)
    assert (sequence.length, sequence.committed) == (9, 0)
    assert cache.lookup(range(12)) == 0
    cache.commit(sequence, 5)
    assert cache.lookup(range(12)) == 4


def test_after_a_truncation_new_ids_are_told_to_commit() -> None:
    cache = Cache(full_plan())
    sequence = run(cache, range(8), close=False)
    cache.truncate(sequence, 5)
    cache.extend(sequence, 1)
    cache.commit(sequence, tokens=[9])
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4, 9]


def test_a_sequence_whose_copies_were_never_made_leaves_nothing() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=8))
    sequence = cache.open(range(40))
    assert not cache.extend(sequence, 8)
    assert len(cache.commit(sequence)) == 1
    cache.close(sequence)
    assert cache.lookup(range(40)) == 0
    check_books(cache)


def test_a_hit_far_down_a_window_looks_no_further_up_than_to_the_last_point() -> None:
    asked: list[int] = []

    class CountedWindow(Window):
        def tail(self, position: Any) -> Any:
            asked.append(np.size(position))
            return super().tail(position)

    cache = Cache(plan_of(group("full", Full()), group("window", CountedWindow(6)), pages=400))
    prompt = list(range(1200))
    for end in range(100, 1201, 100):  # turns of a chat
        run(cache, prompt[:end])
    asked.clear()
    assert cache.lookup([*prompt[:1150], 7]) == 1100
    assert sum(asked) < 100


def test_a_long_path_is_joined_but_for_branches_and_holders() -> None:
    for more in ((), (group("window", Window(6)),), (group("state", State()),)):
        cache = Cache(plan_of(group("full", Full()), *more, pages=400))
        prompt = list(range(137))
        for end in range(5, 137, 4):
            run(cache, prompt[:end])
        run(cache, [*prompt[:60], 7, 7, 7, 7, 7])
        standing = cache.open(prompt[:101])
        assert standing.num_cached == 100
        assert cache.lookup(prompt) == 132
        assert cache.stats().nodes == 4, "to the branch, the branch, to the holder, the rest"
        check_books(cache)
        assert [cache.lookup([*prompt[:60], 7, 7, 7, 7, 7]), standing.node.end] == [64, 100]
        cache.close(standing)
        check_books(cache)
        cache.reset()


def test_a_namespace_of_which_nothing_is_left_is_gone() -> None:
    cache = Cache(full_plan())
    run(cache, [1, 2], namespace="x")
    assert not cache.state.prefix.tree.roots


def test_whoever_opens_a_prompt_may_say_where_its_resume_points_are() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=8))
    sequence, engine = cache.open(range(60), points=[21, 40, 66]), engine_of(cache)
    engine.carry_out(cache.extend(sequence, 60, checkpoints=True))
    assert [checkpoint.position for checkpoint in sequence.checkpoints] == [20, 40]
    engine.step(sequence, 0)
    engine.carry_out(cache.commit(sequence))
    assert [cache.lookup([*range(length), 99]) for length in (19, 20, 39, 60)] == [0, 20, 20, 40]
    engine.carry_out(cache.extend(sequence, 10, tokens=range(60, 70), checkpoints=True))
    assert [checkpoint.position for checkpoint in sequence.checkpoints] == [64], "of what is generated, too"
    engine.step(sequence, 60)
    engine.carry_out(cache.commit(sequence))
    assert cache.lookup([*range(68), 99]) == 64
    check_books(cache)


def test_a_fork_that_looks_again_leaves_points_where_its_parent_was_told_to() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=8))
    waiting = cache.open(range(60), points=[20, 40])
    (child,), copies = cache.fork(waiting)
    list(copies)
    run(cache, range(22), points=[16])
    assert cache.rematch(child) == 16
    cache.extend(child, 44, checkpoints=True)
    assert [checkpoint.position for checkpoint in child.checkpoints] == [20, 40]


def test_a_fork_does_not_copy_the_tokens_that_are_in_the_tree() -> None:
    cache = Cache(full_plan(pages=260, blocks=256))
    sequence = run(cache, np.arange(65_000), close=False)
    cache.publish()
    tracemalloc.start()
    _, copies = cache.fork(sequence)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    list(copies)
    assert peak < 65_000, f"{peak} bytes for a fork of 65,000 tokens"


class NotWalked(dict[bytes, Node]):
    def values(self) -> Any:
        raise AssertionError("the work grows with the number of children")


@pytest.mark.parametrize("reach", [Window(8), SinkWindow(5, 8)])
def test_to_give_up_a_point_takes_no_look_at_what_lies_below_it(reach: Reach) -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", reach)), retention=Retention(every=0))
    for i in range(5):
        run(cache, [*range(12), *[20 + i] * 6])
    tree = cache.state.prefix.tree
    (node,) = [node for node in tree.nodes() if len(node.children) == 5]
    children, node.children = node.children, NotWalked(node.children)
    cache.state.prefix.drop_point(node.points[-1])
    node.children = children
    check_books(cache)
    assert cache.lookup([*range(12), *[20] * 6]) == 16


def test_a_step_beyond_max_tokens_that_would_leave_states_changes_nothing() -> None:
    caches = group("full", Full()), group("state", State())
    cache = Cache(plan_of(*caches), retention=Retention(every=8), max_tokens=16)
    sequence = cache.open(range(40))
    with pytest.raises(NeverFits, match="larger max_tokens"):
        cache.extend(sequence, 40, checkpoints=True)
    assert sequence.length == 0
    check_books(cache)


def test_publish_finds_states_that_come_after_it_has_looked() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(False, False, 0, 16))
    sequence, engine = run(cache, range(13), close=False), engine_of(cache)
    for length in range(13, 16):
        cache.publish()
        assert not cache.contents().tree
        engine.carry_out(cache.extend(sequence, 1, tokens=[length]))
        engine.step(sequence, length)
        engine.carry_out(cache.commit(sequence))
    (branch,) = cache.contents().tree
    assert branch.end == 16


def test_a_shortage_takes_from_sequences_no_more_than_it_needs() -> None:
    caches = group("full", Full()), group("state", State())
    plan = plan_of(*caches, pages=1000, own_pools={"state": PoolRequest(pages=400)})
    cache = Cache(plan, retention=Retention(every=8))
    running = [cache.open([i, *[0] * 32]) for i in range(200)]
    for sequence in running:
        list(cache.extend(sequence, 8))
        list(cache.commit(sequence))
    assert sum(len(sequence.snapshots) for sequence in running) == 200
    list(cache.extend(cache.open([300] * 4), 4))
    assert 100 < sum(len(sequence.snapshots) for sequence in running) < 200
    check_books(cache)


# ---- small things that nothing else would notice


def test_drafts_that_were_rejected_hide_nothing_from_others() -> None:
    cache = Cache(full_plan())
    sequence = run(cache, [1] * 8, close=False)
    cache.extend(sequence, 4, tokens=[9] * 4, drafts=4)
    cache.commit(sequence, 8)
    cache.publish()
    cache.accept(sequence, 8)
    cache.extend(sequence, 4, tokens=[5] * 4)
    cache.commit(sequence)
    assert cache.lookup([*[1] * 8, *[5] * 4, 0]) == 12


def test_sequences_that_left_leave_nothing_on_their_nodes() -> None:
    cache = Cache(full_plan())
    run(cache, [1] * 16)
    for i in range(5):
        cache.close(cache.open([*[1] * 8, *[i] * 8]))
    tree = cache.state.prefix.tree
    assert not any(node.running for node in [*tree.roots.values(), *tree.nodes()])


def test_a_hit_names_no_window_pages_that_the_next_token_cannot_see() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))), retention=Retention(every=4))
    run(cache, range(33))
    sequence = cache.open([*range(32), 99])
    assert (cache.table("window")[sequence.row, :8] != 0).tolist() == [False] * 6 + [True] * 2


def test_after_a_cut_no_token_of_the_last_step_is_left() -> None:
    cache = Cache(full_plan())
    sequence = cache.open([1] * 12)
    cache.extend(sequence, 4)
    cache.extend(sequence, 4)
    cache.truncate(sequence, 2)
    assert [len(slots) for slots in cache.slot_mapping(sequence).values()] == [0]


def test_a_prompt_whose_drafts_are_rejected_is_still_known() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    sequence = cache.open(range(16))
    engine = engine_of(cache)
    engine.carry_out(cache.extend(sequence, 8, drafts=4))
    cache.accept(sequence, 5)
    assert sequence.tokens.tolist() == [*range(16)]


def test_where_a_load_ends_is_a_point_that_was_asked_for() -> None:
    kinds: dict[int, Kind] = {}

    def noting(candidate: EvictionCandidate) -> object:
        kinds[candidate.position] = candidate.kind
        return candidate.last_used

    cache = Cache(
        plan_of(group("full", Full()), group("window", Window(6))), retention=Retention(every=8), policy=noting
    )
    sequence = cache.open(range(40))
    cache.load_to(sequence, 16)
    cache.commit(sequence)
    cache.close(sequence)
    assert kinds[16] == Kind.PROMPT


def test_no_spaced_point_is_where_the_range_ends() -> None:
    assert Spacing(4, widens=False).between(0, 8) == [4]


def test_a_run_is_cut_where_windows_of_two_points_meet() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(10))), retention=Retention(every=8))
    run(cache, range(33))
    cache.state.prefix.evict(cache.state.full[0], 1)
    assert cache.lookup(range(40)) == 28
    check_books(cache)


def test_a_run_is_cut_at_a_chunks_start_which_needs_nothing() -> None:
    cache = Cache(plan_of(group("full", Full()), group("chunk", Chunk(8))), retention=Retention(every=0))
    run(cache, range(29))
    cache.state.prefix.evict(cache.state.full[0], 2)
    assert cache.lookup(range(40)) == 16
    check_books(cache)


def test_after_a_load_a_window_begins_where_the_next_token_sees() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    sequence = cache.open(range(40))
    cache.load_to(sequence, 16)
    assert [int(table.first[sequence.row]) for table in cache.state.tables] == [0, 2]


@pytest.mark.parametrize("reach", [Full(), Window(40)], ids=["full", "window"])
def test_a_run_is_cut_on_the_grid_though_less_was_asked_for(reach: Reach) -> None:
    cache = Cache(plan_of(group("full", Full()), group("small", reach), blocks={"full": 4, "small": 1}))
    run(cache, range(9))
    for left in (4, 0):
        assert cache.state.prefix.evict_next(1)
        assert sum(node.end - node.start for node in cache.state.prefix.tree.nodes()) == left
        check_books(cache)


def test_sinks_that_only_a_deeper_point_needed_leave_with_it() -> None:
    cache = Cache(plan_of(group("full", Full()), group("sinks", SinkWindow(4, 10)), blocks={"full": 4, "sinks": 2}))
    run(cache, range(9))
    run(cache, range(17))
    prefix = cache.state.prefix
    while any(node.end > 8 for node in prefix.tree.nodes()):
        prefix.evict(cache.state.full[0], 1)
        check_books(cache)
    assert cache.lookup(range(17)) == 8


def test_a_chat_of_forty_turns_keeps_from_others_only_the_window_that_it_reads() -> None:
    sizes = {"full": PoolRequest(pages=600), "window": PoolRequest(pages=80)}
    cache = Cache(plan_of(group("full", Full()), group("window", Window(64)), own_pools=sizes))
    said: list[int] = []
    for turn in range(40):
        said = [*said, *range(1000 * turn, 1000 * turn + 16)]
        chat = run(cache, said, close=turn < 39)
    assert chat.num_cached == 39 * 16
    num_read = 64 // 4
    other = cache.open(range(50_000, 50_000 + 4 * (80 - num_read)))
    engine_of(cache).carry_out(cache.extend(other, other.num_prompt))
    assert cache.stats().group("window").evictable == 0
    assert cache.stats().group("window").free == 0


@pytest.mark.parametrize("trailing", [(), (("state", State()),)])
def test_a_hybrid_that_lacks_two_pages_cuts_a_long_leaf_no_further_than_its_next_point(
    trailing: tuple[tuple[str, Reach], ...],
) -> None:
    caches = [group("full", Full()), group("window", Window(64)), *(group(*each) for each in trailing)]
    cache = Cache(plan_of(*caches, pages=600), retention=Retention(every=64))
    run(cache, range(2000))
    room = 599 - cache.stats().group("full").cached
    other = cache.open(range(5000, 5000 + 4 * (room + 2)))
    engine_of(cache).carry_out(cache.extend(other, other.num_prompt))
    assert 1984 - 64 <= cache.lookup([*range(2000), 0]) < 2000


def test_a_short_run_keeps_no_long_prompt_alive() -> None:
    cache = Cache(full_plan(pages=4000))
    for hot in range(20):
        prompt = [hot, *range(400)]
        run(cache, prompt)
        run(cache, [*prompt[:8], *[7] * 400])
    nodes = list(cache.state.prefix.tree.nodes())
    owners = [node.tokens if node.tokens.base is None else node.tokens.base for node in nodes]
    kept = {id(array): len(array) for array in owners}
    assert sum(kept.values()) <= 2 * sum(len(node.tokens) for node in nodes)


def test_a_replica_finds_no_image_that_its_cache_has_not_seen_or_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.prefix.prompt.MOST_CONTENTS", 2)
    events: list[Event] = []
    cache = Cache(full_plan(), on_event=events.append)
    replica = Replica(cache.plan)
    cat, dog, cow = ([Span(0, name)] for name in (b"cat", b"dog", b"cow"))
    for spans in (cat, dog, cat, cow, dog):
        for asked in (cat, dog, cow):
            assert replica.hit(range(16), spans=asked) in (0, 12)
        run(cache, range(16), spans=spans)
        replica.apply(events)
        events.clear()
    found = [replica.hit(range(16), spans=spans) for spans in (cat, dog, cow)]
    assert found == [0, 12, 12], "the cat was used before the cow, and forgotten for the dog"
    cache.reset()
    replica.apply(events)
    assert [replica.hit(range(16), spans=spans) for spans in (cat, dog, cow)] == [0, 0, 0]


def test_the_bytes_of_an_image_are_not_kept() -> None:
    cache, image = Cache(full_plan()), bytes(range(256)) * 100
    holders = sys.getrefcount(image)
    run(cache, range(16), spans=[Span(4, image)])
    assert sys.getrefcount(image) == holders
    assert run(cache, range(16), spans=[Span(4, bytes(bytearray(image)))]).num_cached == 12


@pytest.mark.parametrize(("num_prompt", "retention"), [(4, Retention(decode_every=8)), (16, Retention(every=8))])
def test_a_position_that_drafts_had_passed_leaves_its_state_when_it_is_passed_again(
    num_prompt: int, retention: Retention
) -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=retention)
    engine, sequence = engine_of(cache), cache.open(range(num_prompt))
    for step, accepted in ((4, 4), (2, 6), (3, 7), (1, 8)):
        known = max(0, sequence.length + step - max(sequence.length, num_prompt))
        tokens = range(90, 90 + step) if known else None
        drafts = sequence.length + step - accepted
        engine.carry_out(cache.extend(sequence, step, tokens=tokens, drafts=drafts, checkpoints=True))
        left = [checkpoint.position for checkpoint in sequence.checkpoints]
        cache.accept(sequence, accepted)
        engine.step(sequence, accepted - (step - drafts))
        engine.carry_out(cache.commit(sequence))
    assert left == [8]


def test_of_a_prompt_whose_window_has_sinks_only_what_lacks_is_cut_off() -> None:
    cache = Cache(plan_of(group("full", Full()), group("sinks", SinkWindow(8, 64)), pages=20))
    run(cache, range(40), points=[40])
    other = cache.open(range(100, 148))
    engine_of(cache).carry_out(cache.extend(other, 44))
    assert cache.lookup([*range(40), 0]) == 32, "two of its ten blocks lacked"


def test_the_longer_of_two_windows_decides_how_far_up_a_run_is_looked_at() -> None:
    caches = group("full", Full()), group("long", Window(32)), group("short", Window(4))
    cache = Cache(plan_of(*caches, pages=20), retention=Retention(every=0))
    run(cache, range(32), points=[32])
    run(cache, range(49), points=[44, 48])
    other = cache.open(range(100, 136))
    engine_of(cache).carry_out(cache.extend(other, 36))
    assert cache.lookup([*range(49), 0]) == 32


def test_a_run_that_a_twin_computed_too_is_kept_while_the_twin_stands_on_it() -> None:
    cache = Cache(full_plan(pages=13))
    twin, engine = cache.open([1] * 16), engine_of(cache)
    run(cache, [1] * 16)
    engine.carry_out(cache.extend(twin, 16))
    engine.step(twin, 0)
    engine.carry_out(cache.commit(twin))
    cache.publish()
    run(cache, [2] * 16)
    other = cache.open([3] * 24)
    engine.carry_out(cache.extend(other, 24))
    assert cache.lookup([*[1] * 16, 0]) == 16
    assert cache.lookup([*[2] * 16, 0]) == 8
    check_books(cache)


def test_a_point_is_counted_for_the_window_pages_behind_the_point_above_it_alone() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(32))), retention=Retention(every=0))
    for blocks in range(1, 12):
        run(cache, [*range(4 * blocks), *[100 + blocks] * 5])
    tips = [node.points[-1] for node in cache.state.prefix.tree.nodes() if not node.children]
    assert max(tip.position - tip.kept_from for tip in tips) <= 8, "32 tokens of a window lie in eight runs"
    while cache.state.prefix.evict_next(4):
        check_books(cache)


def test_a_point_holds_pages_for_few_others() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(8))), retention=Retention(every=0))
    for i in range(3 * MOST_SHIELDED):
        run(cache, [*range(12), *[20 + i] * 6])
    (node,) = [node for node in cache.state.prefix.tree.nodes() if len(node.children) == 3 * MOST_SHIELDED]
    assert len(node.points[-1].shielded) == MOST_SHIELDED
    cache.state.prefix.drop_point(node.points[-1])
    check_books(cache)


@pytest.mark.parametrize("every", [4, 16])
def test_many_points_of_a_prompt_enter_the_tree_at_once(every: int) -> None:
    caches = group("full", Full()), group("window", Window(8)), group("sinks", SinkWindow(5, 8))
    cache = Cache(plan_of(*caches, pages=512), retention=Retention(every=every))
    prompt = [*range(every * 90)]
    run(cache, prompt[: every * 3 + 1])
    run(cache, prompt)
    points = [point for node in cache.state.prefix.tree.nodes() for point in node.points]
    assert {point.position for point in points} >= {*range(every, every * 90 - 4, every)}
    check_books(cache)
    while cache.state.prefix.evict_next(4):
        check_books(cache)


def test_many_points_enter_the_tree_around_one_that_is_there() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(8)), pages=512), retention=Retention(every=0))
    for points in ([200], [point for point in range(4, 360, 4) if point != 200]):
        sequence = cache.open(range(361), reuse=False, points=points)
        list(cache.extend(sequence, 361)), list(cache.commit(sequence))
        cache.close(sequence)
        check_books(cache)
    (node,) = cache.state.prefix.tree.nodes()
    assert [point.position for point in node.points] == [*range(4, 361, 4)]
    while cache.state.prefix.evict_next(4):
        check_books(cache)

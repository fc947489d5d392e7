"""Steps as engines take them: in batches, several in flight, with drafts, with ids that are told later."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.cache import Batch, Cache, Sequence
from kvweave.cache.allocator import PageAllocator
from kvweave.cache.state import CacheState
from kvweave.errors import BadSequence, BadTokens, CannotTruncate, NeverFits, NotSettled, OutOfPages
from kvweave.plan import PoolRequest, make_plan
from kvweave.prefix import Retention
from kvweave.spec import Chunk, Full, Layer, LayerCache, ModelSpec, Reach, State, Window
from tests.cache.engine import Engine, check_books
from tests.cache.plans import full_plan, group, plan_of


def hybrid(**options: object) -> Cache:
    return Cache(plan_of(group("full", Full()), group("window", Window(6)), group("state", State())), **options)  # type: ignore[arg-type]


def step(cache: Cache, engine: Engine, sequence: Sequence, n: int, **options: object) -> None:
    start = sequence.length
    engine.carry_out(cache.extend(sequence, n, **options))  # type: ignore[arg-type]
    engine.step(sequence, start)
    engine.carry_out(cache.commit(sequence))


def cache_first_block(cache: Cache) -> None:
    """Others find the first block of a prompt of ones."""
    with cache.open([1] * 5) as first:
        list(cache.extend(first, 4))
        list(cache.commit(first))


def test_forks_of_a_window_that_decode_as_one_batch_never_write_one_page() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6)), pages=200))
    engine = Engine(cache)
    parent = cache.open(range(17))
    step(cache, engine, parent, 17)
    made, copies = cache.fork(parent, 3)
    engine.carry_out(copies)
    beams = [parent, *made]
    for token in range(30):
        starts = [beam.length for beam in beams]
        engine.carry_out(cache.extend(beams, 1, tokens=[token + i for i in range(4)]))
        for beam, start in zip(beams, starts, strict=True):
            engine.step(beam, start)
        engine.carry_out(cache.commit(beams))
        check_books(cache)
    named = cache.table("window")[[beam.row for beam in beams]]
    assert len(np.unique(named[named > 0])) == np.count_nonzero(named), "by now they have nothing in common"


def test_a_step_that_is_prepared_before_the_last_is_committed_plans_from_where_it_starts() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=200), retention=Retention(every=16))
    engine = Engine(cache)
    sequence = cache.open(range(100))
    tokens = list(range(100))
    steps = []
    for start in (0, 40):
        engine.carry_out(cache.extend(sequence, 40, checkpoints=True))
        assert [c.position for c in sequence.checkpoints] == [[16, 32], [48, 64, 80]][start > 0]
        steps.append(engine.launch(sequence, start, tokens))
    engine.run(steps[0])
    engine.carry_out(cache.commit(sequence, 40))
    assert cache.lookup([*range(40), 999]) == 32
    engine.run(steps[1])
    engine.carry_out(cache.commit(sequence))
    sibling = cache.open([*range(64), 7, 7])
    assert sibling.num_cached == 64
    step(cache, engine, sibling, 2)
    check_books(cache)


def test_committing_the_first_of_two_steps_leaves_the_pages_of_the_second() -> None:
    cache = hybrid()
    engine = Engine(cache)
    sequence, tokens = cache.open(range(60)), list(range(60))
    steps = []
    for _ in range(3):
        start = sequence.length
        engine.carry_out(cache.extend(sequence, 20))
        steps.append(engine.launch(sequence, start, tokens))
    for number, done in enumerate(steps):
        engine.run(done)
        engine.carry_out(cache.commit(sequence, 20 * (number + 1)))
        check_books(cache)
    engine.run()
    engine.check_committed(sequence, tokens)


def test_the_state_between_two_steps_is_copied_before_the_second_when_the_first_is_not_committed_yet() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=8))
    engine = Engine(cache)
    sequence = cache.open(range(20))
    engine.carry_out(cache.extend(sequence, 8))
    engine.launch(sequence, 0, list(range(20)))
    copies = cache.extend(sequence, 4)
    assert [copy.tag for copy in copies] == ["state"], "the live state after 8 tokens, before the next step runs"
    engine.carry_out(copies)
    engine.launch(sequence, 8, list(range(20)))
    engine.run()
    engine.carry_out(cache.commit(sequence))
    sibling = cache.open([*range(8), 5, 5, 5])
    assert sibling.num_cached == 8
    step(cache, engine, sibling, 3)  # checks that the state is the one after 8 tokens


def test_a_batch_of_one_is_the_single_call() -> None:
    plan = plan_of(group("full", Full()), group("window", Window(6)), group("state", State()), pages=40)
    caches = [Cache(plan, retention=Retention(every=8)) for _ in range(2)]
    sequences = [cache.open(range(30)) for cache in caches]
    for n in (8, 9, 5, 1, 7):
        for cache, sequence, ways in zip(caches, sequences, ([0], [1]), strict=True):
            list(cache.extend(sequence if ways[0] else Batch([sequence]), n, checkpoints=True, lookahead=2))
        assert [c.position for c in sequences[0].checkpoints] == [c.position for c in sequences[1].checkpoints]
        for cache, sequence, ways in zip(caches, sequences, ([0], [1]), strict=True):
            list(cache.commit(sequence if ways[0] else [sequence]))
        assert caches[0].stats() == caches[1].stats()
        for tag in ("full", "window", "state"):
            assert caches[0].table(tag).tolist() == caches[1].table(tag).tolist()


def test_a_warm_hit_is_refused_for_the_reserve_singly_and_in_a_batch() -> None:
    for way in (lambda sequence: sequence, lambda sequence: [sequence]):
        cache = Cache(full_plan(pages=11), admission_reserve=0.3)
        first = cache.open([1] * 28)
        cache.extend(first, 28)
        cache.commit(first)
        again = cache.open([1] * 28 + [2] * 8)
        assert again.num_cached == 28
        with pytest.raises(OutOfPages):
            cache.extend(way(again), 8)
        cache.extend(first, 8, tokens=[3] * 8)


@pytest.mark.parametrize("trailing", [(), (group("state", State()),)])
def test_a_sequence_that_is_alone_need_not_leave_the_reserve(trailing: tuple[LayerCache, ...]) -> None:
    cache = Cache(plan_of(group("full", Full()), *trailing, pages=11), admission_reserve=0.5)
    sequences = [cache.open([i] * 40) for i in range(2)]
    cache.check_fits(40, 40)
    with pytest.raises(OutOfPages) as refused:
        cache.extend(sequences, 12)
    assert refused.value.sequences == (sequences[1],), "of two the second one is not alone"
    list(cache.extend(sequences[0], 40))
    cache.close(sequences[0])
    cache.load_to(sequences[1], 36)


def test_a_refusal_for_the_reserve_names_nobody_who_runs() -> None:
    cache = Cache(full_plan(pages=11), admission_reserve=0.5)
    running = cache.open([1] * 28)
    cache.extend(running, 16)
    cache.extend(running, 12)
    waiting = cache.open([2] * 8)
    with pytest.raises(OutOfPages) as refused:
        cache.extend([running, waiting], 4)
    assert refused.value.sequences == (waiting,)
    cache.extend(running, 4, tokens=[3] * 4)


def test_a_reserve_does_not_keep_the_pool_empty() -> None:
    cache = Cache(full_plan(pages=41), admission_reserve=0.25)
    for i in range(20):
        sequence = cache.open([i] * 16)
        cache.extend(sequence, 16)
        cache.commit(sequence)
        cache.close(sequence)
    assert cache.stats().group("full").free < 4, "what is evictable counts as left"


def test_one_call_takes_chunks_of_prompts_and_generated_tokens_together() -> None:
    cache = hybrid()
    engine = Engine(cache)
    old, new = cache.open(range(9)), cache.open(range(50, 80))
    step(cache, engine, old, 9)
    starts = [old.length, new.length]
    engine.carry_out(cache.extend([old, new], [1, 12], tokens=[7, *range(50, 62)], checkpoints=True))
    assert [old.length, new.length] == [10, 12]
    slots = cache.slot_mapping([old, new])
    assert {tag: len(array) for tag, array in slots.items()} == {"full": 13, "window": 13}
    assert slots["full"].tolist() == [*cache.slots(old, "full", 9).tolist(), *cache.slots(new, "full", 0).tolist()]
    for sequence, start in zip((old, new), starts, strict=True):
        engine.step(sequence, start)
    engine.carry_out(cache.commit([old, new]))
    with pytest.raises(BadTokens, match="not the ids of the tokens from 12 on"):
        cache.extend([old, new], [1, 2], tokens=[1, 99, 99])
    for wrong in ([1], [1, 2, 3], [0, 1], 0):
        with pytest.raises(BadSequence, match="cannot extend 2 sequences"):
            cache.extend([old, new], wrong)


def test_a_refusal_evicts_nothing_and_names_who_does_not_fit_and_who_could_be_preempted() -> None:
    cache = Cache(full_plan(pages=9))
    done = cache.open([9] * 4)
    cache.extend(done, 4)
    cache.commit(done)
    cache.close(done)
    waiting, one, two = (cache.open([i] * 30, priority=i) for i in range(3))
    cache.extend(waiting, 8)
    before = cache.stats()
    with pytest.raises(OutOfPages) as refused:
        cache.extend([one, two], [8, 24])
    assert cache.stats() == before
    assert refused.value.sequences == (two,), "the first would fit"
    assert refused.value.preemptible == (waiting,)
    assert refused.value.shortages == (("full", 8, 5, 1),)
    cache.extend(one, 8)


def test_a_fork_that_does_not_fit_says_which_pages_are_short() -> None:
    cache = Cache(full_plan(pages=5))
    sequence = cache.open(range(11))
    cache.extend(sequence, 11)
    cache.commit(sequence)
    with pytest.raises(OutOfPages) as refused:
        cache.fork(sequence, 3)
    assert refused.value.shortages == (("full", 3, 1, 0),)


@pytest.mark.parametrize("num_held", [100, 250])
def test_ids_of_rows_that_hold_as_many_as_they_can_are_kept_in_order(num_held: int) -> None:
    cache = Cache(full_plan(pages=400))
    batch = [cache.open([i]) for i in range(3)]
    expected = [[i, *range(num_held + i), *range(10 * i, 10 * i + 10), 7] for i in range(3)]
    for i, sequence in enumerate(batch):
        cache.extend(sequence, 1)
        cache.extend(sequence, num_held + i, tokens=np.arange(num_held + i))
    cache.extend(batch, 10, tokens=np.arange(30))
    cache.extend(batch, 1, tokens=[7] * 3)
    assert [sequence.tokens.tolist() for sequence in batch] == expected


def test_a_window_of_which_points_were_left_gathers_in_one_super_page() -> None:
    spec = ModelSpec("hybrid", (Layer((group("full", Full(), 12),)), Layer((group("window", Window(6)),))))
    cache = Cache(make_plan(spec, 12 * 4 * 48, block_tokens={"full": 4, "window": 1}))
    cache.check_fits(40)
    sequence = cache.open([1] * 5)
    while sequence.length < 40:
        cache.extend(sequence, 1, tokens=None if sequence.length < 5 else [2])
        cache.commit(sequence)


# ---- drafts


def test_drafts_are_accepted_before_or_after_the_commit() -> None:
    for commit_first in (False, True):
        cache = hybrid()
        engine = Engine(cache)
        sequences = [cache.open([i, *range(6)]) for i in range(3)]
        for sequence in sequences:
            step(cache, engine, sequence, 7)
        engine.carry_out(cache.extend(sequences, 4, tokens=np.arange(12), drafts=3))
        for sequence in sequences:
            engine.step(sequence, 7)
        if commit_first:
            engine.carry_out(cache.commit(sequences, [8, 11, 9]))
            with pytest.raises(NotSettled, match="neither accepted nor rejected"):
                cache.extend(sequences[0], 1)
            with pytest.raises(NotSettled, match="cannot be forked"):
                cache.fork(sequences[0])
        cache.accept(sequences, [8, 11, 9])
        engine.carry_out(cache.commit(sequences))
        assert [sequence.length for sequence in sequences] == [8, 11, 9]
        assert [len(sequence.tokens) for sequence in sequences] == [8, 11, 9]
        for sequence in sequences:
            step(cache, engine, sequence, 1, tokens=[5])  # checks rows and states
        check_books(cache)


def test_what_cannot_be_rejected_is_said() -> None:
    cache = hybrid()
    engine = Engine(cache)
    sequence = cache.open(range(7))
    step(cache, engine, sequence, 7)
    cache.extend(sequence, 3, tokens=[1, 2, 3], drafts=1)
    with pytest.raises(CannotTruncate, match="2 tokens cannot be rejected: states are there for the 1 drafts"):
        cache.accept(sequence, 8)
    with pytest.raises(BadSequence, match="6 tokens are not between the 7 committed and the 10"):
        cache.accept(sequence, 6)
    cache.accept(sequence, 9)
    assert sequence.length == 9


# ---- ids


def test_ids_that_are_told_after_the_step_name_the_tokens_they_belong_to() -> None:
    cache = Cache(full_plan())
    sequence = cache.open(range(8))
    cache.extend(sequence, 8)
    cache.commit(sequence)
    cache.extend(sequence, 1)
    with pytest.raises(BadTokens, match="the ids of tokens 8 to 8 of a sequence are not known"):
        cache.extend(sequence, 1, tokens=[77])
    cache.extend(sequence, 3)
    cache.commit(sequence, tokens=[70, 71, 72, 73])
    assert sequence.tokens.tolist() == [*range(8), 70, 71, 72, 73]
    assert cache.lookup([*range(8), 70, 71, 72, 73, 1]) == 12
    assert cache.lookup([*range(8), 77, 71, 72, 73, 1]) == 8
    with pytest.raises(BadTokens, match="no token after their lengths has a place"):
        cache.commit(sequence, tokens=[1])


def test_what_is_committed_privately_is_found_by_nobody_and_can_be_forked() -> None:
    cache = hybrid()
    engine = Engine(cache)
    sequence = cache.open(range(8))
    step(cache, engine, sequence, 8)
    start = sequence.length
    engine.carry_out(cache.extend(sequence, 9, tokens=np.arange(100, 109)))
    engine.step(sequence, start)
    engine.carry_out(cache.commit(sequence, share=False))
    assert (sequence.length, sequence.committed) == (17, 8)
    (child,), copies = cache.fork(sequence)
    engine.carry_out(copies)
    step(cache, engine, child, 1, tokens=[5])
    for one in (sequence, child):
        cache.close(one)
    assert cache.lookup([*range(8), *range(100, 120)]) <= 8
    check_books(cache)


@pytest.mark.parametrize(("row", "wanted"), [(0, 16), (1, 16)])
def test_a_state_that_drafts_passed_is_still_wanted_when_they_are_rejected(row: int, wanted: int) -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())), retention=Retention(every=0, decode_every=8))
    pair = [cache.open([row, 1, 2, 3]) for row in range(2)]
    for sequence in pair:
        while sequence.length < wanted - 2:
            list(cache.extend(sequence, 1, tokens=None if sequence.length < 4 else [7]))
            list(cache.commit(sequence))
    list(cache.extend(pair[row], 3, tokens=[7, 8, 9], drafts=2))
    cache.accept(pair, [s.length - (s.row == row) * 2 for s in pair])
    list(cache.commit(pair[row]))
    assert pair[row].length == wanted - 1
    list(cache.extend(pair[row], 1, tokens=[7]))
    assert [copy.tag for copy in cache.commit(pair[row])] == ["state"]


@pytest.mark.parametrize("num", [1, 2])
def test_a_point_in_the_answer_that_drafts_passed_is_still_left_when_they_are_rejected(num: int) -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State())))
    batch = Batch([cache.open([i, 1, 2, 3], points=[16]) for i in range(num)])
    for ids in (None, *[[7] * num] * 10):
        list(cache.extend(batch, 1 if ids else 4, tokens=ids))
        list(cache.commit(batch))
    list(cache.extend(batch, 3, tokens=[7, 8, 9] * num, drafts=2))
    cache.accept(batch, 15)
    list(cache.commit(batch))
    list(cache.extend(batch, 1, tokens=[7] * num))
    assert [copy.tag for copy in cache.commit(batch)] == ["state"]


# ---- copies


def test_copies_that_nobody_took_over_make_the_next_call_an_error() -> None:
    cache = hybrid()
    engine = Engine(cache)
    first = cache.open(range(20))
    while first.length < 20:
        step(cache, engine, first, (first.stop or 20) - first.length)
    again = cache.open([*range(16), 1, 2])
    copies = cache.extend(again, 2)
    assert len(copies) == 1
    for call in (lambda: cache.commit(again), lambda: cache.extend(again, 1), lambda: cache.fork(again)):
        with pytest.raises(NotSettled, match="never read"):
            call()
    list(cache.extend(first, 1, tokens=[3]))
    assert [copy.tag for copy in copies] == ["state"]
    list(cache.commit(again))


def test_a_sequence_closed_before_its_copies_were_taken_over_leaves_neither_its_row_nor_unfilled_states() -> None:
    cache = hybrid()
    engine = Engine(cache)
    first = cache.open(range(20))
    step(cache, engine, first, 16)
    children, copies = cache.fork(first, 2)
    assert len(copies)
    cache.close(children[0])
    other = cache.open(range(50, 60))
    step(cache, engine, other, 3)
    engine.carry_out(copies)  # those of the other child
    step(cache, engine, children[1], 1)
    for sequence in (first, other, children[1]):
        cache.close(sequence)
    check_books(cache)


def test_a_state_that_was_never_copied_is_not_found() -> None:
    cache = hybrid()
    sequence = cache.open(range(20))
    assert sequence.stop == 16
    assert not list(cache.extend(sequence, 16))
    assert len(cache.commit(sequence))
    cache.close(sequence)
    assert cache.lookup(range(20)) == 0
    check_books(cache)


def test_a_sequence_is_not_closed_while_another_goes_on_from_a_state_that_was_never_copied() -> None:
    with hybrid() as cache:
        first = cache.open(range(20))
        assert not list(cache.extend(first, 16))
        copies = cache.commit(first)
        second = cache.open(range(20))
        assert (second.num_cached, len(copies)) == (16, 1)
        before = cache.stats()
        with pytest.raises(NotSettled, match="goes on from a state that copies were to fill"):
            cache.close(first)
        assert cache.stats() == before
        assert [copy.tag for copy in copies] == ["state"]
        cache.close(first)
        assert [copy.tag for copy in cache.extend(second, 1)] == ["state"]
        cache.close(second)
        third, fourth = cache.open(range(50, 70)), cache.open(range(50, 70))
        list(cache.extend(third, 16))
        assert len(cache.commit(third)) == 1
        assert cache.rematch(fourth) == 16
    assert cache.stats().sequences == 0
    assert cache.lookup(range(50, 70)) == 0
    check_books(cache)


# ---- numbers of tokens


def test_numbers_of_tokens_may_be_numpys_and_must_be_whole() -> None:
    cache = Cache(full_plan())
    pair = [cache.open(range(20)), cache.open(range(30, 50))]
    cache.extend(pair[0], np.int64(3))
    cache.extend(pair, np.int32(2))
    assert [sequence.length for sequence in pair] == [5, 2]
    cache.commit(pair, np.array([4, 1], np.uint8))
    cache.accept(pair[0], np.int64(4))
    assert [(sequence.length, sequence.committed) for sequence in pair] == [(4, 4), (2, 1)]
    for wrong in (2.0, [2.5, 1], "2", None):
        with pytest.raises(BadSequence, match="whole numbers of tokens"):
            cache.extend(pair, wrong)  # type: ignore[arg-type]
        with pytest.raises(BadSequence, match="whole numbers of tokens"):
            cache.accept(pair, wrong)
    for shape in ([4, 2, 2], [[4, 2]], [4]):
        with pytest.raises(BadSequence, match="lengths of the shape"):
            cache.commit(pair, shape)
    with pytest.raises(BadSequence, match="extended by 0 tokens"):
        cache.can_extend(pair, 0)
    assert [(sequence.length, sequence.committed) for sequence in pair] == [(4, 4), (2, 1)]


def test_a_number_of_tokens_beyond_all_sums_is_refused_and_changes_nothing() -> None:
    cache = Cache(full_plan())
    pair = [cache.open(range(20)), cache.open(range(30, 50))]
    cache.extend(pair, 8)
    for most in (2**63 - 5, 2**64):
        with pytest.raises(BadSequence, match="cannot extend 2 sequences"):
            cache.extend(pair, most)
        with pytest.raises(BadSequence, match="cannot extend 2 sequences"):
            cache.extend(pair, 1, lookahead=most)
        assert not cache.can_extend(pair, most)
    with pytest.raises(BadSequence, match="cannot extend 2 sequences"):
        cache.extend(pair, [1, 2**63 - 5])
    assert [sequence.length for sequence in pair] == [8, 8]


def test_a_batch_that_its_own_cache_has_taken_is_refused_by_another() -> None:
    caches = [Cache(full_plan()), Cache(full_plan())]
    batches = [Batch([cache.open(range(8))]) for cache in caches]
    caches[0].extend(batches[0], 4)
    with pytest.raises(BadSequence, match="of another cache is in the batch"):
        caches[1].extend(batches[0], 4)
    assert batches[1].sequences[0].length == 0


# ---- waiting


def test_a_twin_that_waits_finds_what_the_first_has_committed_meanwhile() -> None:
    cache = hybrid()
    engine = Engine(cache)
    first, twin = cache.open(range(30)), cache.open(range(30))
    assert cache.rematch(twin) == 0
    while first.length < 30:
        step(cache, engine, first, (first.stop or 30) - first.length)
    assert cache.rematch(twin) == 28
    assert cache.stats().hit_tokens == 28
    step(cache, engine, twin, 2)
    with pytest.raises(NotSettled, match="has begun to compute"):
        cache.rematch(twin)
    check_books(cache)


def test_no_sequence_gets_longer_than_the_cache_was_made_for() -> None:
    cache = Cache(full_plan(blocks=4), max_tokens=10)
    cache.check_fits(10)
    alone, pair = cache.open(range(9)), [cache.open(range(20, 29)), cache.open(range(30, 39))]
    cache.extend([alone, *pair], 9)
    cache.extend([alone, *pair], 1)
    for sequences in (alone, pair):
        with pytest.raises(NeverFits, match="11 tokens are more than the 10"):
            cache.extend(sequences, 1)
        assert not cache.can_extend(sequences, 1)


def test_more_than_the_cache_was_made_for_is_not_loaded() -> None:
    cache = hybrid(max_tokens=18)
    sequence = cache.open(range(100))
    before = cache.stats()
    with pytest.raises(NeverFits, match="64 tokens are more than the 18"):
        cache.load_to(sequence, 64)
    assert cache.stats() == before
    cache.load_to(sequence, 16)
    check_books(cache)


def test_whether_a_prompt_can_ever_fit_is_known_before_its_first_chunk() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6)), pages=11))
    cache.check_fits(40)
    cache.check_fits(40, step_tokens=16)
    with pytest.raises(NeverFits, match="a sequence of 41 tokens"):
        cache.check_fits(41)
    windows = Cache(plan_of(group("window", Window(6)), pages=6))
    windows.check_fits(10_000, step_tokens=4)
    with pytest.raises(NeverFits, match="in one step"):
        windows.check_fits(10_000, step_tokens=40)


def test_whether_a_prompt_can_ever_fit_is_told_for_the_longest_part_of_a_chunk() -> None:
    cache = Cache(plan_of(group("chunk", Chunk(8192)), pages=1601))
    for length in (8000, 8192, 13_000):
        with pytest.raises(NeverFits):
            cache.check_fits(length)
    cache.check_fits(6400)


def test_a_prompt_that_was_promised_fits_wherever_its_hit_ends() -> None:
    cache = Cache(plan_of(group("chunk", Chunk(8)), pages=3))
    with pytest.raises(NeverFits, match="takes 3 super-pages"):
        cache.check_fits(24, step_tokens=8)  # after a hit of 4 tokens the step [4, 12) needs three blocks
    cache.check_fits(24, step_tokens=4)


@pytest.mark.parametrize("length", [10**9, 2**70])
def test_a_length_beyond_all_memory_is_refused_before_anything_is_computed_for_it(length: int) -> None:
    with pytest.raises(NeverFits, match="more than the 18"):
        Cache(plan_of(group("full", Full()), pages=11), max_tokens=18).check_fits(length)


def test_a_length_is_asked_for_where_its_windows_hold_the_most() -> None:
    """Chunks of 67 tokens in blocks of 64 hold three blocks only where they start at 62 or 63."""
    chunks = plan_of(group("chunk", Chunk(67)), pages=3, blocks=64)
    cache = Cache(chunks)
    sequence = cache.open([1] * 5200)
    with pytest.raises(NeverFits):
        cache.check_fits(5200)
    with pytest.raises(NeverFits):
        for _ in range(5200):
            cache.extend(sequence, 1)
            cache.commit(sequence)
    cache.check_fits(sequence.length)


@pytest.mark.parametrize(("pages", "size"), [(3, 5), (4, 7), (4, 10), (5, 15), (6, 16), (6, 18)])
def test_whether_a_length_fits_is_asked_of_all_steps_that_there_can_be_and_no_others(pages: int, size: int) -> None:
    own, grid = {"window": PoolRequest(pages=6), "chunk": PoolRequest(pages=pages)}, 12
    caches, blocks = (group("window", Window(2)), group("chunk", Chunk(5))), {"window": 4, "chunk": 3}
    plan = plan_of(*caches, blocks=blocks, own_pools=own)
    allocator = PageAllocator(CacheState(plan, 1, 400, 0, "lru", Retention(), None), 0.0)
    said = set()
    for length in range(1, 100):
        starts = np.array(sorted({at for hit in range(0, length, grid) for at in range(hit, length, size)}))
        never = allocator.never_fits(starts, np.minimum(starts + size, length)) is not None
        assert (allocator.never_fits_in_steps(length, size) is not None) == never, length
        said.add(never)
    assert said == {True, False}


def test_what_fits_once_a_step_in_flight_is_committed_is_not_refused_for_ever() -> None:
    cache = Cache(plan_of(group("window", Window(3)), pages=4))
    first, second = cache.open([1] * 20), cache.open([2] * 20)
    cache.extend(first, 8)
    for sequences, counts in ((first, 5), ([first, second], [5, 1])):
        with pytest.raises(OutOfPages):
            cache.extend(sequences, counts)
    cache.commit(first)
    cache.extend(first, 5)
    check_books(cache)


def test_drafts_for_which_there_are_never_enough_states_never_fit() -> None:
    cache = Cache(plan_of(group("state", State()), pages=4))
    sequence = cache.open([1] * 20)
    with pytest.raises(NeverFits, match="takes 4 super-pages"):
        cache.extend(sequence, 4, drafts=3)
    cache.extend(sequence, 4, drafts=2)


@pytest.mark.parametrize("wrong", [1.5, float("nan"), np.float64(2)])
def test_numbers_of_drafts_that_are_not_whole_change_nothing(wrong: float) -> None:
    cache = hybrid()
    pair = [cache.open([i] * 20) for i in range(2)]
    before = cache.stats()
    for name in ("drafts", "lookahead"):
        with pytest.raises(TypeError):
            cache.extend(pair, 4, **{name: wrong})  # type: ignore[arg-type]
    assert cache.stats() == before


def test_whether_rows_can_be_extended_does_not_depend_on_those_that_have_their_pages() -> None:
    cache = Cache(plan_of(group("full", Full()), pages=11), admission_reserve=0.5)
    waiting, running = cache.open([1] * 6), cache.open([2] * 40)
    cache.extend(waiting, 4, lookahead=4)
    cache.accept(waiting, 0)
    cache.extend(running, 12)
    cache.commit(running)
    assert cache.can_extend([waiting, running], 1)
    cache.extend([waiting, running], 1)


@pytest.mark.parametrize("groups", [(group("full", Full()), group("state", State())), (group("state", State()),)])
def test_a_sequence_that_is_alone_takes_the_states_of_its_hit_where_no_page_is_left_for_a_copy(
    groups: tuple[LayerCache, ...],
) -> None:
    cache = Cache(plan_of(*groups, pages=6, own_pools={"state": PoolRequest(pages=1)}))
    cache_first_block(cache)
    cache.check_fits(16)
    sequence = cache.open([1] * 16)
    assert sequence.num_cached == 4
    assert sequence.restore is not None
    snapshot = sequence.restore.states[0]
    assert cache.can_extend(sequence, 12)
    assert not list(cache.extend(sequence, 12)), "nothing is copied"
    assert int(cache.table("state")[sequence.row, 0]) == snapshot
    check_books(cache)


def test_states_that_a_pin_keeps_are_copied_or_refused_and_never_taken() -> None:
    cache = Cache(plan_of(group("state", State()), pages=2))
    cache_first_block(cache)
    pin = cache.pin([1] * 5)
    assert pin is not None
    sequence = cache.open([1] * 16)
    assert not cache.can_extend(sequence, 1)
    with pytest.raises(OutOfPages):
        cache.extend(sequence, 1)
    cache.unpin(pin)
    cache.extend(sequence, 1)
    check_books(cache)


def test_what_is_loaded_takes_the_place_of_the_states_of_a_hit() -> None:
    cache = Cache(plan_of(group("state", State()), pages=2))
    cache_first_block(cache)
    sequence = cache.open([1] * 16)
    cache.load_to(sequence, 8)
    assert sequence.length == 8
    check_books(cache)


def test_after_a_refused_load_the_states_of_the_hit_are_restored_all_the_same() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=6))
    cache_first_block(cache)
    other = cache.open([2] * 20)
    cache.extend(other, 14)
    sequence = cache.open([1] * 16)
    with pytest.raises(OutOfPages):
        cache.load_to(sequence, 8)
    other.close()
    assert [copy.tag for copy in cache.extend(sequence, 4)] == ["state"], "of the snapshot into the live state"


def test_points_that_later_ones_of_an_answer_replace_do_not_count_as_evicted() -> None:
    cache = hybrid(retention=Retention(decode_every=4))
    sequence = cache.open([1] * 5)
    for token in range(60):
        list(cache.extend(sequence, 5 if not token else 1, tokens=None if not token else [token]))
        list(cache.commit(sequence))
        cache.publish()
    sequence.close()
    assert cache.stats().evicted_pages == 0
    assert cache.lookup([1] * 5 + list(range(1, 61))) == 64


def test_of_twins_that_part_later_each_is_found() -> None:
    cache = Cache(full_plan())
    twins = [cache.open([1, 1, 1, 1, i, i, i, i, 9]) for i in (2, 3)]
    for twin in twins:
        cache.extend(twin, 8)
    cache.commit(twins)
    assert [cache.lookup([1, 1, 1, 1, i, i, i, i, 7]) for i in (3, 2)] == [8, 8]


def test_publishing_takes_a_state_at_the_first_multiple_of_the_grid() -> None:
    cache = Cache(plan_of(group("state", State())), retention=Retention(every=4))
    sequence = cache.open([1] * 9)
    list(cache.extend(sequence, 4))
    list(cache.commit(sequence))
    cache.publish()
    assert cache.stats().nodes == 1


def test_no_more_points_are_evicted_at_a_time_than_may_be() -> None:
    cache = Cache(full_plan())
    for i in range(5):
        with cache.open([i] * 5) as sequence:
            cache.extend(sequence, 4)
            cache.commit(sequence)
    cache.state.prefix.evict(cache.state.groups[0], 5, most=2)
    assert cache.stats().nodes == 3


def test_pages_of_a_generating_sequence_are_gathered_only_where_it_takes_most_of_the_pool() -> None:
    plan = plan_of(group("window", Window(9), width=4), group("full", Full(), width=16), pools="shared", pages=0)
    cache = Cache(plan)
    pages = cache.state.pages[0]
    assert not pages.is_mostly_needed
    sequence = cache.open([1] * 40)
    list(cache.extend(sequence, 40))
    assert pages.is_mostly_needed
    list(cache.commit(sequence))
    sequence.close()
    assert not pages.is_mostly_needed


def test_a_preempted_sequence_resumes_from_what_it_left() -> None:
    cache = hybrid(retention=Retention(decode_every=4))
    engine = Engine(cache)
    sequence = cache.open(range(10))
    while sequence.length < 10:
        step(cache, engine, sequence, (sequence.stop or 10) - sequence.length)
    for token in range(17):
        step(cache, engine, sequence, 1, tokens=[token])
    tokens = sequence.tokens
    cache.close(sequence)
    again = cache.open(tokens)
    assert again.num_cached == 24, "its last state, of 27 tokens"
    step(cache, engine, again, 3)


def test_a_fork_that_ends_where_it_was_made_leaves_its_state_there() -> None:
    cache = hybrid()
    engine = Engine(cache)
    first = cache.open(range(6))
    step(cache, engine, first, 6)
    step(cache, engine, first, 2, tokens=[6, 7])
    (child,), copies = cache.fork(first)
    engine.carry_out(copies)
    assert cache.lookup(range(10)) == 0, "both may still go on, and no snapshot was taken"
    cache.close(child)
    check_books(cache)
    again = cache.open(range(10))
    assert again.num_cached == 8
    step(cache, engine, again, 2)
    cache.close(first)
    check_books(cache)


def test_a_preempted_sequence_leaves_a_point_anew_where_that_was_evicted_while_it_ran() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    engine, sequence = Engine(cache), cache.open(range(14))
    step(cache, engine, sequence, 14)
    cache.publish()
    cache.state.prefix.drop_point(sequence.node.points[-1])
    assert cache.lookup(range(14)) == 0
    cache.close(sequence)
    check_books(cache)
    again = cache.open(range(14))
    assert again.num_cached == 12
    step(cache, engine, again, 2)


def test_replays_whose_hits_stop_blocks_earlier_find_the_point_that_was_left_for_them() -> None:
    cache = Cache(plan_of(group("full", Full()), group("state", State()), pages=200))
    engine, hits = Engine(cache), []
    for _ in range(3):
        sequence = cache.open(range(50), drop_last_blocks=1)
        hits.append(sequence.num_cached)
        while sequence.length < 50:
            step(cache, engine, sequence, (sequence.stop or 50) - sequence.length)
        cache.close(sequence)
    assert hits == [0, 44, 44]


def test_small_blocks_beside_a_large_grid_hold_no_more_than_the_plan_counts() -> None:
    small = PoolRequest(pages=3)
    caches = group("full", Full()), group("small", Window(4))
    made = plan_of(*caches, blocks={"full": 64, "small": 2}, own_pools={"small": small})
    assert made.group("small").num_blocks_held(300) == 3
    cache = Cache(made)
    engine, sequence = Engine(cache), cache.open(range(300))
    while sequence.length < 300:
        step(cache, engine, sequence, 1)
    assert sequence.length == 300


def test_with_closes_sequences_and_caches() -> None:
    cache = Cache(full_plan())
    with cache:
        with cache.open(range(9)) as sequence:
            cache.extend(sequence, 9)
            cache.commit(sequence)
        assert not sequence.is_open
        other = cache.open(range(9))
        assert other.num_cached == 8
    assert not other.is_open
    assert cache.stats().sequences == 0


def test_rows_that_changed_are_told_to_whoever_keeps_a_copy_of_a_table() -> None:
    cache = Cache(plan_of(group("full", Full()), group("window", Window(6))))
    one, two = cache.open(range(13)), cache.open(range(50, 63))
    cache.extend([one, two], 13)
    copy = cache.table("window").copy()
    assert sorted(cache.take_changed_rows("window").tolist()) == sorted([one.row, two.row])
    cache.commit(one)
    changed = cache.take_changed_rows("window")
    assert changed.tolist() == [one.row]
    copy[changed] = cache.table("window")[changed]
    assert (copy == cache.table("window")).all()


@pytest.mark.parametrize("trailing", [Window(6), State()])
def test_a_prompt_under_way_leaves_a_point_where_one_that_came_later_leaves_it(trailing: Reach) -> None:
    cache = Cache(plan_of(group("full", Full()), group("trailing", trailing)), retention=Retention(every=0))
    engine, first = Engine(cache), cache.open(range(40))
    step(cache, engine, first, 8)
    for position in (8, 21, 90):
        cache.add_branch(first, position)
    assert first.prompt_points == [20, 36], "neither where it is already nor behind its end"
    while first.length < 40:
        step(cache, engine, first, min(first.stop or 40, 40) - first.length)
    assert cache.lookup([*range(21), 99, 98, 97]) == 20
    cache.close(first)
    check_books(cache)

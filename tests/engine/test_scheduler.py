"""The scheduler alone, over the core: budget, order, room, preemption, twins, and random loads that always end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvweave import Cache, Layer, LayerCache, ModelSpec, Role, make_plan
from kvweave.engine.job import Job, JobChunk
from kvweave.engine.scheduler import Scheduler
from kvweave.errors import BadOption, NeverFits
from kvweave.spec import DType, Full, Reach, State, Window

ROW = Role("kv", (16,), DType.FLOAT16)


def core_of(*reaches: Reach, memory: str = "16KiB") -> Cache:
    layers = [Layer((LayerCache(reach.kind, reach, (ROW,)),)) for reach in reaches]
    return Cache(make_plan(ModelSpec("small", tuple(layers)), memory, block_tokens=4), rows=16, max_tokens=1024)


def scheduler_of(core: Cache, **options: Any) -> Scheduler:
    return Scheduler(core, lambda job: core.open(job.tokens, namespace=job.tenant, branches=job.branches), **options)


def job(length: int, seed: int = 0, max_new: int = 4, **options: object) -> Job:
    tokens = random.Random(seed).choices(range(1000), k=length)
    return Job(tokens, max_new, **options)  # type: ignore[arg-type]


def step(scheduler: Scheduler, on_chunk: Callable[[JobChunk], None] = lambda _: None) -> list[JobChunk]:
    """Plan a step and pretend that it is computed."""
    plan = scheduler.plan()
    for copies in plan.copies:
        list(copies)
    for copies in scheduler.commit(plan.chunks):
        list(copies)
    for chunk in plan.chunks:
        on_chunk(chunk)
        if chunk.gives_token:
            chunk.job.tokens.append(7 + len(chunk.job.tokens))
            if len(chunk.job.tokens) - chunk.job.num_prompt == chunk.job.max_new:
                scheduler.remove(chunk.job)
    return plan.chunks


def spans(chunks: list[JobChunk]) -> list[tuple[int, int, int]]:
    return [(chunk.job.number, chunk.start, chunk.end) for chunk in chunks]


def test_a_step_computes_answers_first_and_then_chunks_of_prompts_within_its_budget() -> None:
    scheduler = scheduler_of(core_of(Full()), budget=10)
    scheduler.add(job(6))
    scheduler.add(job(20, seed=1))
    assert spans(step(scheduler)) == [(0, 0, 6), (1, 0, 4)]
    assert spans(step(scheduler)) == [(0, 6, 7), (1, 4, 13)]
    assert spans(step(scheduler)) == [(0, 7, 8), (1, 13, 20)]


def test_chunks_end_where_states_are_wanted() -> None:
    scheduler = scheduler_of(core_of(Full(), State()), budget=100)
    scheduler.add(job(18))
    assert spans(step(scheduler)) == [(0, 0, 16)]
    assert spans(step(scheduler)) == [(0, 16, 18)]


def test_higher_priority_goes_first_and_equals_in_turn() -> None:
    scheduler = scheduler_of(core_of(Full()), budget=8)
    for priority in (0, 0, 5):
        scheduler.add(job(8, seed=priority, priority=priority))
    assert spans(step(scheduler)) == [(2, 0, 8)]
    assert spans(step(scheduler))[1:] == [(0, 0, 7)]


def test_tenants_take_turns() -> None:
    scheduler = scheduler_of(core_of(Full()), budget=8, max_running=1)
    for number in range(3):
        scheduler.add(job(8, seed=number, max_new=1, tenant="many"))
    scheduler.add(job(8, seed=9, max_new=1, tenant="one"))
    assert [spans(step(scheduler))[0][0] for _ in range(4)] == [0, 3, 1, 2]


def test_a_job_that_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = scheduler_of(core_of(Full(), memory="2KiB"))
    scheduler.check(30, 4)
    with pytest.raises(NeverFits) as told:
        scheduler.check(400, 4)
    assert told.value.smallest_bytes > told.value.available_bytes


def test_budgets_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadOption):
        scheduler_of(core_of(Full()), budget=0)


def test_low_priority_is_preempted_for_high_and_goes_on_from_what_it_left() -> None:
    core = core_of(Full(), memory="2KiB")  # 15 blocks of 4 tokens
    scheduler = scheduler_of(core, budget=64)
    low, high = job(40, max_new=6), job(36, seed=1, max_new=2, priority=1)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(high)
    chunks: list[JobChunk] = []
    while not scheduler.is_idle:
        chunks += step(scheduler)
    assert (low.num_preempted, high.num_preempted) == (1, 0)
    assert chunks[-1].job is low
    resumed = next(chunk for chunk in chunks[::-1] if chunk.job is low and chunk.num_tokens > 1)
    assert resumed.start > 0, "nothing was left of it"
    assert core.stats().sequences == 0


def test_a_twin_waits_for_the_prefix_that_is_being_computed() -> None:
    scheduler = scheduler_of(core_of(Full()), budget=16)
    first = job(40)
    second = Job([*first.tokens[:36], 1, 2, 3], 4)
    scheduler.add(first)
    scheduler.add(second)
    while second.sequence is None:
        step(scheduler)
    assert second.num_cached == 36
    assert first.num_computed >= 40


@pytest.mark.parametrize(("shared", "cached"), [(70, [68, 68, 68]), (40, [0, 40, 40])])
def test_the_first_of_prompts_that_wait_leaves_a_state_where_most_of_their_tokens_are_saved(
    shared: int, cached: list[int]
) -> None:
    scheduler = scheduler_of(core_of(Full(), State(), memory="256KiB"), budget=1000)
    first = job(110)
    twins = [Job([*first.tokens[:shared], number, 2, 3], 4) for number in range(3)]
    others = [Job([*first.tokens[:90], 1, 2, 3], 4), Job(first.tokens[:20], 4, tenant="b")]
    for each in (first, *twins, *others):
        scheduler.add(each)
    while any(each.num_cached is None for each in (*twins, *others)):
        step(scheduler)
    assert [twin.num_cached for twin in twins] == cached
    assert others[1].num_cached == 0, "of another tenant"


@pytest.mark.parametrize(
    ("reaches", "cached"),
    [
        ((Full(), State()), [128, 88, 0]),
        ((Full(), Window(8), State()), [128, 88, 0]),
        ((Full(), Window(8)), [128, 80, 16]),
    ],
    ids=["state", "window and state", "window, whose points are close anyway"],
)
def test_a_twin_that_comes_while_the_first_is_computed_finds_what_they_share(
    reaches: tuple[Reach, ...], cached: list[int]
) -> None:
    core = core_of(*reaches, memory="256KiB")
    scheduler = scheduler_of(core, budget=32)
    first = job(200)
    scheduler.add(first)
    step(scheduler)
    late = [Job([*first.tokens[:shared], 1, 2, 3], 1) for shared in (130, 90, 20)]
    for each in late:
        scheduler.add(each)
    while not scheduler.is_idle:
        step(scheduler)
    assert [each.num_cached for each in late] == cached
    assert all(group.held == 0 for group in core.stats().groups)


def test_others_of_another_tenant_do_not_wait() -> None:
    scheduler = scheduler_of(core_of(Full()), budget=64)
    scheduler.add(job(40, tenant="a"))
    scheduler.add(job(20, tenant="b"))
    assert spans(step(scheduler)) == [(0, 0, 40), (1, 0, 20)]


@pytest.mark.parametrize("reaches", [(Full(),), (Full(), Window(8)), (Full(), State()), (Window(8), State())])
@pytest.mark.parametrize("seed", range(4))
def test_random_loads_in_tiny_memory_always_end_and_the_books_balance(reaches: tuple[Reach, ...], seed: int) -> None:
    """Each job computes each of its tokens at least once, in order, and never twice at a time."""
    rng = random.Random(seed)
    core = core_of(*reaches, memory="4KiB")
    scheduler = scheduler_of(core, budget=rng.choice([3, 16, 64]), max_running=rng.choice([2, 5]))
    prefix = [rng.randrange(50) for _ in range(16)]
    jobs = [
        Job(prefix[: rng.randint(0, 16)] + [rng.randrange(50) for _ in range(rng.randint(1, 20))], rng.randint(1, 9),
            priority=rng.randint(0, 2), tenant=rng.choice("ab"))
        for _ in range(24)
    ]  # fmt: skip
    ends: dict[int, int] = {}

    def seen(chunk: JobChunk) -> None:
        assert chunk.num_tokens >= 1
        assert chunk.start <= ends.get(chunk.job.number, chunk.start), "tokens were left out"
        ends[chunk.job.number] = chunk.end

    left = list(jobs)
    for _ in range(5000):
        while left and rng.random() < 0.5:
            scheduler.add(left.pop())
        if rng.random() < 0.05 and scheduler.running:
            cancelled = rng.choice(scheduler.running)
            cancelled.max_new = len(cancelled.tokens) - cancelled.num_prompt
            scheduler.remove(cancelled)
        assert step(scheduler, seen) or scheduler.is_idle, "nothing moves"
        if not left and scheduler.is_idle:
            break
    assert all(len(each.tokens) - each.num_prompt == each.max_new for each in jobs)
    stats = core.stats()
    assert stats.sequences == 0
    assert all(group.held == 0 for group in stats.groups)


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_prompt_that_fits_only_in_short_steps_is_computed_in_such(whole_prompts: bool) -> None:
    """In one step, a window's pages are needed for all of its tokens at once."""
    core = core_of(Full(), Window(8), memory="6KiB")
    scheduler = scheduler_of(core, budget=512, whole_prompts=whole_prompts)
    long = job(120, max_new=2)
    with pytest.raises(NeverFits):
        core.check_fits(122, 120)
    core.check_fits(122, 1)
    scheduler.add(long)
    ends = [chunk.end for _ in range(200) for chunk in step(scheduler)]
    assert ends == sorted(set(ends))
    assert ends[-1] == 121
    assert len(ends) > 2
    assert len(long.tokens) == 122
    assert scheduler.is_idle


def test_jobs_that_only_wait_for_their_last_token_are_neither_computed_nor_preempted() -> None:
    """The engine plans a step while the one before it is computed."""
    scheduler = scheduler_of(core_of(Full()))
    jobs = [job(5, seed, max_new=1) for seed in (1, 2)]
    for each in jobs:
        scheduler.add(each)
    assert [chunk.gives_token for chunk in scheduler.plan().chunks] == [True, True]
    for each in jobs:
        each.num_pending = 1
    assert not scheduler.plan().chunks
    assert scheduler.running == jobs
    assert not any(each.num_preempted for each in jobs)

"""The scheduler's and the worker's side together, without vLLM: an engine of numpy, whose blocks a loop fills."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.integrations.vllm.connector_settings import ConnectorSettings, RequestSettings
from kvweave.integrations.vllm.engine_groups import EngineGroup
from kvweave.integrations.vllm.load_or_compute import TRY_EVERY, Speeds
from kvweave.integrations.vllm.request_state import RequestState
from kvweave.integrations.vllm.running_saves import RunningSaves
from kvweave.integrations.vllm.scheduler_side import Scheduled, SchedulerSide
from kvweave.integrations.vllm.step_messages import WorkerReport
from kvweave.integrations.vllm.worker_side import WorkerSide
from kvweave.spec import DType, Full, LayerCache, ModelSpec, Role, State, Window
from kvweave.spec.layer_spec import Layer
from kvweave.store import (
    DictTier,
    EngineMemory,
    Namespace,
    PagePayloads,
    Schema,
    Store,
    TableUse,
    TierPolicy,
    TierStack,
)
from kvweave.store.results import GroupLoad

CHUNK, BLOCK, WINDOW, PAGES = 8, 16, 24, 64
KEY = (Role("key", (4,), DType.FLOAT32),)
HERE = Namespace("m")
GROUPS = {
    "full": EngineGroup(0, BLOCK, Full(), ("full",)),
    "window": EngineGroup(1, BLOCK, Window(WINDOW), ("window",)),
    "state": EngineGroup(2, BLOCK, State(), ("state",)),
    "state.2": EngineGroup(3, BLOCK, State(), ("state.2",)),
}


class FakeEngine:
    """Pages of one layer a group; block tables as vLLM's: NULL where a window has left, states at block ends."""

    def __init__(self, tags: Sequence[str], tier: DictTier, chunk: int = CHUNK, **settings: Any) -> None:
        caches = [LayerCache(tag, GROUPS[tag].reach, KEY) for tag in tags]
        self.groups = [GROUPS[tag] for tag in tags]
        shapes = {tag: (PAGES, 4) if GROUPS[tag].is_state else (PAGES, BLOCK, 4) for tag in tags}
        schema = Schema.of(
            ModelSpec("m", tuple(Layer((cache,)) for cache in caches)), chunk_tokens=chunk, parts=1, tails=True
        )
        self.store = Store(schema, TierStack((tier, TierPolicy(inline=True))))
        self.memory = {tag: np.zeros(shape, np.float32) for tag, shape in shapes.items()}
        tensors = {(layer, tag, "key"): self.memory[tag] for layer, tag in enumerate(tags)}
        tables = {
            (layer, tag): TableUse(GROUPS[tag].table, chunk if GROUPS[tag].is_state else BLOCK)
            for layer, tag in enumerate(tags)
        }
        self.pages = PagePayloads(schema, EngineMemory.of_tensors(tensors, tables))
        chosen = ConnectorSettings(store="x", always_load=True, min_load_tokens=1, **settings)
        self.pinned = Counter[int]()
        saves = RunningSaves(self.pinned.update, self.pinned.subtract, 1)
        self.scheduler = SchedulerSide(chosen, self.store, self.groups, saves)
        self.worker = WorkerSide(chosen, self.store, self.pages)
        self._next = 1

    def blocks(self, first: int, stop: int) -> list[list[int]]:
        """A table for each of vLLM's groups, with pages for the tokens from `first` on."""
        count, used = -(-stop // BLOCK), list[list[int]]()
        for number in range(len(GROUPS)):
            ids = [0] * (first // BLOCK) + [*range(self._next, self._next + count - first // BLOCK)]
            self._next += 0 if number not in {group.number for group in self.groups} else len(ids)
            used.append(ids)
        return used

    def add(self, request: str, tokens: Sequence[int], **settings: Any) -> None:
        prompt = self.store.prompt(list(tokens), HERE)
        self.scheduler.add(request, RequestState(RequestSettings(**settings), tokens, len(tokens), prompt))

    def match(self, request: str, num_computed: int = 0) -> int:
        while (found := self.scheduler.match(request, num_computed)) is None:
            time.sleep(0.001)
        return found

    def compute(self, request: str, tokens: Sequence[int], start: int, stop: int, table: list[list[int]]) -> None:
        """A step: rows are numbered by their tokens and positions, states by all before."""
        offers = []
        for group in self.groups:
            for position in range(start, stop):
                page = table[group.number][position // BLOCK]
                if group.is_state:
                    if (position + 1) % BLOCK == 0:
                        self.memory[group.layers[0]][page] = sum(tokens[: position + 1])
                        offers.append((group.number, page, position + 1))
                else:
                    self.memory[group.layers[0]][page, position % BLOCK] = tokens[position] * 1000 + position
        step = [Scheduled(request, start, stop - start)]
        self.run(self.scheduler.step(step, lambda _: table, {request: offers}))

    def run(self, jobs: Any) -> set[str]:
        """The jobs of a step, to their end; returns the requests whose loads failed."""
        self.worker.start_loads(jobs.loads)
        self.worker.start_saves(jobs.saves)
        waiting, failed = {job.request for job in jobs.loads}, set[str]()
        until = time.monotonic() + 20
        while waiting or self.scheduler.saves:
            assert time.monotonic() < until
            results = self.worker.take_loads()
            self.scheduler.report(self.worker.take_report())
            self.scheduler.loaded(results.ended)
            waiting -= results.ended
            failed |= results.failed
            time.sleep(0.001)
        return failed

    def load(self, request: str, num_tokens: int, start: int, table: list[list[int]]) -> set[str]:
        self.scheduler.allocated(request, table, num_tokens)
        return self.run(self.scheduler.step((), lambda _: None, {}))

    def rows(self, tag: str, table: list[list[int]], position: int) -> np.ndarray[Any, Any]:
        """What resuming at `position` reads of a group."""
        group = GROUPS[tag]
        pages = table[group.number]
        if group.is_state:
            return np.array(self.memory[tag][pages[position // BLOCK - 1]])
        tail = int(group.reach.tail(position))
        return np.array([self.memory[tag][pages[p // BLOCK], p % BLOCK] for p in range(tail, position)])


@pytest.fixture
def tier() -> DictTier:
    return DictTier()


KINDS = [("full",), ("window",), ("full", "window"), ("full", "state"), ("full", "window", "state", "state.2")]


@pytest.mark.parametrize("tags", KINDS)
@pytest.mark.parametrize("steps", [(100,), (33, 64, 100), (16, 32, 48, 64, 80, 96, 100)])
def test_what_one_engine_computed_in_whatever_steps_another_resumes_from(
    tags: tuple[str, ...], steps: tuple[int, ...], tier: DictTier
) -> None:
    tokens = [7 * number % 101 for number in range(100)]
    writer, start = FakeEngine(tags, tier), 0
    writer.add("a", tokens)
    assert writer.match("a") == 0
    table = writer.blocks(0, len(tokens))
    for stop in steps:
        writer.compute("a", tokens, start, stop, table)
        start = stop
    assert not +writer.pinned

    reader = FakeEngine(tags, tier)
    reader.add("b", tokens)
    found = reader.match("b")
    assert found == 96
    own = reader.blocks(0, found)
    assert not reader.load("b", found, 0, own)
    for tag in tags:
        np.testing.assert_array_equal(reader.rows(tag, own, found), writer.rows(tag, table, found), err_msg=tag)


def test_blocks_that_the_engine_has_itself_are_not_written_though_a_chunk_begins_there(tier: DictTier) -> None:
    tokens, chunk = [*range(100)], 2 * BLOCK
    writer = FakeEngine(("full", "window"), tier, chunk)
    writer.add("a", tokens)
    writer.compute("a", tokens, 0, 100, writer.blocks(0, 100))
    reader = FakeEngine(("full", "window"), tier, chunk)
    reader.add("b", tokens)
    assert reader.match("b", 3 * BLOCK) == 48
    own = reader.blocks(0, 96)
    for memory in reader.memory.values():
        memory[:] = -1
    assert not reader.load("b", 48, 3 * BLOCK, own)
    assert (reader.memory["full"][own[0][:3]] == -1).all()
    assert (reader.memory["full"][own[0][3:6]] != -1).all()
    assert (reader.memory["full"][0] == -1).all()


def test_a_request_that_began_with_the_engines_own_hit_is_saved_whole_but_for_what_windows_left(tier: DictTier) -> None:
    tokens = [7 * number % 101 for number in range(100)]
    writer = FakeEngine(("full", "window"), tier)
    table = writer.blocks(0, 100)
    writer.add("before", tokens[:64], skip_save=True)
    writer.compute("before", tokens, 0, 64, table)
    writer.add("a", tokens)
    assert writer.match("a", 64) == 0
    table[1][:2] = [0, 0]  # a window of 24 tokens has left them
    writer.compute("a", tokens, 64, 100, table)
    assert not writer.scheduler.counts["failed_saves"]
    assert writer.store.lookup(writer.store.prompt(tokens, HERE)).position == 96
    assert writer.store.lookup(writer.store.prompt(tokens[:65], HERE)).position == 64


def test_a_load_that_falls_short_is_not_promised_again(tier: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*range(100)]
    writer = FakeEngine(("full", "window"), tier)
    writer.add("a", tokens)
    writer.compute("a", tokens, 0, 100, writer.blocks(0, 100))
    reader = FakeEngine(("full", "window"), tier)
    reader.add("b", tokens)
    assert reader.match("b") == 96
    lost = reader.store.prompt(tokens, HERE).keys(reader.store.schema.ids)[9 * len(reader.store.schema.shards)]
    real = TierStack.fetch

    def without(self: TierStack, wants: Any, budget: Any) -> Any:
        """The full group's tenth chunk is there for all who look, and cannot be read."""
        return ((number, blob) for number, blob in real(self, wants, budget) if wants[number].key != lost)

    monkeypatch.setattr(TierStack, "fetch", without)
    assert reader.load("b", 96, 0, reader.blocks(0, 96)) == {"b"}
    assert reader.match("b") == 64  # 72 tokens can be read, but a window's blocks are of 16
    assert not reader.load("b", 64, 0, reader.blocks(0, 64))


def test_states_are_saved_only_where_all_of_them_are_offered(tier: DictTier) -> None:
    tokens = [*range(100)]
    engine = FakeEngine(("full", "state", "state.2"), tier)
    engine.add("a", tokens)
    table = engine.blocks(0, 100)
    offers = {"a": [(2, table[2][1], 32), (2, table[2][3], 64), (3, table[3][3], 64), (3, 0, 96), (2, 9, 96)]}
    jobs = engine.scheduler.step([Scheduled("a", 0, 100)], lambda _: table, offers)
    assert [job.points for job in jobs.saves] == [(64,)]
    engine.run(jobs)


def test_a_save_that_ends_while_it_is_asked_about_frees_its_blocks_first(tier: DictTier) -> None:
    class Ending:
        """Ends between the questions whether it has gathered and whether it is done."""

        error, failed, asked = None, (), 0

        @property
        def is_gathered(self) -> bool:
            self.asked += 1
            return self.asked > 1

        @property
        def is_done(self) -> bool:
            return self.asked > 0

    worker = FakeEngine(("full",), tier).worker
    worker._saves, worker._gathering = {7: Ending()}, {7}  # type: ignore[dict-item]
    reports = [worker.take_report() for _ in range(3)]
    assert [(report.gathered, report.ended) for report in reports] == [({}, {}), ({7: 1}, {7: 1}), ({}, {})]


def test_a_save_that_fails_is_done_again_with_the_next(tier: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*range(100)]
    writer = FakeEngine(("full",), tier)
    writer.add("a", tokens)
    table = writer.blocks(0, 100)
    with monkeypatch.context() as broken:
        broken.setattr(DictTier, "put", lambda self, keys, blobs: [False] * len(keys))
        writer.compute("a", tokens, 0, 48, table)
    assert writer.scheduler.counts["failed_saves"] == 1
    writer.compute("a", tokens, 48, 100, table)
    assert FakeEngine(("full",), tier).store.lookup(writer.store.prompt(tokens, HERE)).position == 96


def test_a_lookup_that_fails_is_a_miss(tier: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise StoreError("gone")

    engine = FakeEngine(("full",), tier)
    monkeypatch.setattr(Store, "_lookup", broken)
    engine.add("a", [*range(100)])
    assert engine.match("a") == 0


def test_requests_may_say_that_they_are_neither_saved_nor_loaded(tier: DictTier) -> None:
    tokens = [*range(100)]
    engine = FakeEngine(("full",), tier)
    engine.add("a", tokens, skip_save=True)
    engine.compute("a", tokens, 0, 100, engine.blocks(0, 100))
    assert engine.store.lookup(engine.store.prompt(tokens, HERE)).position == 0
    engine.add("b", tokens)
    engine.compute("b", tokens, 0, 100, engine.blocks(0, 100))
    engine.add("c", tokens, skip_load=True)
    assert engine.match("c") == 0
    engine.add("d", tokens)
    assert engine.match("d") == 96


def test_generated_tokens_are_saved_only_where_that_is_wanted(tier: DictTier) -> None:
    tokens = [*range(40)]
    for wanted, expected in ((False, 40), (True, 64)):
        engine, grown = FakeEngine(("full",), tier, save_generated=wanted), [*tokens]
        engine.add("a", grown)
        table = engine.blocks(0, 70)
        engine.compute("a", grown, 0, 40, table)
        grown += range(40, 70)
        engine.compute("a", grown, 40, 70, table)
        assert engine.store.lookup(engine.store.prompt([*range(80)], HERE)).position == expected


def test_a_request_that_ends_early_leaves_nothing_behind(tier: DictTier) -> None:
    engine = FakeEngine(("full",), tier)
    engine.add("a", [*range(100)])
    engine.scheduler.finished("a")
    assert engine.match("a") == 0
    engine.scheduler.finished("a")
    assert not engine.scheduler.saves.has_pins


def test_reports_of_workers_add_up() -> None:
    one = WorkerReport({1: 1}, {1: 1}, {7}, {"a": 64}, {"b": {"full": 0.5, "window": 0.1}})
    other = WorkerReport({1: 1, 2: 1}, {}, {8}, {"a": 32}, {"b": {"full": 0.2, "window": 0.3}})
    expected = {"b": {"full": 0.5, "window": 0.3}}
    assert one.add(other) == WorkerReport({1: 2, 2: 1}, {1: 1}, {7, 8}, {"a": 32}, expected)


def test_a_hit_is_computed_where_that_is_faster_but_tried_now_and_then() -> None:
    speeds, far, near = Speeds(), {"full": GroupLoad("disk", 1000)}, {"full": GroupLoad("memory", 1000)}
    assert speeds.is_load_faster(far, 1000)
    speeds.observe_compute(1000, 1.0)
    speeds.observe_load(far, 1000, {"full": 2.0})
    speeds.observe_load(near, 1000, {"full": 0.1})
    speeds.observe_load(near, 3, {"full": 9.0})  # too few tokens to say anything
    assert speeds.is_load_faster(near, 1000)
    assert sum(speeds.is_load_faster(far, 1000) for _ in range(2 * TRY_EVERY)) == 2


def test_a_state_from_a_slow_tier_is_worth_loading_for_a_long_prompt_only() -> None:
    """Its size does not grow with the prompt: by tokens alone a short load's speed would be a long one's."""
    speeds = Speeds()
    speeds.observe_compute(1000, 1.0)

    def sizes(num_tokens: int) -> dict[str, GroupLoad]:
        return {"full": GroupLoad("memory", 10 * num_tokens), "state": GroupLoad("disk", 50_000)}

    speeds.observe_load(sizes(100), 100, {"full": 0.001, "state": 0.5})
    assert not speeds.is_load_faster(sizes(100), 100)
    assert speeds.is_load_faster(sizes(1000), 1000)
    assert speeds.load_seconds(sizes(1000)) == pytest.approx(0.51)


def test_loads_are_timed_group_by_group(tier: DictTier) -> None:
    tokens = [*range(100)]
    engine = FakeEngine(("full", "window", "state"), tier)
    engine.add("a", tokens)
    engine.compute("a", tokens, 0, 100, engine.blocks(0, 100))
    engine.scheduler.finished("a")
    engine.add("b", tokens)
    found = engine.match("b")
    engine.load("b", found, 0, engine.blocks(0, 100))
    assert {*engine.scheduler.speeds.loads} == {("dict", "full"), ("dict", "window"), ("dict", "state")}
    assert engine.scheduler.seconds["load_seconds"] > 0


def test_taken_counts_are_those_since_the_last_time(tier: DictTier) -> None:
    engine = FakeEngine(("full",), tier)
    engine.add("a", [*range(100)])
    engine.match("a")
    assert engine.scheduler.take_counts()["lookups"] == 1
    assert engine.scheduler.take_counts() == {}

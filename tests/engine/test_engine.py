"""The engine against transformers alone: many requests at random in tiny memory, every answer equal token for token."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.attention import StepSize
from kvweave.engine import Engine, EngineRequest, Sampling
from kvweave.errors import BadCall, BadOption, BadTokens, BadType, NeverFits, OperationTimeout, QueueFull
from kvweave.integrations.transformers import paged_memory, step_graphs
from kvweave.prefix import Retention
from kvweave.sim import TraceWriter, read_trace
from kvweave.sim.replay import replay
from tests.integrations.models import model_of, plain, prompt
from tests.integrations.test_families import memory

MOST, NEW = 72, 8
FAMILIES = (
    "llama", "gpt2", "bloom", "falcon", "qwen3", "mixtral", "deepseek_v3", "mistral", "gemma2", "gemma3_text",
    "gemma3n_text", "gpt_oss", "llama4_text", "mimo_v2_flash", "deepseek_v32", "minimax_m3_vl_text", "deepseek_v4",
    "mamba", "mamba2", "qwen3_next", "kimi_linear", "minimax", "lfm2", "falcon_h1", "jamba", "phi3",
)  # fmt: skip
QUICK = ("llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2", "bloom")


@lru_cache(maxsize=1)
def answers(name: str) -> list[tuple[list[int], list[int]]]:
    """Prompts that share prefixes, and what transformers alone makes of each."""
    rng, model = random.Random(name), model_of(name)
    shared = prompt(40, seed=99)[0].tolist()
    found = []
    for seed in range(10):
        own = prompt(rng.randint(1, 30), seed=seed)[0].tolist()
        ids = [*shared[: rng.choice([0, 20, 33, 40])], *own][: MOST - NEW]
        answer = plain(model, torch.tensor([ids]), num_tokens=NEW, eos_token_id=None).sequences[0, len(ids) :]
        found.append((ids, answer.tolist()))
    return found


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def engine_of(name: str, times: float = 3, **options: Any) -> Engine:
    room = memory(model_of(name), 16, MOST)[0]
    return Engine(model_of(name), int(times * room), rows=32, max_tokens=512, **{"budget": 48, **options})


def load(name: str, engine: Engine, count: int, seed: int) -> None:
    """Requests that come at random, some of them cancelled, each checked against its oracle."""
    rng, known = random.Random(seed), answers(name)
    requests: list[tuple[EngineRequest, list[int]]] = []
    for _ in range(count):
        ids, answer = rng.choice(known)
        new = rng.randint(1, NEW)
        stops = rng.sample(answer, 1) if rng.random() < 0.3 else []
        sampling = Sampling(new, stop_tokens=tuple(stops))
        end = min([new, *(answer.index(stop) + 1 for stop in stops)])
        requests.append((engine.submit(ids, sampling, priority=rng.randint(0, 2)), answer[:end]))
        if rng.random() < 0.1:
            rng.choice(requests)[0].cancel()
        if rng.random() < 0.3:
            time.sleep(rng.random() / 50)
    for request, answer in requests:
        result = request.result(timeout_s=120)
        assert list(result.tokens) == answer[: len(result.tokens)]
        assert result.finish_reason == "cancelled" or len(result.tokens) == len(answer)


def check_books(engine: Engine) -> None:
    with engine.weave.memory.core_lock:
        stats = engine.weave.core.stats()
        assert stats.sequences == 0
        assert all(group.held == 0 for group in stats.groups)
        engine.weave.core.reset()
        assert all(group.cached == 0 for group in engine.weave.core.stats().groups)


@pytest.mark.parametrize("name", QUICK)
def test_many_requests_in_tiny_memory_get_the_answers_of_transformers_alone(name: str) -> None:
    with engine_of(name) as engine:
        load(name, engine, 64, seed=0)
        stats = engine.stats()
        assert stats.finished == 64
        assert stats.cached_tokens > 0 or name == "mamba2"  # which finds states only, where memory for some is left
        check_books(engine)


STEP_SIZES = {
    "chunks apart": ((16,), step_graphs.DECODES),
    "chunks beside decodes": ((16, 64), step_graphs.DECODES),
    "few decodes": ((16, 64), (1, 2)),
}
ROWS, STATES = ("llama", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3"), ("qwen3_next", "lfm2", "falcon_h1")
GRAPHS = [
    *[(name, sizes) for name in ROWS for sizes in STEP_SIZES],
    *[(name, sizes) for name in STATES for sizes in ("chunks beside decodes", "few decodes")],  # no graphs of chunks
]


@pytest.mark.parametrize(("name", "step_sizes"), GRAPHS)
def test_steps_at_fixed_addresses_that_run_ahead_give_the_same_answers(
    name: str, step_sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk_sizes, decode_sizes = STEP_SIZES[step_sizes]
    monkeypatch.setattr(step_graphs, "CHUNKS", chunk_sizes)
    monkeypatch.setattr(step_graphs, "DECODES", decode_sizes)
    for times in (1.5, 3):
        with engine_of(name, times, graphs=True) as engine:
            sizes = note_sizes(engine, monkeypatch)
            load(name, engine, 64, seed=1)
            assert engine.stats().finished == 64
            check_books(engine)
            assert any(size.is_decode for size in sizes)
            if len(decode_sizes) == 2:
                continue  # whether just two ever decode at once is chance
            assert any(size.is_decode and size.rows > 1 for size in sizes)
            if not engine.weave.served.has_states:
                assert any(not size.is_decode for size in sizes), "chunks of prompts"


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "lfm2", "falcon_h1", "mamba2"])
def test_a_step_behind_a_stop_token_is_dropped_and_not_left_under_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, answer = answers(name)[0]
    with engine_of(name, graphs=True) as engine:
        sizes = note_sizes(engine, monkeypatch)
        result = engine.submit(ids, Sampling(NEW, stop_tokens=(answer[2],))).result(timeout_s=60)
        assert list(result.tokens) == answer[: answer.index(answer[2]) + 1]
        assert sum(size.is_decode for size in sizes) == len(result.tokens), "one was under way when it was seen"
        wait_until_settled(engine)
        check_books(engine)


@pytest.mark.parametrize("every", [16, 1024])
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "mamba2"])
def test_states_left_by_answers_that_ended_one_step_late_are_those_of_their_tokens(name: str, every: int) -> None:
    """Answers that end around the place where a state is kept, or could be: the step behind them has advanced it. The
    penalty keeps tokens from coming twice."""
    ids, more, model = prompt(26)[0].tolist(), prompt(9, seed=1)[0].tolist(), model_of(name)
    options: dict[str, Any] = {"num_tokens": 9, "eos_token_id": None, "repetition_penalty": 9.0}
    whole = plain(model, torch.tensor([ids]), **options).sequences[0].tolist()
    with engine_of(name, times=8, graphs=True, retention=Retention(decode_every=every)) as engine:
        for end in (32, 33, 34):
            stops = Sampling(9, stop_tokens=(whole[end - 1],), repetition_penalty=9.0)
            assert list(engine.submit(ids, stops).result(60).tokens) == whole[len(ids) : end]
            wait_until_settled(engine)
            turn = [*whole[:end], *more]
            result = engine.submit(turn, Sampling(4, stop_tokens=())).result(60)
            answer = plain(model, torch.tensor([turn]), num_tokens=4, eos_token_id=None).sequences[0, len(turn) :]
            assert list(result.tokens) == answer.tolist()
            assert result.cached_tokens == (32 if every == 16 and end > 32 else 16)
            wait_until_settled(engine)
            check_books(engine)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_that_cannot_be_captured_is_served_all_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those whose experts are chosen by the host. It is found out by a step that prefills prompts, too: what was to
    be computed together still is."""
    refused_at: list[set[int]] = []
    with engine_of(name, times=8, graphs=True, budget=512) as engine:
        graphs, run = engine.weave.graphs, engine._worker.executor.run
        lengths, are_submitted = set[int](), threading.Event()

        def noted(chunks: Any) -> torch.Tensor | None:
            lengths.clear()
            lengths.update(chunk.num_tokens for chunk in chunks)
            found = run(chunks)
            are_submitted.wait(60)
            return found

        def refused(size: StepSize) -> Any:
            logits = graphs._forward(size)
            if len(lengths) == 1:
                return SimpleNamespace(replay=lambda: logits.copy_(graphs._forward(size))), logits
            refused_at.append({*lengths})
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")

        monkeypatch.setattr(engine._worker.executor, "run", noted)
        monkeypatch.setattr(graphs, "_capture", refused)
        monkeypatch.setattr(graphs, "_captures", True)
        requests = [(engine.submit(ids, Sampling(NEW, stop_tokens=())), answer) for ids, answer in answers(name)]
        are_submitted.set()
        assert [list(request.result(60).tokens) for request, _ in requests] == [answer for _, answer in requests]
        assert len(refused_at) == 1 < len(refused_at[0]), "once, in a step that prefilled, too"
        assert not graphs.is_useful
        assert engine._worker.executor.is_packed, "what it computes still follows from ids, positions and pages"
        graphs.follow(engine.weave.memory.model_changes.version())
        assert not graphs.is_useful, "nor when the model is of another version"


@pytest.mark.parametrize("graphs", [False, True])
def test_long_chunks_of_latents_are_computed_by_themselves_beside_packed_ones(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "deepseek_v3"
    monkeypatch.setattr(paged_memory, "EXPANDED_TOKENS", 12)
    with engine_of(name, graphs=graphs) as engine:
        executor, groups = engine._worker.executor, list[list[int]]()
        run_group = executor._run_group

        def noted(chunks: Any) -> Any:
            groups.append([chunk.num_tokens for chunk in chunks])
            return run_group(chunks)

        monkeypatch.setattr(executor, "_run_group", noted)
        load(name, engine, 64, seed=2)
        check_books(engine)
    long = [group for group in groups if max(group) > 12]
    assert long
    assert all(len(group) == 1 or graphs for group in long)
    assert any(len(group) > 1 for group in groups)


def test_a_long_chunk_of_latents_and_a_decode_are_two_groups_whatever_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_memory, "EXPANDED_TOKENS", 12)
    monkeypatch.setattr(step_graphs, "CHUNKS", ())
    decode = SimpleNamespace(num_tokens=1, start=20, end=21, is_decode=True)
    chunk = SimpleNamespace(num_tokens=20, start=0, end=20, is_decode=False)
    with engine_of("deepseek_v3", graphs=True) as engine:
        assert engine._worker.executor.is_packed
        assert engine.weave.graphs.is_useful
        for chunks in ([decode, chunk], [chunk, decode], [decode, chunk, decode]):
            groups = engine._worker.executor._grouped(chunks)  # type: ignore[arg-type]
            assert [chunks.index(chunk)] in groups
            assert len(groups) == 2


def wait_until_settled(engine: Engine) -> None:
    until = time.monotonic() + 10
    while engine._worker._under_way and time.monotonic() < until:
        time.sleep(0.01)
    assert engine._worker._under_way is None


def note_sizes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepSize]:
    """The sizes of the steps at fixed addresses that an engine computes."""
    sizes: list[StepSize] = []
    replay_step = engine.weave.graphs.replay

    def noted(size: StepSize) -> torch.Tensor:
        sizes.append(size)
        return replay_step(size)

    monkeypatch.setattr(engine.weave.graphs, "replay", noted)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_all_kinds_of_families(name: str, seed: int) -> None:
    with engine_of(name, times=2 + seed, graphs=bool(seed)) as engine:
        load(name, engine, 64, seed)
        check_books(engine)


def test_a_step_is_one_call_for_models_that_attend_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = model_of("llama"), []
    hook = model.register_forward_pre_hook(lambda _m, _a, k: shapes.append(k["input_ids"].shape), with_kwargs=True)
    try:
        with engine_of("llama", times=8) as engine:
            engine.generate([ids for ids, _ in answers("llama")[:2]], Sampling(4))
            shapes.clear()
            before = engine.stats().steps
            engine.generate([ids for ids, _ in answers("llama")], Sampling(4))
            assert len(shapes) == engine.stats().steps - before
            assert max(shape[1] for shape in shapes) > 10
    finally:
        hook.remove()


@pytest.mark.parametrize("graphs", [False, True], ids=["packed", "fixed addresses"])
def test_what_depends_on_the_length_of_a_request_follows_its_own_and_not_that_of_others_in_the_step(
    graphs: bool,
) -> None:
    """Llama 4 scales queries by the length of the cache; here at every 16 tokens, and by much."""
    model = copy.deepcopy(model_of("llama4_text"))
    for layer in model.model.layers:
        layer.self_attn.floor_scale, layer.self_attn.attn_scale = 16, 3.0
    prompts = [prompt(count, seed=count)[0].tolist() for count in (5, 20, 60, 100)]
    with Engine(model, "16MiB", rows=32, max_tokens=512, budget=48, graphs=graphs) as engine:
        results = engine.generate(prompts, Sampling(NEW, stop_tokens=(), logprobs=0))
        assert engine.weave.graphs.is_useful == graphs
    for ids, result in zip(prompts, results, strict=True):
        alone = plain(model, torch.tensor([ids]), num_tokens=NEW, eos_token_id=None)
        logs = [float(logits[0].log_softmax(-1).max()) for logits in alone.logits]
        assert [found.logprob for found in result.logprobs] == pytest.approx(logs, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_chunks_of_as_many_tokens_are_one_call_for_models_with_states(name: str) -> None:
    model, shapes = model_of(name), []
    prompts = [prompt(40, seed=seed)[0].tolist() for seed in range(3)]
    hook = model.register_forward_pre_hook(lambda _m, _a, k: shapes.append(k["input_ids"].shape), with_kwargs=True)
    try:
        with engine_of(name, times=8, budget=128) as engine:
            shapes.clear()
            results = engine.generate(prompts, Sampling(NEW, stop_tokens=()))
            assert {shape[0] for shape in shapes} == {3}
            check_books(engine)
    finally:
        hook.remove()
    for ids, result in zip(prompts, results, strict=True):
        answer = plain(model, torch.tensor([ids]), num_tokens=NEW, eos_token_id=None).sequences[0, len(ids) :]
        assert list(result.tokens) == answer.tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_recorded_run_replayed_by_the_simulator_gives_the_hits_of_the_engine(name: str, tmp_path: Path) -> None:
    cached = []
    with TraceWriter(tmp_path / "t.jsonl") as writer, engine_of(name, times=8, on_finish=writer.write_job) as engine:
        for ids, _ in answers(name) * 2:
            cached.append(engine.submit(ids, Sampling(4, stop_tokens=())).result(timeout_s=60).cached_tokens)
        plan = engine.weave.plan
    trace = read_trace(tmp_path / "t.jsonl")
    assert [request.cached_tokens for request in trace.requests] == cached
    assert any(cached)
    assert replay(trace, plan, step_tokens=48).hits.tolist() == cached


def test_low_priority_is_preempted_and_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of("llama", times=1.3) as engine:
        known = sorted(answers("llama"), key=lambda pair: -len(pair[0]))
        run, steps, are_submitted = engine._worker.executor.run, itertools.count(), threading.Event()

        def held(*given: Any, **named: Any) -> Any:
            """The steps of the prompt, and others once all requests are there."""
            assert next(steps) < -(-len(known[0][0]) // 48) or are_submitted.wait(60)
            return run(*given, **named)

        monkeypatch.setattr(engine._worker.executor, "run", held)
        low = engine.submit(known[0][0], Sampling(NEW, stop_tokens=()))
        next(iter(low))
        high = [engine.submit(ids, Sampling(NEW, stop_tokens=()), priority=1) for ids, _ in known[1:6]]
        are_submitted.set()
        for request, (_, answer) in zip([low, *high], known, strict=False):
            assert list(request.result(60).tokens) == answer
        assert low.result().preemptions > 0
        check_books(engine)


# ---- requests


def test_a_request_can_be_iterated_awaited_and_cancelled() -> None:
    ids, answer = answers("llama")[0]
    with engine_of("llama", times=8) as engine:
        assert list(engine.submit(ids, Sampling(NEW, stop_tokens=()))) == answer

        async def both() -> list[int]:
            request = engine.submit(ids, Sampling(NEW, stop_tokens=()))
            tokens = [token async for token in request]
            assert list((await request).tokens) == tokens
            return tokens

        assert asyncio.run(both()) == answer
        long = engine.submit(ids, Sampling(MOST - len(ids), stop_tokens=()))
        next(iter(long))
        long.cancel()
        assert long.result(30).finish_reason == "cancelled"
        long.cancel()
        check_books(engine)


def test_a_stop_token_ends_an_answer() -> None:
    ids, answer = answers("llama")[0]
    with engine_of("llama", times=8) as engine:
        result = engine.submit(ids, Sampling(NEW, stop_tokens=(answer[2],))).result(30)
        assert (list(result.tokens), result.finish_reason) == (answer[: answer.index(answer[2]) + 1], "stop")


def test_what_can_never_be_served_is_refused_at_once() -> None:
    with engine_of("llama", times=1) as engine:
        with pytest.raises(NeverFits, match="which has"):
            engine.submit([1] * 400, Sampling(2))
        for wrong in ([], [-1], [10**6], ["a"]):
            with pytest.raises(BadTokens):
                engine.submit(wrong)  # type: ignore[arg-type]
        for options in ({"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"logprobs": 99}):
            with pytest.raises(BadOption):
                Sampling(**options)  # type: ignore[arg-type]
        assert engine.stats().requests == 0
    with pytest.raises(BadCall, match="this engine is closed"):
        engine.submit([5], Sampling(2))


def test_a_request_that_cannot_be_ordered_is_refused_and_others_go_on() -> None:
    ids, answer = answers("llama")[0]
    with engine_of("llama", times=4) as engine:
        under_way = engine.submit(ids, Sampling(NEW, stop_tokens=()))
        for place, says in (({"priority": "high"}, "a whole number"), ({"namespace": ["team"]}, "must be hashable")):
            with pytest.raises(BadType, match=says):
                engine.submit(ids, **place)
        assert list(under_way.result(60).tokens) == answer
        assert engine.is_running


def test_an_engine_that_cannot_be_made_gives_back_its_store(tmp_path: Path) -> None:
    for wrong in ({"budget": 0}, {"budget": 1.5}, {"max_running": 0.5}, {"max_waiting": -1}, {"max_waiting": 2.5}):
        with pytest.raises((BadOption, BadType)) as told:
            Engine(model_of("llama"), "8MiB", store=tmp_path / "kv", **wrong)
    Engine(model_of("llama"), "8MiB", store=tmp_path / "kv").close()
    assert told.value.__traceback__, "what it refers to is alive"


def test_too_many_requests_are_refused_and_those_that_wait_are_cancelled_at_the_end() -> None:
    with engine_of("llama", max_running=1, max_waiting=2) as engine, engine.weave.memory.core_lock:
        requests = [engine.submit([5, 6], Sampling(2)) for _ in range(3)]
        with pytest.raises(QueueFull):
            engine.submit([5, 6])
        with pytest.raises(OperationTimeout):
            requests[0].result(0.01)
        closing = threading.Thread(target=engine.close)
        closing.start()
    closing.join()
    assert {request.result(10).finish_reason for request in requests} == {"cancelled"}


def test_a_model_that_fails_fails_its_requests_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, answer = answers("llama")[0]
    with engine_of("llama", times=8) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.model.layers[-1], "forward", None)
            with pytest.raises(TypeError):
                engine.submit(ids, Sampling(2)).result(30)
        assert list(engine.submit(ids, Sampling(NEW, stop_tokens=())).result(30).tokens) == answer
        check_books(engine)


def test_a_commit_that_fails_fails_those_whose_prompts_are_under_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of("llama", budget=16) as engine:
        commit = engine._worker.scheduler.commit

        def fail(_: Any) -> Any:
            monkeypatch.setattr(engine._worker.scheduler, "commit", commit)
            raise RuntimeError("no commit")

        monkeypatch.setattr(engine._worker.scheduler, "commit", fail)
        with pytest.raises(RuntimeError, match="no commit"):
            engine.submit(prompt(40)[0].tolist(), Sampling(2, stop_tokens=())).result(timeout_s=30)
        ids, answer = answers("llama")[0]
        assert list(engine.submit(ids, Sampling(2, stop_tokens=())).result(timeout_s=30).tokens) == answer[:2]
        check_books(engine)


def test_prefixes_are_shared_within_a_namespace_only() -> None:
    ids = prompt(60)[0].tolist()
    with engine_of("llama", times=8) as engine:
        found = [engine.submit(ids, Sampling(1), namespace=name).result(30).cached_tokens for name in "aab"]
    assert found == [0, 48, 0]


def test_the_store_outlives_the_engine(tmp_path: Any) -> None:
    ids = prompt(300)[0].tolist()
    with Engine(model_of("qwen3_next"), "64MiB", rows=8, max_tokens=512, store=tmp_path / "kv") as engine:
        first = engine.submit(ids, Sampling(4)).result(120)
    with Engine(model_of("qwen3_next"), "64MiB", rows=8, max_tokens=512, store=tmp_path / "kv") as engine:
        again = engine.submit(ids, Sampling(4)).result(120)
    assert (first.cached_tokens, again.cached_tokens) == (0, 256)
    assert first.tokens == again.tokens


# ---- nobody waits for ever


def test_a_listener_that_fails_takes_no_answer_away_and_ends_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Any) -> None:
        raise OSError("no space left")

    ids, answer = answers("llama")[0]
    with engine_of("llama", times=8, on_finish=fail) as engine:
        assert list(engine.submit(ids, Sampling(NEW, stop_tokens=())).result(30).tokens) == answer
        cancelled = engine.submit(ids, Sampling(MOST - len(ids), stop_tokens=()))
        next(iter(cancelled))
        cancelled.cancel()
        assert cancelled.result(30).finish_reason == "cancelled"
        assert list(engine.submit(ids, Sampling(NEW, stop_tokens=())).result(30).tokens) == answer
        assert engine.is_running
        check_books(engine)
    assert "no space left" in caplog.text


def test_an_engine_whose_core_is_broken_says_so_to_all_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a page is counted twice")

    engine = engine_of("llama", times=8, max_running=1)
    with engine.weave.memory.core_lock:
        requests = [engine.submit([5, 6, 7], Sampling(2)) for _ in range(3)]
        monkeypatch.setattr(engine._worker.scheduler, "plan", broken)
        monkeypatch.setattr(engine._worker.scheduler, "remove", broken)
    for request in requests:
        with pytest.raises(AssertionError, match="counted twice"):
            request.result(30)
    engine._worker.thread.join(30)
    assert not engine.is_running
    with pytest.raises(BadCall, match="closed"):
        engine.submit([5])
    engine.close()


def test_a_reader_on_an_event_loop_leaves_only_when_nobody_goes_through_the_readers() -> None:
    """Whoever leaves while another thread tells all of them would make it pass over the next one."""
    request, is_telling, counts = EngineRequest((5,), Sampling(3), lambda _: None), threading.Event(), list[int]()
    request.put(7, None)

    async def read() -> None:
        async for _ in request:
            counts.append(len(request._listeners))
            await asyncio.to_thread(is_telling.wait, 30)
            break

    def tell() -> None:
        with request._changed:
            is_telling.set()
            time.sleep(0.2)
            counts.append(len(request._listeners))

    teller = threading.Timer(0.1, tell)
    teller.start()
    asyncio.run(read())
    teller.join()
    assert counts == [1, 1]
    assert not request._listeners


def test_an_event_loop_that_was_closed_does_not_stop_the_engine() -> None:
    request = EngineRequest((5,), Sampling(3), lambda _: None)
    loop = asyncio.new_event_loop()
    tokens = request.__aiter__()
    task = loop.create_task(tokens.__anext__())  # type: ignore[arg-type, var-annotated]
    loop.run_until_complete(asyncio.sleep(0))
    loop.call_soon_threadsafe = lambda *_: (_ for _ in ()).throw(RuntimeError("Event loop is closed"))  # type: ignore[method-assign]
    request.put(7, None)
    request.finish("length", 0, 0, 0)
    assert request.result(1).tokens == (7,)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_many_prompts_wait_their_turn_and_one_that_can_never_be_served_keeps_all_from_running() -> None:
    known = answers("llama") * 3
    with engine_of("llama", times=8, max_running=2, max_waiting=3) as engine:
        results = engine.generate([ids for ids, _ in known], Sampling(2, stop_tokens=()))
        assert [list(result.tokens) for result in results] == [answer[:2] for _, answer in known]
        before = engine.stats().requests
        for wrong, error in (([1] * 9000, NeverFits), ([], BadTokens)):
            with pytest.raises(error):
                engine.generate([*(ids for ids, _ in known[:3]), wrong], Sampling(2))
        with pytest.raises(BadOption, match="2 samplings for 1 prompt"):
            engine.generate([[5]], [Sampling(2)] * 2)
        assert engine.stats().requests == before
        check_books(engine)


def test_prompts_are_arrays_and_tensors_of_one_row_too() -> None:
    ids, answer = answers("llama")[0]
    with engine_of("llama", times=8) as engine:
        for same in (np.array(ids), [*np.array(ids)], torch.tensor(ids), torch.tensor([ids]), tuple(ids)):
            assert list(engine.submit(same, Sampling(NEW, stop_tokens=())).result(30).tokens) == answer
        for wrong in (torch.tensor([ids, ids]), np.zeros((2, 3), int), torch.rand(4), np.ones(2), [True]):
            with pytest.raises(BadTokens):
                engine.submit(wrong)  # type: ignore[arg-type]

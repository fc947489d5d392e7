"""Every kind of model at a daemon that fails: each fault is a shorter hit, or none, and the same answer. The engines
have small blocks, prefill in chunks, and have adapters where vLLM has them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.models import CONFIGS, NEED_EXPERTS, STATES, adapter

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.server import RemoteStore
from tests.integrations.vllm.engines import Answer, Engine, engine, tokens
from tests.server.models import spawned

pytestmark = pytest.mark.slow
TOLERANCE = 2e-3
LENGTH = 900  # an engine's own hit ends with block 28 of 32 tokens, ours with chunk 14 of 64: both at 896
ADAPTERS = {"enable_lora": True, "max_lora_rank": 8}


class Daemon:
    """`kvweave serve`, which can be killed and started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.socket, self._stack = folder / "kv.sock", stack
        self._with_disk = ("--memory", "64MiB", "--disk", f"{folder / 'disk'}:200MiB")
        self.start()

    def start(self, *options: str) -> None:
        self._process = self._stack.enter_context(spawned(self.socket, *(options or self._with_disk)))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with ExitStack() as stack:
        yield Daemon(tmp_path_factory.mktemp("daemon"), stack)


@pytest.fixture
def small_daemon(daemon: Daemon) -> Iterator[Callable[[int], None]]:
    """Puts a daemon of so many bytes, without a disk, in the place of the one that was there."""

    def start(num_bytes: int) -> None:
        daemon.kill()
        daemon.start("--memory", str(num_bytes))

    yield start
    daemon.kill()
    daemon.start()


class Served(Engine):
    """An engine, with what it serves."""

    def __init__(self, made: Engine, name: str, path: Path) -> None:
        super().__init__(made.llm)
        self.name, self.path = name, path

    def answer_of_its_own(self, prompt: list[int]) -> Answer:
        """From its own prefix cache, which is empty afterwards."""
        self.one(prompt)
        own = self.one(prompt)
        self.forget()
        assert own.cached >= 384
        return own

    def loaded_bytes(self, prompt: list[int]) -> int:
        """What a load of a stored prompt reads."""
        connector = self.scheduler.connector
        hit = connector._store.lookup(connector._store.prompt(prompt, connector._namespaces._model))
        connector._store.release(hit)
        return sum(num_bytes for _, num_bytes in connector._store.load_sizes(hit, 0).values())

    def first_hit(self, prompt: list[int]) -> Answer:
        """The answer, as soon as the store gives a hit: connecting is tried again every half a second."""
        for _ in range(20):
            if (answer := self.one(prompt)).cached:
                return answer
            self.forget()
            time.sleep(0.1)
        raise AssertionError("the daemon's return brought no hit")


@pytest.fixture(scope="module", params=CONFIGS)
def served(request: pytest.FixtureRequest, daemon: Daemon, model: Callable[..., Path]) -> Iterator[Served]:
    name: str = request.param
    path = model(name, dense=True)
    options = {"block_size": 32, "max_num_batched_tokens": 512, **({} if name in NEED_EXPERTS else ADAPTERS)}
    with engine(path, {"socket": str(daemon.socket)}, **options) as made:
        yield Served(made, name, path)


def test_a_prompt_prefilled_in_chunks_is_saved_piece_by_piece(served: Served) -> None:
    cold, before = served.one(tokens(LENGTH)), served.counts["saves"]
    own = served.answer_of_its_own(tokens(LENGTH))
    loaded = served.one(tokens(LENGTH))
    assert before >= (1 if served.name in STATES else 2)  # vLLM offers a state at a prompt's end
    assert loaded.cached == own.cached
    assert loaded.logprobs == own.logprobs
    assert loaded.difference(cold) < TOLERANCE


def test_adapters_share_nothing_also_where_one_took_anothers_name(served: Served, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    if served.name in NEED_EXPERTS:
        pytest.skip("vLLM 0.32 on a CPU has no kernels for adapters beside experts: test_adapters_beside_experts.py")
    prompt = tokens(LENGTH, seed=3)
    folders = [adapter(served.path, tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    first, second = (LoRARequest("tuned", number, str(folder)) for number, folder in enumerate(folders, 1))
    served.one(prompt, lora_request=first)
    own = served.one(prompt, lora_request=first)
    served.forget()
    assert not served.one(prompt).cached
    served.forget()
    other = served.one(prompt, lora_request=second)
    assert not other.cached
    served.forget()
    loaded = served.one(prompt, lora_request=first)
    assert loaded.cached == own.cached >= 384
    assert loaded.logprobs == own.logprobs
    assert loaded.difference(other) > TOLERANCE


def test_a_killed_daemon_is_plain_computation_and_its_return_brings_hits_from_disk(
    served: Served, daemon: Daemon
) -> None:
    prompt = tokens(LENGTH, seed=1)
    own = served.answer_of_its_own(prompt)
    assert served.scheduler.connector._store.flush()
    daemon.kill()
    alone = served.one(prompt)
    assert not alone.cached
    assert alone.difference(own) < TOLERANCE
    served.forget()
    daemon.start()
    back = served.first_hit(prompt)
    assert back.cached == own.cached
    assert back.logprobs == own.logprobs


def test_a_damaged_piece_is_a_shorter_hit_and_the_same_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(LENGTH, seed=2)
    own, before = served.answer_of_its_own(prompt), served.counts["short_loads"]
    real, damaged = RemoteStore._fetch, list[int]()

    def without(self: RemoteStore, hit: Any, pieces: Any, budget: Any) -> Any:
        for piece, payload in real(self, hit, pieces, budget):
            if not damaged and piece[1] == hit.prompt.num_chunks - 1:  # as if its checksum were wrong
                damaged.append(piece[1])
            else:
                yield piece, payload

    monkeypatch.setattr(RemoteStore, "_fetch", without)
    loaded = served.one(prompt)
    assert damaged
    assert served.counts["short_loads"] == before + 1
    assert loaded.difference(own) < TOLERANCE
    assert loaded.cached < own.cached


def test_a_request_that_ends_while_it_loads_leaves_no_block_behind(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(LENGTH, seed=4)
    served.one(prompt)
    served.forget()
    pool = served.scheduler.kv_cache_manager.block_pool
    free, real = pool.get_num_free_blocks(), RemoteStore._fetch
    waiting, going_on = threading.Event(), threading.Event()

    def slow(self: RemoteStore, *args: Any) -> Any:
        waiting.set()
        going_on.wait(10)
        return real(self, *args)

    monkeypatch.setattr(RemoteStore, "_fetch", slow)
    made = served.llm.llm_engine
    made.add_request("gone", {"prompt_token_ids": prompt}, served.sampling())
    while not waiting.is_set():
        made.step()
    made.abort_request(["gone"])
    going_on.set()
    for _ in range(200):
        served.core.step()
        if pool.get_num_free_blocks() == free:
            break
        time.sleep(0.01)
    assert pool.get_num_free_blocks() == free
    assert served.one(prompt).cached


def test_an_arena_that_is_full_costs_hits_and_no_answer(served: Served, small_daemon: Callable[[int], None]) -> None:
    prompts = [tokens(LENGTH, seed=30 + number) for number in range(8)]
    right = [served.answer_of_its_own(prompt) for prompt in prompts]
    small_daemon(4 * served.loaded_bytes(prompts[0]))
    served.first_hit(prompts[0])
    served.forget()
    before = Counter(served.counts)
    for _ in range(2):
        answers = [served.one(prompt) for prompt in prompts]
        served.forget()
        assert max(mine.difference(its) for mine, its in zip(answers, right, strict=True)) < TOLERANCE
    added = Counter(served.counts) - before
    assert added["tokens_saved"] >= 8 * 384
    assert 0 < added["tokens_loaded"] < 8 * right[0].cached  # of all prompts, were there room

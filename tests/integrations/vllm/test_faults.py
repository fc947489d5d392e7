"""Faults of a store behind a real engine: each is a shorter hit, or none, and the same answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from kvweave.server import RemoteStore
from tests.integrations.vllm.engines import Engine, engine, tokens
from tests.server.models import spawned

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3


class Daemon:
    """`kvweave serve` with a disk, which can be killed and started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.socket, self._disk, self._stack = folder / "kv.sock", f"{folder / 'disk'}:200MiB", stack
        self.start()

    def start(self) -> None:
        self._process = self._stack.enter_context(spawned(self.socket, "--memory", "64MiB", "--disk", self._disk))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with ExitStack() as stack:
        yield Daemon(tmp_path_factory.mktemp("daemon"), stack)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])
def served(request: pytest.FixtureRequest, daemon: Daemon, model: Callable[..., Path]) -> Iterator[Engine]:
    with engine(model(request.param), {"socket": str(daemon.socket)}) as made:
        yield made


def test_a_hit_comes_from_the_daemons_arena(served: Engine) -> None:
    served.one(tokens(700))
    own = served.one(tokens(700))
    served.forget()
    loaded = served.one(tokens(700))
    assert loaded.cached == own.cached > 0
    assert loaded.logprobs == own.logprobs


def test_a_killed_daemon_is_plain_computation_and_its_return_brings_hits_from_disk(
    served: Engine, daemon: Daemon
) -> None:
    prompt = tokens(700, seed=1)
    served.one(prompt)
    own = served.one(prompt)
    served.forget()
    assert served.scheduler.connector._store.flush()
    daemon.kill()
    alone = served.one(prompt)
    assert not alone.cached
    assert alone.difference(own) < TOLERANCE
    served.forget()
    daemon.start()
    for _ in range(20):  # connecting is tried again after half a second
        back = served.one(prompt)
        if back.cached:
            break
        served.forget()
    assert back.cached == own.cached
    assert back.logprobs == own.logprobs


def test_a_damaged_piece_is_a_shorter_hit_and_the_same_answer(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(700, seed=2)
    right = served.one(prompt)
    served.forget()
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
    assert served.counts["short_loads"] == 1
    assert loaded.difference(right) < TOLERANCE
    assert loaded.cached < 640


def test_a_request_that_ends_while_it_loads_leaves_no_block_behind(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(700, seed=3)
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

"""What one engine wrote, another reads: other blocks, other processes, other degrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.vllm.models import CONFIGS

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import Answer, Engine, engine, tokens
from tests.server.models import spawned

pytestmark = pytest.mark.slow
PROMPT = tokens(650)
READERS = {
    **dict.fromkeys(("gemma3", "llama4", "lfm2"), (32, 64)),
    **dict.fromkeys(("qwen3_next", "granite_hybrid"), (128,)),  # whose states are only where the writer's blocks end
}
"""Blocks of the engines that read; 32 where nothing is said."""
ALONE = {"kvweave.skip_load": True, "kvweave.skip_save": True}


def own_and_loaded(reader: Engine) -> tuple[Answer, Answer]:
    """A hit on what the reader computed by itself, and one that it loads from the store."""
    reader.one(PROMPT, params=ALONE)
    own = reader.one(PROMPT, params=ALONE)
    reader.forget()
    return own, reader.one(PROMPT)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_that_starts_anew_hits_what_one_of_other_blocks_wrote(
    name: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    store = {"store": f"{tmp_path}:100MiB", "chunk_tokens": 32}
    with engine(model(name), store, block_size=128) as writer:
        writer.one(PROMPT)
        writer.settle()
    for block_size in READERS.get(name, (32,)):
        with engine(model(name), store, block_size=block_size) as reader:
            own, loaded = own_and_loaded(reader)
        assert loaded.cached == own.cached == (384 if name == "qwen3_next" else 640)
        assert loaded.logprobs == own.logprobs


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize(("writes", "reads"), [(2, 1), (1, 2)])
def test_what_two_ranks_wrote_one_reads_and_the_other_way(
    name: str, writes: int, reads: int, model: Callable[..., Path], tmp_path: Path
) -> None:
    blocks = (32, 64) if name == "gemma3" else (64, 64)  # states are only where the writer's vLLM offered them
    with spawned(tmp_path / "kv.sock", "--memory", "64MiB"):
        store = {"socket": str(tmp_path / "kv.sock"), "chunk_tokens": 64}
        with engine(model(name), store, tensor_parallel_size=writes, block_size=blocks[0]) as writer:
            writer.one(PROMPT)
            writer.settle()
        with engine(model(name), store, tensor_parallel_size=reads, block_size=blocks[1]) as reader:
            own, loaded = own_and_loaded(reader)
    assert loaded.cached == own.cached == 640
    if name == "gemma3":  # in float32; the rows were computed by another degree, which sums in another order
        assert loaded.difference(own) < 1e-4
    else:  # in bfloat16 the two degrees by themselves may disagree after a few tokens
        assert loaded.first_difference(own) < 0.1


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize(("writes", "reads"), [(2, 1), (1, 2)])
def test_what_two_pipeline_stages_wrote_one_reads_and_the_other_way(
    name: str, writes: int, reads: int, model: Callable[..., Path], tmp_path: Path
) -> None:
    whole = model(name, layers=8)  # vLLM wants layers of all kinds in each stage
    with spawned(tmp_path / "kv.sock", "--memory", "64MiB"):
        store = {"socket": str(tmp_path / "kv.sock"), "chunk_tokens": 64, "stages": 2}
        with engine(whole, store, pipeline_parallel_size=writes, block_size=64) as writer:
            writer.one(PROMPT)
            writer.settle()
        with engine(whole, store, pipeline_parallel_size=reads, block_size=64) as reader:
            own, loaded = own_and_loaded(reader)
    assert loaded.cached == own.cached == 640
    assert loaded.logprobs == own.logprobs  # stages compute as one does

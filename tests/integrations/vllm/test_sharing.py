"""What one engine wrote, another reads: other blocks, other processes, other degrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import engine, tokens
from tests.server.models import spawned

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["gemma3", "llama4", "lfm2"])
def test_blocks_of_128_are_read_as_blocks_of_32_and_64_after_a_restart(
    name: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    store, prompt = {"store": f"{tmp_path}:100MiB", "chunk_tokens": 32}, tokens(700)
    with engine(model(name), store, block_size=128) as writer:
        written = writer.one(prompt)
        writer.settle()
    for block_size in (32, 64):
        with engine(model(name), store, block_size=block_size) as reader:
            loaded = reader.one(prompt)
            own = reader.one(prompt)
            assert loaded.cached == 640
            assert own.cached in (640, 672)
            assert loaded.tokens == written.tokens
            if own.cached == loaded.cached:
                assert loaded.logprobs == own.logprobs
            assert loaded.difference(written) < 1e-3


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize(("writes", "reads"), [(2, 1), (1, 2)])
def test_what_two_ranks_wrote_one_reads_and_the_other_way(
    name: str, writes: int, reads: int, model: Callable[..., Path], tmp_path: Path
) -> None:
    prompt = tokens(700)
    blocks = (32, 64) if name == "gemma3" else (64, 64)  # states are only where the writer's vLLM offered them
    with spawned(tmp_path / "kv.sock", "--memory", "64MiB"):
        store = {"socket": str(tmp_path / "kv.sock"), "chunk_tokens": 64}
        with engine(model(name), store, tensor_parallel_size=writes, block_size=blocks[0]) as writer:
            written = writer.one(prompt)
            writer.settle()
        with engine(model(name), store, tensor_parallel_size=reads, block_size=blocks[1]) as reader:
            loaded = reader.one(prompt)
            own = reader.one(prompt)
    assert loaded.cached == own.cached > 0
    assert loaded.logprobs == own.logprobs
    assert loaded.difference(written) < 1e-2  # what the degrees differ by themselves

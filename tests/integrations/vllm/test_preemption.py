"""Engines with little room: prefills in chunks, and requests that are preempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-all has it in an environment of its own")
from tests.integrations.vllm.engines import Engine, engine, tokens

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3


CROWDS = {"gemma3": (130, 100, 200), "granite_hybrid": (30, 240, 60), "llama": (44, 300, 100)}
"""Blocks of the engine, and the lengths of prompts and answers of which it cannot hold eight to their ends."""


@pytest.fixture(scope="module", params=CROWDS)
def crowded(
    request: pytest.FixtureRequest, model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine]]:
    """Prefills in chunks of 512 tokens, and few blocks."""
    options = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": CROWDS[request.param][0], "block_size": 32}
    store = {"store": f"{tmp_path_factory.mktemp('kv')}:100MiB"}
    with engine(model(request.param), store, max_model_len=1024, **options) as made:
        yield request.param, made


def test_a_prompt_prefilled_in_chunks_is_saved_piece_by_piece(crowded: tuple[str, Engine]) -> None:
    _, made = crowded
    prompt = tokens(900)
    cold = made.one(prompt)
    own = made.one(prompt)
    made.forget()
    loaded = made.one(prompt)
    assert made.counts["saves"] >= 1
    assert loaded.cached
    if own.cached == loaded.cached:
        assert loaded.logprobs == own.logprobs
    assert loaded.difference(cold) < TOLERANCE


def test_preempted_requests_go_on_with_the_same_answer(crowded: tuple[str, Engine]) -> None:
    name, made = crowded
    _, length, new_tokens = CROWDS[name]
    prompts = [tokens(length + number, seed=20 + number) for number in range(8)]
    alone = [made.one(prompt, new_tokens=new_tokens) for prompt in prompts]
    made.forget()
    preempted, real = [], made.scheduler._preempt_request

    def counted(request: object, *args: object, **more: object) -> None:
        preempted.append(request)
        real(request, *args, **more)

    made.scheduler._preempt_request = counted
    together = made.ask(*prompts, new_tokens=new_tokens)
    made.scheduler._preempt_request = real
    assert preempted
    assert max(one.difference(other) for one, other in zip(together, alone, strict=True)) < TOLERANCE
    made.settle()

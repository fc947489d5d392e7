"""On a GPU: steps that are replayed as graphs give transformers' answers there.

Run: pytest tests/engine/test_cuda.py
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvweave.engine import Engine, Sampling
from tests.integrations.models import model_of, plain, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEW = 12
CAPTURED = (
    "llama", "mistral", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "falcon_h1", "mixtral", "mamba",
    "mamba2", "jamba", "deepseek_v3", "kimi_linear",
)  # fmt: skip


def on_device(name: str) -> Any:
    return copy.deepcopy(model_of(name)).to("cuda")


def asked(count: int) -> list[list[int]]:
    """Prompts of many lengths, some of which share a beginning."""
    rng, shared = random.Random(1), prompt(200, seed=99)[0].tolist()
    return [
        [*shared[: rng.choice([0, 64, 133, 200])], *prompt(rng.randint(1, 120), seed=seed)[0].tolist()]
        for seed in range(count)
    ]


@pytest.mark.parametrize("compile_layers", [False, True], ids=["eager layers", "compiled layers"])
@pytest.mark.parametrize("name", CAPTURED)
def test_answers_of_replayed_steps_are_those_of_transformers(name: str, compile_layers: bool) -> None:
    model, prompts = on_device(name), asked(24)
    with Engine(model, "256MiB", budget=256, compile_layers=compile_layers) as engine:
        assert engine.weave.graphs.is_useful
        answers = engine.generate(prompts, Sampling(NEW, stop_tokens=()))
        again = engine.generate(prompts[:3], Sampling(NEW, stop_tokens=()))
    differ = []
    for ids, answer in zip(prompts, answers, strict=True):
        wanted = plain(model, torch.tensor([ids], device="cuda"), num_tokens=NEW, eos_token_id=None).sequences
        if list(answer.tokens) != wanted[0, len(ids) :].tolist():
            differ.append(len(ids))
    assert not differ
    assert [one.tokens for one in again] == [one.tokens for one in answers[:3]]


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "mamba2"])
def test_states_left_by_answers_that_ended_one_step_late_are_those_of_their_tokens_on_the_gpu(name: str) -> None:
    """The step behind a stop token has advanced the live state; the next turn goes on from a kept one."""
    model, ids = on_device(name), prompt(26)[0].tolist()
    more, options = prompt(9, seed=1)[0].tolist(), {"eos_token_id": None, "repetition_penalty": 9.0}
    whole = answer_of(model, ids, 9, **options)
    with Engine(model, "256MiB", compile_layers=False) as engine:
        assert engine._worker.executor.runs_ahead
        for end in range(1, 9):
            stops = Sampling(9, stop_tokens=(whole[end - 1],), repetition_penalty=9.0)
            assert list(engine.submit(ids, stops).result(60).tokens) == whole[:end]
            turn = [*ids, *whole[:end], *more]
            result = engine.submit(turn, Sampling(4, stop_tokens=())).result(60)
            assert list(result.tokens) == answer_of(model, turn, 4, eos_token_id=None)
            assert result.cached_tokens >= 16


def answer_of(model: Any, ids: list[int], count: int, **options: Any) -> list[int]:
    """What transformers alone generates."""
    found = plain(model, torch.tensor([ids], device="cuda"), num_tokens=count, **options).sequences[0, len(ids) :]
    tokens: list[int] = found.tolist()
    return tokens

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
CAPTURED = ("llama", "mistral", "gemma3_text", "gpt_oss", "qwen3_next", "lfm2", "falcon_h1", "mixtral")


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

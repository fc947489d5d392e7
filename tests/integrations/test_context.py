"""`context=`: what the plan promises is served, on the geometries of large models made thin; equal to transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kvweave.errors import NeverFits
from kvweave.integrations.transformers import KVWeave
from tests.integrations.models import difference, greedy, model_of, plain, prompt

THIN: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 1}
NEW_TOKENS = 8


def gemma_3_27b() -> Any:
    """Half its layers: 26 with its window to 5 without."""
    return Gemma3ForCausalLM(Gemma3TextConfig(**THIN, num_hidden_layers=31, sliding_window=1024))


def gpt_oss() -> Any:
    return GptOssForCausalLM(GptOssConfig(**THIN, **EXPERTS, num_hidden_layers=4, num_local_experts=2))


def qwen3_next() -> Any:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 16, "num_experts": 2}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 16}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**THIN, **EXPERTS, **sizes, num_hidden_layers=4))


def deepseek_v4() -> Any:
    return model_of("deepseek_v4")


def smallest(model: Any, context: int) -> int:
    with pytest.raises(NeverFits) as told:
        KVWeave(model, 1, context=context)
    return told.value.smallest_bytes


@pytest.mark.parametrize("length", [300, 1100, pytest.param(2600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("build", [gemma_3_27b, gpt_oss, qwen3_next, deepseek_v4])
def test_a_prompt_of_the_context_less_its_answer_is_served_alone(build: Callable[[], Any], length: int) -> None:
    torch.manual_seed(0)
    model = build().eval()
    with KVWeave(model, smallest(model, length), context=length) as weave:
        for seed in (0, 1, 0):
            ids = prompt(length - NEW_TOKENS, seed)
            ours = weave.generate(ids, **greedy(NEW_TOKENS))
            assert difference(ours, plain(model, ids, **greedy(NEW_TOKENS))) < 1e-4

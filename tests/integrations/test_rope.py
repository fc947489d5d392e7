"""Rotary embeddings whose frequencies depend on the length of the prompt: short and long prompts share nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from kvweave.integrations.transformers import KVWeave
from kvweave.store import DictTier
from tests.integrations.models import difference, greedy, plain, prompt
from tests.integrations.stores import started

BORDER = 64
CLOSE = 2e-5
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": BORDER,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def made(name: str) -> Any:
    torch.manual_seed(0)
    if name == "phi3":
        config = Phi3Config(**SMALL, max_position_embeddings=512, rope_parameters=LONGROPE, sliding_window=None)
        config.original_max_position_embeddings = BORDER
        model: Any = Phi3ForCausalLM(config)
    elif name == "dynamic":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=BORDER, rope_parameters=DYNAMIC))
    elif name == "longrope":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=512, rope_parameters=LONGROPE))
    else:
        ropes = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        config = Gemma3TextConfig(
            **{**SMALL, "num_hidden_layers": 6}, head_dim=16, sliding_window=24, max_position_embeddings=512,
            rope_parameters=ropes,
        )  # fmt: skip
        model = Gemma3ForCausalLM(config)
    return model.float().eval()


def fresh(model: Any) -> None:
    """A short call lets transformers' dynamic embedding forget the longest prompt that it has seen."""
    with torch.no_grad():
        model(prompt(4))


def check(weave: KVWeave, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> int:
    """Generate, compare with transformers, and return how many tokens were reused."""
    fresh(weave.model)
    theirs = plain(weave.model, ids, mask, **options)
    assert difference(weave.generate(ids, attention_mask=mask, **greedy(**options)), theirs) < CLOSE
    return weave.records[-1].reused_tokens


NAMES = ("longrope", "phi3", "dynamic", "windows")
parametrize = pytest.mark.parametrize("name", NAMES)


@parametrize
def test_a_cold_prompt_beyond_the_border_is_that_of_transformers_however_it_is_cut(name: str) -> None:
    for prefill_tokens in (4096, 48, 7):
        with KVWeave(made(name), "16MiB", prefill_tokens=prefill_tokens) as weave:
            for length in (BORDER - 1, BORDER, BORDER + 1, BORDER + 2, 2 * BORDER + 20):
                check(weave, prompt(length, seed=length))


@parametrize
def test_prompts_on_both_sides_of_the_border_share_nothing(name: str) -> None:
    long = prompt(2 * BORDER + 20)
    with KVWeave(made(name), "16MiB") as weave:
        assert check(weave, long) == 0
        assert check(weave, long[:, : BORDER - 4]) == 0, (
            "what was computed for a long prompt is not that of a short one"
        )
        assert check(weave, long) >= BORDER, "the same prompt is found again"
        assert check(weave, long[:, : BORDER - 3]) >= 32
    with KVWeave(made(name), "16MiB") as weave:
        check(weave, long[:, : BORDER - 4])
        assert check(weave, long) == 0


def test_long_prompts_of_several_lengths_share_where_the_frequencies_are_the_same() -> None:
    long = prompt(2 * BORDER + 20)
    for name, reused in (("longrope", 112), ("dynamic", 0)):
        with KVWeave(made(name), "16MiB") as weave:
            check(weave, long)
            assert check(weave, long[:, :-24]) == reused


@parametrize
def test_answers_that_cross_the_border_are_right_and_leave_nothing_wrong(name: str) -> None:
    ids = prompt(BORDER - 5)
    with KVWeave(made(name), "16MiB") as weave:
        for _ in range(2):
            check(weave, ids, num_tokens=20)
        said = plain(weave.model, ids, num_tokens=20).sequences
        for length in range(BORDER - 3, said.shape[1] + 1, 3):
            check(weave, said[:, :length])


@parametrize
def test_a_short_row_beside_a_long_one_is_computed_as_transformers_does(name: str) -> None:
    """One forward has one set of frequencies: that of its longest row. What the short row left is for such batches."""
    long, short = prompt(BORDER + 30), prompt(30, seed=3)
    ids = torch.cat([long, torch.nn.functional.pad(short, (BORDER, 0))])
    mask = (ids != 0).long()
    with KVWeave(made(name), "16MiB") as weave:
        for _ in range(2):
            check(weave, ids, mask, num_tokens=20)
        answer = plain(weave.model, ids, mask, num_tokens=20).sequences
        check(weave, short)
        check(weave, torch.cat([answer[1:, BORDER:], prompt(9, seed=4)], dim=1))


@parametrize
def test_a_short_row_goes_on_when_its_neighbour_crosses_the_border(name: str) -> None:
    near, short = prompt(BORDER - 6), prompt(20, seed=3)
    ids = torch.cat([near, torch.nn.functional.pad(short, (near.shape[1] - 20, 0))])
    mask = (ids != 0).long()
    with KVWeave(made(name), "16MiB", block_tokens=4) as weave:
        check(weave, ids, mask, num_tokens=24)
        answer = plain(weave.model, ids, mask, num_tokens=24).sequences[1:, near.shape[1] - 20 :]
        for length in range(24, answer.shape[1] + 1, 2):
            check(weave, answer[:, :length])


@parametrize
def test_a_store_keeps_short_and_long_prompts_apart(name: str) -> None:
    """The store's chunks are of 64 tokens here, so that a prompt of the border's length has one."""
    model, tier = made(name), DictTier()
    long = prompt(5 * BORDER + 3)
    for ids in (long, long[:, :BORDER], long):
        with started(model, tier, "16MiB") as weave:
            check(weave, ids)


@parametrize
def test_drafts_near_the_border_are_left_to_transformers(name: str) -> None:
    """It computes the prompt and the drafts in one forward, with the frequencies of both together."""
    with KVWeave(made(name), "16MiB") as weave:
        for length in range(BORDER - 4, BORDER + 12):
            ids = prompt(12).repeat(1, 10)[:, :length]
            fresh(weave.model)
            theirs = plain(weave.model, ids, num_tokens=5, prompt_lookup_num_tokens=3)
            fresh(weave.model)
            ours = weave.generate(ids, **greedy(5, prompt_lookup_num_tokens=3))
            assert difference(ours, theirs) < CLOSE
            check(weave, ids)

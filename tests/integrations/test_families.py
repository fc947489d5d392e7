"""The oracle nobody here wrote: for every causal-LM family of transformers, generation on pages is transformers' own.

Each family is built tiny with random weights. Cold, warm after the same prompt, warm after one that leaves it, under
pressure, and in blocks of 1, 16 and 64 tokens: every token is equal, every logit close, and prefixes were reused.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch

from kvweave import Cache
from kvweave.errors import CannotServe, NeverFits
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.support import examine
from kvweave.integrations.transformers.weave import plan_for
from kvweave.prefix import Retention
from tests.integrations.models import NEW_TOKENS, difference, greedy, model_of, plain, prompt
from tests.oracle import tiny

CLOSE = 2e-5
"""The largest difference of a logit, absolute; they are of the order of 1."""

FAMILIES = tuple(name for name in (*tiny.FAMILIES, *tiny.MORE) if name not in tiny.EXCLUDED)

REFUSED = {
    **{name: reason for name, reason in tiny.EXCLUDED.items() if "drafter" not in reason},
    "cpmant": "tokens of its own",
    "moshi": "its cache is a window and its mask is not",
    "musicgen": "no lists of tokens",
    "musicgen_melody": "no lists of tokens",
    "prophetnet": "one token at a time",
    "recurrent_gemma": "keeps a state on the module",
    "unlimited_ocr": "its window begins where the prompt ends",
}
"""Families that are refused, and a word of the reason; those that not even `tiny` can run are refused too, below."""

SERVED = tuple(name for name in FAMILIES if name not in REFUSED)
IN_ALL_WAYS = (
    # full attention: rotary, learned and alibi positions, one head for all, two caches a layer, latents
    "llama", "gpt2", "bloom", "mpt", "bart", "bert", "opt", "falcon", "gptj", "gpt_neo", "gpt_neox", "codegen", "phi3",
    "qwen3", "qwen3_moe", "mixtral", "glm4", "olmo2", "deepseek_v2", "deepseek_v3", "longcat_flash", "mllama",
    # windows, chunks, layers that read others'
    "mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "llama4_text", "mimo_v2_flash", "modernbert-decoder",
    # indexed, sparse, compressed
    "deepseek_v32", "hy_v4", "minimax_m3_vl_text", "deepseek_v4",
    # states, alone and beside attention
    "mamba", "mamba2", "granitemoehybrid", "bamba", "zamba2", "nemotron_h", "qwen3_next", "kimi_linear", "minimax",
    "lfm2", "falcon_h1", "zaya",
)  # fmt: skip
"""Families on which everything is run; the others run half of it, and the rest when slow tests are."""


@lru_cache(maxsize=1)
def shared(name: str, length: int) -> tuple[Any, torch.Tensor, torch.Tensor, Any, Any]:
    """A model, a prompt, one that leaves it near its end, and what transformers makes of them."""
    model, one = model_of(name), prompt(length)
    other = torch.cat([one[:, :-6], prompt(6, seed=1)], dim=1)
    return model, one, other, plain(model, one), plain(model, other)


def memory(model: Any, block_tokens: int, context: int) -> tuple[int, int]:
    """The smallest memory for a prompt, and the tokens between positions from which all groups can go on."""
    with pytest.raises(NeverFits) as told:
        plan_for(examine(model), 1, block_tokens, context)
    smallest = told.value.smallest_bytes
    groups = plan_for(examine(model), smallest, block_tokens).groups
    return smallest, math.lcm(*(group.block_tokens for group in groups))


def prompt_length(name: str, block_tokens: int) -> int:
    """Enough for a whole block of every group, and some more."""
    return 12 + memory(model_of(name), block_tokens, 1)[1]


def check_prefixes(name: str, block_tokens: int, length: int) -> None:
    """Cold, then the same, then another: all equal to transformers', the last two with hits."""
    model, one, other, of_one, of_other = shared(name, length)
    room, grid = memory(model, block_tokens, length + NEW_TOKENS)
    options: dict[str, Any] = {"block_tokens": block_tokens, "retention": Retention(every=32)}
    with KVWeave(model, min(20 * room, room + 2**28), rows=8, max_tokens=4096, **options) as weave:
        for ids, expected in ((one, of_one), (one, of_one), (other, of_other)):
            assert difference(weave.generate(ids, **greedy()), expected) < CLOSE
        cold, warm, left = weave.records
        assert cold.reused_tokens == 0
        assert warm.reused_tokens >= (length - 1) // grid * grid
        assert left.reused_tokens >= grid
        assert weave.core.stats().sequences == 0


def check_pressure(name: str, length: int) -> None:
    """Memory for few prompts: others push one out, and it is computed again, the same."""
    model, one, _, of_one, _ = shared(name, length)
    with KVWeave(model, 3 * memory(model, 16, length + NEW_TOKENS)[0], rows=8, max_tokens=4096) as weave:
        assert difference(weave.generate(one, **greedy()), of_one) < CLOSE
        crowd(weave.core, length)
        assert difference(weave.generate(one, **greedy()), of_one) < CLOSE
        assert weave.records[-1].reused_tokens == 0, "it was never evicted: there is no pressure"
        assert weave.core.stats().sequences == 0


def crowd(core: Cache, length: int) -> None:
    """Other prompts come and go, many more of them than fit."""
    was_full = False
    for seed in range(2, 3000):
        sequence = core.open(prompt(length, seed)[0].numpy())
        while sequence.length < length:
            most = min(sequence.stop or length, length) - sequence.length
            while most > 1 and not core.can_extend(sequence, most):
                most = -(-most // 2)
            list(core.extend(sequence, most))
            list(core.commit(sequence))
        core.close(sequence)
        if seed % 150 == 0:
            is_full = not any(pool.free_superpages for pool in core.stats().pools)
            if is_full and was_full:
                return
            was_full = is_full


@pytest.mark.parametrize("name", SERVED)
def test_generation_on_pages_is_that_of_transformers(name: str) -> None:
    if name in IN_ALL_WAYS:
        check_all(name)
    else:
        check_prefixes(name, 16, prompt_length(name, 16))


def check_all(name: str) -> None:
    length = prompt_length(name, 64)
    for block_tokens in (1, 16, 64):
        check_prefixes(name, block_tokens, length)
    check_pressure(name, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERVED if name not in IN_ALL_WAYS])
def test_the_others_in_all_ways_too(name: str) -> None:
    check_all(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tiny.VARIANTS if not name.endswith(":bidirectional")])
def test_variants(name: str) -> None:
    check_all(name)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in tiny.EXCLUDED])
def test_what_cannot_be_served_is_refused_at_once(name: str) -> None:
    with pytest.raises(CannotServe) as told:
        KVWeave(model_of(name), "64MiB")
    assert REFUSED[name] in told.value.reason


@pytest.mark.parametrize("name", ["gemma3_text:bidirectional", "gemma4_text:bidirectional"])
def test_attention_in_both_directions_is_refused(name: str) -> None:
    with pytest.raises(CannotServe, match="bidirectional"):
        KVWeave(model_of(name), "64MiB")


def test_every_family_is_served_or_refused() -> None:
    assert set(IN_ALL_WAYS) <= set(SERVED)
    assert len(IN_ALL_WAYS) >= 45
    assert not set(SERVED) & set(REFUSED)
    assert set(tiny.FAMILIES) <= {*SERVED, *REFUSED, *tiny.EXCLUDED}
    assert len(SERVED) >= 170

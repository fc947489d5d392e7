"""Odd ways to generate: each is served as transformers would, or refused by name; nothing wrong is left behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from kvweave.errors import BadCall, BadTokens
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.request_record import RequestRecords
from tests.integrations.checks import CLOSE, IDS, SIX, check, check_unspoilt
from tests.integrations.models import difference, greedy, model_of, plain, prompt

parametrize = pytest.mark.parametrize("name", SIX)


@pytest.fixture
def weave(name: str) -> Iterator[KVWeave]:
    with KVWeave(model_of(name), "32MiB", rows=16, max_tokens=512) as made:
        yield made
        assert made.core.stats().sequences == 0, "a row was left open"


# ---- without a cache, or with somebody else's


@parametrize
def test_without_a_cache_transformers_computes_and_pages_are_left_alone(name: str, weave: KVWeave) -> None:
    check(weave)
    theirs = weave.model.generate(IDS, **greedy(use_cache=False))
    for options in (greedy(use_cache=False), {"generation_config": GenerationConfig(**greedy(), use_cache=False)}):
        assert difference(weave.generate(IDS, **options), theirs) < CLOSE
        assert weave.records[-1].fallback == "use_cache=False"
    assert weave.stats().fallback == 2
    check_unspoilt(weave)


def test_a_cache_of_ones_own_is_used() -> None:
    with KVWeave(model_of("llama"), "16MiB") as weave:
        check(weave)
        caches = [DynamicCache(config=weave.model.config) for _ in range(2)]
        with torch.no_grad():
            for cache in caches:
                weave.model(IDS[:, :30], past_key_values=cache)
        theirs = weave.model.generate(IDS, past_key_values=caches[0], **greedy())
        assert difference(weave.generate(IDS, past_key_values=caches[1], **greedy()), theirs) == 0
        assert weave.records[-1].fallback == "past_key_values= was given"
        assert caches[1].get_seq_length() == IDS.shape[1] + 2, "the cache that was given is the one that grew"
        check_unspoilt(weave)


# ---- drafts


def test_drafts_of_a_model_with_convolutions_are_left_to_transformers() -> None:
    model = model_of("lfm2")
    ids = prompt(12).repeat(1, 5)
    with KVWeave(model, "16MiB") as weave:
        for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model_of("llama")}):
            theirs = plain(model, ids, num_tokens=8, **options)
            ours = weave.generate(ids, **greedy(8, **options))
            assert torch.equal(ours.sequences, theirs.sequences)
            assert "drafts are taken back" in weave.records[-1].fallback
        check_unspoilt(weave, ids)


def test_records_are_bounded_and_their_sums_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRecords, "KEPT", 3)
    with KVWeave(model_of("llama"), "16MiB") as weave:
        for seed in range(5):
            weave.generate(prompt(20, seed), **greedy())
        assert len(weave.records) == 3
        assert weave.records[-2:] == list(weave.records)[1:]
        assert (weave.stats().requests, weave.stats().prompt_tokens) == (5, 100)


# ---- what transformers takes


@parametrize
def test_masks_of_any_dtype(name: str, weave: KVWeave) -> None:
    ids = torch.cat([torch.nn.functional.pad(prompt(30), (63, 0)), IDS])
    for dtype in (torch.float32, torch.bool, torch.int32):
        mask = (ids != 0).to(dtype)
        theirs = plain(weave.model, ids, mask.long())
        assert difference(weave.generate(ids, attention_mask=mask, **greedy()), theirs) < CLOSE
    with pytest.raises(BadTokens, match="ones where there are tokens"):
        weave.generate(ids, attention_mask=2 * mask, **greedy())


@parametrize
def test_positions_that_are_the_natural_ones(name: str, weave: KVWeave) -> None:
    ids = torch.cat([torch.nn.functional.pad(prompt(30), (63, 0)), IDS])
    mask = (ids != 0).long()
    for padding in (0, 1):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, padding)
        ours = weave.generate(ids, attention_mask=mask, position_ids=positions, **greedy())
        assert difference(ours, plain(weave.model, ids, mask)) < CLOSE
    with pytest.raises(BadTokens, match="position_ids"):
        weave.generate(ids, attention_mask=mask, position_ids=positions + 1, **greedy())
    check_unspoilt(weave)


@parametrize
def test_a_generation_config_by_position_or_by_name(name: str, weave: KVWeave) -> None:
    config, theirs = GenerationConfig(**greedy()), plain(weave.model, IDS)
    before = config.to_dict()
    for _ in range(2):
        assert difference(weave.generate(IDS, config), theirs) < CLOSE
        assert difference(weave.generate(weave.model, IDS, generation_config=config), theirs) < CLOSE
        assert difference(weave.generate(inputs=IDS, generation_config=config), theirs) < CLOSE
    assert config.to_dict() == before, "a config that was given stays as it was"
    assert weave.records[-1].reused_tokens > 0


@parametrize
def test_implementations_of_the_cache_that_change_no_answer(name: str, weave: KVWeave) -> None:
    theirs = plain(weave.model, IDS)
    for which in ("dynamic", "static", "offloaded"):
        for options in (
            greedy(cache_implementation=which),
            greedy(generation_config=GenerationConfig(cache_implementation=which)),
        ):
            assert difference(weave.generate(IDS, **options), theirs) < CLOSE
            assert weave.records[-1].fallback == ""
    own = weave.model.generation_config
    own.cache_implementation, own.prefill_chunk_size = "static", 7
    try:
        check_here = weave.generate(IDS, GenerationConfig(**greedy())), weave.generate(IDS, **greedy())
    finally:
        own.cache_implementation = own.prefill_chunk_size = None
    assert max(difference(ours, theirs) for ours in check_here) < CLOSE
    check_unspoilt(weave)


@parametrize
def test_padding_tokens_in_the_midst_of_a_prompt(name: str, weave: KVWeave) -> None:
    ids = IDS.clone()
    ids[0, 20] = ids[0, 37] = 0
    theirs = weave.model.generate(ids, **greedy(use_cache=True))
    assert difference(weave.generate(ids, **greedy()), theirs) < CLOSE
    assert "in the midst of a prompt" in weave.records[-1].fallback
    for _ in range(2):
        ours = weave.generate(ids, attention_mask=torch.ones_like(ids), **greedy())
        assert difference(ours, plain(weave.model, ids)) < CLOSE
    assert weave.records[-1].reused_tokens > 0
    check_unspoilt(weave)


def test_types_of_tokens_that_are_all_zero() -> None:
    """GPT-2 adds something for type 0: prompts with types and prompts without share nothing."""
    model, zeros = model_of("gpt2"), torch.zeros_like(IDS)
    theirs = plain(model, IDS, token_type_ids=zeros)
    with KVWeave(model, "16MiB") as weave:
        for _ in range(2):
            check(weave)
            assert difference(weave.generate(IDS, token_type_ids=zeros, **greedy()), theirs) < CLOSE
        assert weave.records[-1].reused_tokens > 0
        theirs = plain(model, IDS, token_type_ids=zeros + 1)
        assert difference(weave.generate(IDS, token_type_ids=zeros + 1, **greedy()), theirs) < CLOSE
        assert weave.records[-1].fallback == "token_type_ids= was given"
    with KVWeave(model_of("gemma3_text"), "16MiB") as weave:
        assert difference(weave.generate(IDS, mm_token_type_ids=zeros, **greedy()), plain(weave.model, IDS)) < CLOSE


@parametrize
def test_a_compiled_model_stands_for_the_one_inside(name: str) -> None:
    model = model_of(name)
    compiled: Any = torch.compile(model, backend="eager")
    with KVWeave(compiled, "16MiB") as weave:
        assert weave.model is model
        with weave.past(IDS) as past, torch.no_grad(), pytest.raises(BadCall, match="through compiled code"):
            compiled(IDS[:, -1:], **{weave.served.cache_name: past})
        check_unspoilt(weave)


def test_a_model_that_was_compiled_in_place_generates_as_it_is_written() -> None:
    model = copy.deepcopy(model_of("llama"))
    model.compile(backend="eager")
    with KVWeave(model, "16MiB") as weave:
        check_unspoilt(weave)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("part", ["forward", "inside", "layers"])
def test_parts_that_were_compiled_generate_as_they_are_written(name: str, part: str) -> None:
    model = copy.deepcopy(model_of(name))
    if part == "forward":
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    elif part == "inside":
        model.model = torch.compile(model.model, backend="eager", fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
    theirs = plain(model_of(name), IDS)
    with KVWeave(model, "16MiB") as weave:
        for _ in range(2):
            assert difference(weave.generate(IDS, **greedy()), theirs) < CLOSE
        assert weave.records[-1].reused_tokens > 0


def test_a_loop_of_the_users_own_may_return_anything() -> None:
    def said(model: Any, input_ids: torch.Tensor, **_: Any) -> str:
        return f"{type(model).__name__} heard {input_ids.shape[1]} tokens"

    with KVWeave(model_of("llama"), "16MiB") as weave:
        assert weave.generate(IDS, custom_generate=said) == "LlamaForCausalLM heard 93 tokens"
        assert weave.records[-1].fallback == "custom_generate= was given"


# ---- prompts that are remembered


@parametrize
def test_a_prompt_that_is_remembered_is_found_by_the_first_that_begins_with_it(name: str, weave: KVWeave) -> None:
    system = prompt(64, seed=5)
    weave.remember(system)
    ids = torch.cat([system, prompt(9)], dim=1)
    check(weave, ids)
    assert weave.records[-1].reused_tokens == 64

"""Every way to call, on six kinds of models: equal to transformers, or refused by name; and nothing cached is spoilt.

A way is options, or a few lines. transformers itself is the oracle; where it refuses, we do, or give the plain answer.
After each way random prompts, some of which go on from what it has left, are those of transformers (the poison test).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvweave.errors import KVWeaveError
from kvweave.integrations.transformers import KVWeave
from tests.integrations.models import model_of, prompt

KINDS = ("llama", "gemma3_text", "qwen3_next", "lfm2", "mamba2", "deepseek_v3")
CLOSE = 2e-5
SYSTEM = prompt(80)
"""So long that models with states leave a point in what begins with it."""
IDS = torch.cat([SYSTEM, prompt(5, seed=1)], dim=1)
PADDED = torch.cat([torch.nn.functional.pad(prompt(30, seed=2), (55, 0)), IDS])
MASK = (PADDED != 0).long()


class Slower(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(1, dims=-1) + input_ids.shape[1]


class Enough(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 87)


class Heard(BaseStreamer):  # type: ignore[misc]
    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Way:
    """Options of `generate`, made afresh for each call; `ids` the prompts."""

    options: Callable[[], dict[str, Any]]
    ids: torch.Tensor = field(default_factory=lambda: IDS)
    refused: type[Exception] | None = None
    """What we raise though transformers does not: a named error."""


def way(ids: torch.Tensor = IDS, refused: type[Exception] | None = None, **options: Any) -> Way:
    return Way(lambda: copy.copy(options), ids, refused)


GIVEN = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
NATURAL = (MASK.cumsum(-1) - 1).clamp(min=0)
HOLES = IDS.clone()
HOLES[0, 20] = 0
RIGHT = torch.ones_like(IDS)
RIGHT[0, -2:] = 0

WAYS: dict[str, Way] = {
    "greedy": way(),
    "batch": way(PADDED, attention_mask=MASK),
    "batch, inferred mask": way(PADDED),
    "float mask": way(PADDED, attention_mask=MASK.float()),
    "bool mask": way(PADDED, attention_mask=MASK.bool()),
    "natural positions": way(PADDED, attention_mask=MASK, position_ids=NATURAL),
    "other positions": way(position_ids=torch.arange(85)[None] + 3, refused=KVWeaveError),
    "padding in the midst": way(HOLES),
    "padding in the midst, unmasked": way(HOLES, attention_mask=torch.ones_like(HOLES)),
    "padding on the right": way(attention_mask=RIGHT, refused=KVWeaveError),
    "beams": way(num_beams=3),
    "beams, several answers": way(num_beams=4, num_return_sequences=2, length_penalty=0.5, early_stopping=True),
    "beams, a batch": way(PADDED, attention_mask=MASK, num_beams=2),
    "beam sample": way(num_beams=2, do_sample=True),
    "sample": way(do_sample=True, temperature=2.0, top_k=20, top_p=0.9),
    "several answers": way(do_sample=True, num_return_sequences=3),
    "typical, min_p, epsilon, eta": way(
        do_sample=True, typical_p=0.8, min_p=0.01, epsilon_cutoff=1e-4, eta_cutoff=1e-4
    ),
    "penalties": way(repetition_penalty=1.5, no_repeat_ngram_size=2, encoder_repetition_penalty=1.2),
    "bad words": way(bad_words_ids=[[5], [6, 7]], suppress_tokens=[9], begin_suppress_tokens=[11]),
    "forced start": way(forced_bos_token_id=5),
    "most likely share": way(do_sample=True, top_h=0.4),
    "nothing of the prompt": way(encoder_no_repeat_ngram_size=3, remove_invalid_values=True),
    "forced": way(forced_eos_token_id=2, exponential_decay_length_penalty=(2, 1.1)),
    "bias": way(sequence_bias=[[[5], 3.0], [[8, 9], -3.0]], renormalize_logits=True),
    "watermark": way(watermarking_config={"bias": 2.5, "seeding_scheme": "selfhash"}),
    "guidance": way(guidance_scale=1.5),
    "guidance, negative prompt": way(guidance_scale=1.5, negative_prompt_ids=prompt(9, seed=7)),
    "prompt lookup": way(prompt_lookup_num_tokens=3, max_matching_ngram_size=2),
    "early exit": way(assistant_early_exit=3),
    "assistant": Way(lambda: {"assistant_model": assistant()}),
    "assistant, sampling": Way(lambda: {"assistant_model": assistant(), "do_sample": True}),
    "assistant, its settings": Way(
        lambda: {
            "assistant_model": assistant(),
            "num_assistant_tokens": 2,
            "num_assistant_tokens_schedule": "heuristic",
            "assistant_confidence_threshold": 0.2,
        }
    ),
    "assistant, sampled from both": Way(
        lambda: {"assistant_model": assistant(), "assistant_ensemble_weight": 0.5, "do_sample": True}
    ),
    "drafts by further heads": way(use_mtp=True),
    "drafts of a kind": way(speculation_type="dflash"),
    "for another's drafts": way(is_assistant=True),
    "no cache": way(use_cache=False),
    "dynamic": way(cache_implementation="dynamic"),
    "static": way(cache_implementation="static"),
    "static, of a length": way(cache_implementation="static", max_cache_len=200, cache_config={}),
    "offloaded": way(cache_implementation="offloaded"),
    "quantized": way(cache_implementation="quantized"),
    "prefill in pieces": way(prefill_chunk_size=7),
    "a config": Way(lambda: {"generation_config": GenerationConfig(**GIVEN, num_beams=2)}),
    "a config without a cache": Way(lambda: {"generation_config": GenerationConfig(**GIVEN, use_cache=False)}),
    "a config in pieces": Way(lambda: {"generation_config": GenerationConfig(**GIVEN, prefill_chunk_size=5)}),
    "hidden states": way(output_hidden_states=True, return_dict_in_generate=True),
    "attentions": way(output_attentions=True, return_dict_in_generate=True),
    "scores": way(output_scores=True, output_logits=True, return_dict_in_generate=True),
    "healed tokens": way(token_healing=True),
    "strings without a tokenizer": way(stop_strings=["w5"]),
    "beams in little memory": way(num_beams=2, low_memory=True),
    "stop strings": way(max_time=1000.0, eos_token_id=[2, 3]),
    "length": way(max_length=92, max_new_tokens=None, min_new_tokens=None, min_length=89),
    "a processor": Way(lambda: {"logits_processor": LogitsProcessorList([Slower()])}),
    "a criterion": Way(lambda: {"stopping_criteria": StoppingCriteriaList([Enough()]), "min_new_tokens": None}),
    "a streamer": Way(lambda: {"streamer": Heard()}),
    "allowed tokens": Way(lambda: {"prefix_allowed_tokens_fn": lambda _batch, _ids: [5, 6, 7, 8]}),
    "types": way(token_type_ids=torch.zeros_like(IDS)),
    "image types": way(mm_token_type_ids=torch.zeros_like(IDS)),
    "all logits": way(logits_to_keep=0),
    "compile": way(disable_compile=True),
    "no such option": way(no_such_option=3),
    "one token": way(prompt(1)),
    "no tokens": way(torch.empty(1, 0, dtype=torch.long)),
    "three axes": way(IDS[None]),
}
"""Those that transformers has moved to the hub (contrastive search, DoLa, groups of beams, constraints) load code."""


NO_WAYS = {
    "num_beam_groups diversity_penalty penalty_alpha dola_layers constraints force_words_ids": "code from the hub",
    "assistant_lookbehind target_lookbehind": "an assistant with another tokenizer",
    "bos_token_id decoder_start_token_id": "calls without a prompt",
    "compile_config continuous_batching_config transformers_version": "other loops, or none",
}
"""Fields of a `GenerationConfig` without a way of their own."""


def test_every_field_of_a_generation_config_has_a_way_or_a_reason() -> None:
    used, spared = set(GIVEN), {name for names in NO_WAYS for name in names.split()}
    for each in WAYS.values():
        options = each.options()
        given = options.get("generation_config")
        used |= {*options, *(name for name, value in vars(given).items() if value is not None)} if given else {*options}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert not fields - used - spared
    assert spared <= fields - used


def test_drafters_that_read_hidden_states_are_left_to_transformers() -> None:
    with KVWeave(model_of("llama"), "16MiB") as weave:
        for options in ({"use_mtp": True}, {"speculation_type": "dflash"}):
            assert weave.read_call(IDS, **options).fallback.startswith(next(iter(options)))


def assistant() -> Any:
    return model_of("llama")


@pytest.fixture(scope="module", params=KINDS)
def weave(request: pytest.FixtureRequest) -> Iterator[KVWeave]:
    with KVWeave(model_of(request.param), "64MiB", rows=32, max_tokens=512) as made:
        yield made


def outcome(generate: Callable[..., Any], chosen: Way) -> Any:
    """The answer, or the error."""
    torch.manual_seed(3)
    try:
        answer = generate(chosen.ids, **{**GIVEN, **chosen.options()})
    except Exception as error:
        return error
    return answer


def tensors(value: Any) -> list[torch.Tensor]:
    """All that an answer says, but for the cache."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for name, each in value.items() if "past" not in name for found in tensors(each)]
    return [found for each in value for found in tensors(each)] if isinstance(value, tuple | list) else []


def check_same(ours: Any, theirs: Any) -> None:
    assert len(tensors(ours)) == len(tensors(theirs))
    for one, other in zip(tensors(ours), tensors(theirs), strict=True):
        assert one.shape == other.shape
        if one.is_floating_point():
            both = one.isfinite() & other.isfinite()
            assert torch.equal(one.isfinite(), other.isfinite())
            assert (one[both] - other[both]).abs().max() < 10 * CLOSE
        else:
            assert torch.equal(one, other)


def check_poison(weave: KVWeave, seed: int, count: int) -> None:
    """Random prompts: some are new, some leave what was said, some go on from it."""
    numbers = torch.Generator().manual_seed(seed)
    for number in range(count):
        start = IDS[:, : int(torch.randint(0, IDS.shape[1], (1,), generator=numbers))]
        rest = prompt(int(torch.randint(1, 30, (1,), generator=numbers)), seed=1000 * seed + number)
        ids = torch.cat([start, rest], dim=1)
        options: dict[str, Any] = {**GIVEN, "output_logits": True, "return_dict_in_generate": True}
        theirs = weave.model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options)
        check_same(weave.generate(ids, attention_mask=torch.ones_like(ids), **options), theirs)


def run(weave: KVWeave, name: str, times: int, poison: int) -> None:
    """What earlier ways have left is found by this one; and by itself again, if it is run twice."""
    chosen, number = WAYS[name], list(WAYS).index(name)
    theirs = outcome(weave.model.generate, chosen)
    for _ in range(times):
        ours = outcome(weave.generate, chosen)
        if isinstance(ours, Exception):
            assert chosen.refused or isinstance(theirs, Exception), repr(ours)
            assert isinstance(ours, chosen.refused or KVWeaveError) or type(ours) is type(theirs), repr(ours)
        else:
            check_same(ours, outcome(weave.model.generate, way()) if isinstance(theirs, Exception) else theirs)
    check_poison(weave, number, poison)
    assert weave.core.stats().sequences == 0, "a row was left open"


@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_call_is_that_of_transformers_or_refused_by_name(weave: KVWeave, name: str) -> None:
    run(weave, name, times=1, poison=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_after_each_way_ten_random_prompts_are_those_of_transformers(kind: str) -> None:
    with KVWeave(model_of(kind), "64MiB", rows=32, max_tokens=512) as weave:
        for name in WAYS:
            run(weave, name, times=2, poison=10)

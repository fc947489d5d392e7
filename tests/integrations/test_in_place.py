"""Attention in place: which models attend so, that nothing is gathered, and that the model itself stays as it was."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from kvweave.errors import BadCall
from kvweave.integrations.transformers import KVWeave, paged_memory
from kvweave.integrations.transformers import attention_interface as interface
from kvweave.integrations.transformers.attention_interface import reach_of
from kvweave.integrations.transformers.paged_rows import PagedRows
from kvweave.spec import Chunk, Full, Window
from tests.integrations.checks import CLOSE, IDS, check, check_unspoilt
from tests.integrations.models import difference, greedy, model_of, plain, prompt

LATENTS = ("deepseek_v3", "longcat_flash", "kimi_linear")
"""One a layer, two a layer, and beside states."""
IN_PLACE = (
    "llama", "gemma3_text", "gemma2", "gpt_oss", "llama4_text", "mimo_v2_flash", "qwen3_next", "falcon_h1", *LATENTS,
)  # fmt: skip
"""Full attention, windows, softcaps, sinks, chunks, unequal widths, states beside attention, both in one layer."""
GATHERED = ("bloom", "deepseek_v32", "minimax_m3_vl_text")
"""Attention outside of the interface, and layers that select tokens."""


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_past_is_not_gathered_once_it_is_known_how_layers_attend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        check(weave, num_tokens=8)
        assert weave.attends_in_place
        monkeypatch.setattr(PagedRows, "read", None)
        check(weave, num_tokens=8)
        both = torch.cat([prompt(70), prompt(70, seed=1)])
        mask = torch.ones_like(both)
        mask[1, :9] = 0
        theirs = plain(weave.model, both, mask)
        for _ in range(2):
            assert difference(weave.generate(both, attention_mask=mask, **greedy()), theirs) < CLOSE


@pytest.mark.parametrize("name", GATHERED)
def test_other_models_keep_the_gather(name: str) -> None:
    with KVWeave(model_of(name), "32MiB", rows=8, max_tokens=512) as weave:
        check(weave, num_tokens=6)
        check(weave, num_tokens=6)
        assert not weave.attends_in_place


def expansions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of latents that DeepSeek-V3 expands in each call, from now on; for weaves that are made later."""
    lengths, own = list[int](), DeepseekV3Attention.expand_kv

    def noted(module: Any, latents: torch.Tensor, rotary: torch.Tensor) -> Any:
        lengths.append(latents.shape[2])
        return own(module, latents, rotary)

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", noted)
    return lengths


def test_latents_are_expanded_where_many_tokens_attend_to_them_and_not_in_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths, layers = expansions(monkeypatch), model_of("deepseek_v3").config.num_hidden_layers
    monkeypatch.setattr(paged_memory, "EXPANDED_TOKENS", 40)
    with KVWeave(model_of("deepseek_v3"), "32MiB", rows=8, max_tokens=512) as weave:
        lengths.clear()
        for num_tokens, expanded in ((41, {41}), (70, set()), (140, {140})):
            ours = weave.generate(prompt(num_tokens), **greedy())
            assert {*lengths} == expanded, "the first tokens of a prompt are found, and few or many are left"
            assert len(lengths) == len(expanded) * layers
            lengths.clear()
            assert difference(ours, plain(weave.model, prompt(num_tokens))) < CLOSE
            lengths.clear()


@pytest.mark.parametrize("change", ["adapter", "hook", "forward", "bias"])
def test_a_projection_of_latents_that_is_no_plain_product_is_the_models_own(change: str) -> None:
    model = copy.deepcopy(model_of("deepseek_v3"))
    for layer in model.model.layers:
        change_projection(layer.self_attn, change)
    with KVWeave(model, "32MiB", rows=8, max_tokens=512) as weave:
        check(weave)
        check(weave)
        assert not weave.attends_in_place


@pytest.mark.parametrize("change", ["adapter", "hook", "bias", "weight"])
def test_a_projection_of_latents_that_is_no_plain_product_any_more_is_the_models_own(change: str) -> None:
    model = copy.deepcopy(model_of("deepseek_v3"))
    with KVWeave(model, "32MiB", rows=8, max_tokens=512, graphs=True) as weave:
        check(weave)
        assert weave.attends_in_place
        for layer in model.model.layers:
            change_projection(layer.self_attn, change)
        expected = plain(model, IDS)
        for _ in range(2):
            assert difference(weave.generate(IDS, **greedy()), expected) < CLOSE
        assert not weave.attends_in_place
        assert not weave.graphs.is_useful
        assert not weave.graphs.learn()
        assert difference(expected, plain(model_of("deepseek_v3"), IDS)) > CLOSE, "the change can be seen"


def change_projection(attention: Any, change: str) -> None:
    """To one that doubles what it did, or adds to it."""
    linear = attention.kv_b_proj
    if change == "adapter":
        attention.kv_b_proj = torch.nn.Sequential(linear, torch.nn.Linear(linear.out_features, linear.out_features))
    elif change == "hook":
        linear.register_forward_hook(lambda _module, _inputs, output: output * 2)
    elif change == "forward":
        own = linear.forward
        linear.forward = lambda hidden: own(hidden) * 2
    elif change == "weight":
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone().as_subclass(DoublingWeight))
    else:
        linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))


class DoublingWeight(torch.Tensor):
    """Stands for weights that only a linear layer knows how to multiply with, as quantised ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result.as_subclass(torch.Tensor) * 2 if func is torch.nn.functional.linear else result


def test_latents_of_a_class_derived_from_a_familys_are_attended_to_in_place() -> None:
    model = copy.deepcopy(model_of("deepseek_v3"))
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Derived", (DeepseekV3Attention,), {})
    model.set_attn_implementation("sdpa")
    with KVWeave(model, "32MiB", rows=8, max_tokens=512) as weave:
        check(weave)
        assert weave.attends_in_place


def test_weights_of_a_projection_that_change_are_followed() -> None:
    model = copy.deepcopy(model_of("deepseek_v3"))
    with KVWeave(model, "32MiB", rows=8, max_tokens=512) as weave, torch.no_grad():
        check(weave)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(1.5)
        expected = plain(model, IDS)
        assert difference(weave.generate(IDS, **greedy()), expected) < CLOSE
        assert weave.attends_in_place


def test_a_model_has_its_own_expansion_again_when_the_last_weave_is_closed() -> None:
    own = DeepseekV3Attention.expand_kv
    with KVWeave(model_of("deepseek_v3"), "32MiB"), KVWeave(model_of("deepseek_v3"), "32MiB") as second:
        assert DeepseekV3Attention.expand_kv is not own
        second.close()
        assert DeepseekV3Attention.expand_kv is not own
    assert DeepseekV3Attention.expand_kv is own


def test_another_model_with_latents_is_compiled_as_one_graph_meanwhile() -> None:
    other = copy.deepcopy(model_of("deepseek_v3"))
    with KVWeave(model_of("deepseek_v3"), "32MiB") as weave, torch.no_grad():
        check(weave)
        compiled: Any = torch.compile(other.forward, backend="eager", fullgraph=True)
        assert (compiled(IDS, use_cache=False).logits - other(IDS, use_cache=False).logits).abs().max() < CLOSE
        check_unspoilt(weave)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_implementation_of_a_model_is_its_own_between_forwards(implementation: str) -> None:
    model = model_of("llama")
    model.set_attn_implementation(implementation)
    seen = set()
    hook = model.model.layers[0].register_forward_hook(lambda *_: seen.add(model.config._attn_implementation))
    try:
        with KVWeave(model, "16MiB") as weave:
            check(weave)
            assert seen == {implementation, f"kvweave+{implementation}"}
            assert model.config._attn_implementation == implementation
        assert not interface.SwitchedConfigs._users
    finally:
        hook.remove()
        model.set_attn_implementation("eager")


def test_a_forward_without_our_cache_beside_one_with_it_is_transformers_own() -> None:
    """Another thread calls the model while a paged forward is under way, and finds its name switched."""
    model, expected = model_of("llama"), plain(model_of("llama"), IDS)
    found: list[Any] = []

    def beside(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not found:
            thread = threading.Thread(target=lambda: found.append(plain(model, IDS)))
            thread.start()
            thread.join()

    with KVWeave(model, "16MiB") as weave:
        check(weave)
        hook = model.model.layers[1].register_forward_hook(beside)
        try:
            ours = weave.generate(IDS, **greedy())
        finally:
            hook.remove()
    assert difference(ours, expected) < CLOSE
    assert difference(found[0], expected) == 0


def test_a_failed_forward_leaves_the_implementation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with KVWeave(model, "16MiB") as weave:
        check(weave)
        with monkeypatch.context() as patch:
            patch.setitem(vars(model.model.layers[-1]), "forward", None)  # setattr would leave a method behind
            with pytest.raises(TypeError):
                weave.generate(IDS, **greedy())
        assert model.config._attn_implementation == "eager"
        check_unspoilt(weave)


def test_attention_weights_and_masks_of_the_users_own_are_gathered() -> None:
    model = model_of("llama")
    with KVWeave(model, "16MiB") as weave, torch.no_grad():
        check(weave)
        with weave.past(IDS) as past:
            assert model(IDS[:, -1:], past_key_values=past, output_attentions=True).attentions[0].shape[-1] == 93
        hidden = torch.ones_like(IDS)
        hidden[:, 3:9] = 0
        theirs = DynamicCache(config=model.config)
        model(IDS[:, :79], past_key_values=theirs)
        with weave.past(IDS[:, :80]) as past:
            one, other = (
                model(IDS[:, 79:], past_key_values=cache, attention_mask=hidden).logits for cache in (past, theirs)
            )
        assert (one - other).abs().max() < CLOSE
        check_unspoilt(weave)


def test_attention_that_was_replaced_is_an_error_not_a_wrong_answer() -> None:
    """It is given new rows only, and does not know that the others are in pages."""
    model = copy.deepcopy(model_of("llama"))
    with KVWeave(model, "16MiB") as weave:
        check(weave)
        attention = model.model.layers[1].self_attn
        attention.config = copy.deepcopy(attention.config)
        for ids in (IDS, prompt(5)):
            with pytest.raises(BadCall, match=r"layers \[1\] did not attend to their pages"):
                weave.generate(ids, **greedy())
        assert weave.core.stats().sequences == 0
    with KVWeave(model, "16MiB") as another:
        check_unspoilt(another)


def test_values_that_are_not_those_of_the_cache_are_an_error_not_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that changes its way between forwards is found out."""
    model = model_of("llama")
    with KVWeave(model, "16MiB") as weave:
        check(weave)
        functions, name = ALL_ATTENTION_FUNCTIONS._global_mapping, "kvweave+eager"
        own = functions[name]
        changed = lambda module, q, k, v, *a, **o: own(module, q, k, v + 1, *a, **o)  # noqa: E731
        monkeypatch.setitem(functions, name, changed)
        with pytest.raises(BadCall, match="attends to other values"):
            weave.generate(IDS, **greedy())


def test_mask_functions_are_read_as_reaches() -> None:
    assert reach_of(causal_mask_function) == Full()
    assert reach_of(sliding_window_causal_mask_function(7)) == Window(7)
    assert reach_of(chunked_causal_mask_function(7, torch.zeros(1))) == Chunk(7)
    assert reach_of(or_masks(causal_mask_function, lambda *_: True)) is None
    assert reach_of(lambda *_: True) is None

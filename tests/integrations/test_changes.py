"""A model that was changed computes something else: nothing of before is reused, with or without a store."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvweave.errors import BadCall, CannotServe
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.model_changes import ModelChanges
from kvweave.store import DictTier
from tests.integrations.models import difference, greedy, model_of, plain, prompt
from tests.integrations.stores import started

CLOSE = 2e-5
IDS = prompt(70)


def own_copy(name: str = "llama") -> Any:
    return copy.deepcopy(model_of(name))


def projection(model: Any) -> Any:
    return model.model.layers[0].self_attn.k_proj


def reused(weave: KVWeave, ids: torch.Tensor = IDS) -> int:
    """Generate, compare with transformers, and return how many tokens were reused."""
    assert difference(weave.generate(ids, **greedy()), plain(weave.model, ids)) < CLOSE
    return weave.records[-1].reused_tokens


def in_place(model: Any) -> None:
    with torch.no_grad():
        projection(model).weight.mul_(1.5)


def behind_torchs_back(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.1)


def by_state_dict(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.2 for name, tensor in model.state_dict().items()})


def by_assigning(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.2 for name, tensor in model.state_dict().items()}, assign=True)


def by_another_parameter(model: Any) -> None:
    projection(model).weight = torch.nn.Parameter(projection(model).weight.detach() * 1.5)


def by_an_optimizer(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


CHANGES = (in_place, behind_torchs_back, by_state_dict, by_assigning, by_another_parameter, by_an_optimizer)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_weights_nothing_old_is_reused(change: Callable[[Any], None]) -> None:
    with KVWeave(own_copy(), "16MiB") as weave:
        assert [reused(weave), reused(weave)] == [0, 64]
        change(weave.model)
        assert [reused(weave), reused(weave)] == [0, 64]


def test_named_weights_of_a_store_are_hashed_once_they_change() -> None:
    model, tier = own_copy(), DictTier()
    with started(model, tier) as weave:
        reused(weave)
        in_place(model)
        assert [reused(weave), reused(weave)] == [0, 64]


def test_a_config_that_was_changed_counts() -> None:
    with KVWeave(own_copy("mistral"), "16MiB") as weave:
        assert [reused(weave), reused(weave)] == [0, 64]
        weave.model.config.rms_norm_eps = 0.5
        weave.generate(IDS, **greedy())
        assert weave.records[-1].reused_tokens == 0


@pytest.mark.parametrize(
    ("name", "field"), [("gemma3_text", "sliding_window"), ("llama4_text", "attention_chunk_size")]
)
def test_a_config_whose_layers_see_further_than_their_pages_is_refused_until_it_is_undone(
    name: str, field: str
) -> None:
    with KVWeave(own_copy(name), "16MiB") as weave:
        reused(weave)
        before = getattr(weave.model.config, field)
        setattr(weave.model.config, field, before + 2)
        for call in (weave.generate, weave.past):
            with pytest.raises(BadCall, match="a window, a chunk, their types"):
                call(IDS)
        setattr(weave.model.config, field, before)
        assert reused(weave) == 64


def test_what_was_computed_with_dropout_is_kept_apart() -> None:
    with KVWeave(own_copy(), "16MiB") as weave:
        reused(weave)
        weave.model.train()
        weave.generate(IDS, **greedy())
        assert weave.records[-1].reused_tokens == 0
        weave.model.eval()
        assert reused(weave) == 64


@contextmanager
def adapted(name: str = "llama") -> Iterator[Any]:
    """A PeftModel with two LoRA adapters, of which none is zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(own_copy(name), config, adapter_name="one")
    model.add_adapter("two", config)
    yield model.eval()


def test_adapters_of_peft_share_nothing_and_find_their_own_again() -> None:
    with adapted() as model, KVWeave(model, "16MiB") as weave:
        assert weave.model is model.get_base_model()
        assert [reused(weave), reused(weave)] == [0, 64]
        model.set_adapter("two")
        assert [reused(weave), reused(weave)] == [0, 64]
        with model.disable_adapter():
            assert [reused(weave), reused(weave)] == [0, 64]
        model.set_adapter("one")
        assert reused(weave) == 64, "its weights are as they were"


def test_adapters_that_are_merged_scaled_or_trained_are_others() -> None:
    with adapted() as model, KVWeave(model, "16MiB") as weave:
        reused(weave)
        model.merge_adapter()
        assert reused(weave) == 0
        model.unmerge_adapter()
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["one"] *= 2
        assert reused(weave) == 0
        for name, weight in model.named_parameters():
            if "lora_A.one" in name:
                weight.data.add_(0.5)
        assert reused(weave) == 0


def test_adapters_that_prompts_do_not_tell_of_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(CannotServe, match="tokens of its own before each prompt"):
        KVWeave(peft.get_peft_model(own_copy(), config), "16MiB")


def test_a_past_of_one_adapter_is_not_continued_with_another() -> None:
    with adapted() as model, KVWeave(model, "16MiB") as weave, torch.no_grad():
        with weave.past(IDS) as past:
            model.set_adapter("two")
            with pytest.raises(BadCall, match="the model has changed since this cache was opened"):
                weave.model(IDS[:, -1:], past_key_values=past)
        model.set_adapter("one")
        assert reused(weave) == 64


def test_a_model_of_another_dtype_is_refused_by_name() -> None:
    with KVWeave(own_copy(), "16MiB") as weave:
        reused(weave)
        weave.model.half()
        with pytest.raises(BadCall, match="torch.float16 on cpu now; pages were made for torch.float32"):
            weave.generate(IDS, **greedy())
        weave.model.float()
        assert reused(weave) == 0


def test_looking_reads_no_weights_but_a_few() -> None:
    model = own_copy()
    changes = ModelChanges(model)
    assert changes.version() == changes.version()
    with torch.device("meta"):
        bare = type(model)(model.config)
    assert ModelChanges(bare).version() == ModelChanges(bare).version()


def test_hooks_that_steer_a_layer_make_another_model() -> None:
    with KVWeave(own_copy(), "16MiB") as weave:
        assert [reused(weave), reused(weave)] == [0, 64]
        steer = weave.model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output + 0.5)
        assert [reused(weave), reused(weave)] == [0, 64]
        steer.remove()
        assert reused(weave) == 64, "it is as it was"


def replace_forward(model: Any) -> None:
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden) * 1.5


def slow_down_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize("patch", [replace_forward, slow_down_rotation])
def test_patched_modules_make_another_model(patch: Callable[[Any], None]) -> None:
    with KVWeave(own_copy(), "16MiB") as weave:
        assert [reused(weave), reused(weave)] == [0, 64]
        before = plain(weave.model, IDS)
        patch(weave.model)
        assert difference(plain(weave.model, IDS), before) > 10 * CLOSE, "the change can be seen"
        assert [reused(weave), reused(weave)] == [0, 64]


@pytest.mark.parametrize("patch", [replace_forward, slow_down_rotation])
def test_what_patched_modules_computed_is_not_shared_beyond_the_process(patch: Callable[[Any], None]) -> None:
    model, tier, ids = own_copy(), DictTier(), prompt(300)
    with started(model, tier) as weave:
        patch(model)
        assert [reused(weave, ids), reused(weave, ids)] == [0, 288]
    with started(own_copy(), tier) as weave:
        assert reused(weave, ids) == 0


def test_a_call_that_asks_for_hidden_states_leaves_the_model_as_it_was() -> None:
    """The hooks that transformers collects them by stay where they are."""
    with KVWeave(own_copy(), "16MiB", graphs=True) as weave:
        assert reused(weave) == 0
        weave.model(IDS, output_hidden_states=True, output_attentions=True)
        assert any(module._forward_hooks for module in weave.model.model.layers)
        assert reused(weave) == 64
        assert weave.graphs.is_useful


def test_hooks_that_steer_a_layer_are_not_shared_beyond_the_process() -> None:
    model, tier = own_copy(), DictTier()
    for amount in (0.5, 0.7):
        steer = model.model.layers[0].register_forward_hook(lambda _module, _inputs, output, by=amount: output + by)
        with started(model, tier) as weave:
            assert reused(weave) == 0
        steer.remove()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "lfm2", "mamba2", "deepseek_v3"])
def test_what_was_computed_under_autocast_is_kept_apart(name: str) -> None:
    with KVWeave(own_copy(name), "32MiB") as weave:
        reused(weave)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = plain(weave.model, IDS)
            for found in (0, 64):
                ours = weave.generate(IDS, **greedy())
                assert weave.records[-1].reused_tokens == found
                assert torch.equal(ours.sequences, theirs.sequences)
                assert difference(ours, theirs) < 0.05, "of the order of what bfloat16 rounds"
        assert reused(weave) == 64


def test_an_adapter_for_each_row_is_left_to_peft() -> None:
    ids = torch.cat([IDS, prompt(70, seed=1)])
    with adapted() as model, KVWeave(model, "16MiB") as weave:
        reused(weave)
        options = {"adapter_names": ["one", "two"], "attention_mask": torch.ones_like(ids)}
        theirs = model.generate(input_ids=ids, **options, **greedy())
        assert difference(weave.generate(ids, **options, **greedy()), theirs) < CLOSE
        assert weave.records[-1].fallback == "adapter_names= was given"
        assert reused(weave) == 64


def test_adapters_that_come_later_are_looked_at_too() -> None:
    peft = pytest.importorskip("peft")
    with adapted() as model, KVWeave(model, "16MiB") as weave:
        reused(weave)
        model.peft_config["three"] = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        with pytest.raises(CannotServe, match="tokens of its own before each prompt"):
            weave.generate(IDS, **greedy())

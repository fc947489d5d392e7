"""`attach`: the model's own `generate`, and pipelines over it, run on pages, until `detach`."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

from kvweave.errors import BadCall
from kvweave.integrations.transformers import KVWeave, attach, detach
from tests.integrations.models import difference, greedy, model_of, plain, prompt

CLOSE = 2e-5
KINDS = ("llama", "gemma3_text", "qwen3_next", "lfm2", "mamba2", "deepseek_v3")
parametrize = pytest.mark.parametrize("name", KINDS)
IDS = prompt(93)


@pytest.fixture
def model(name: str) -> Iterator[Any]:
    made = copy.deepcopy(model_of(name))
    yield made
    detach(made)
    assert "generate" not in vars(made)
    assert not made._forward_hooks


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 96)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", padding_side="left", model_max_length=256
    )


@parametrize
def test_generate_runs_on_pages_until_the_way_back(name: str, model: Any) -> None:
    theirs = plain(model, IDS)
    weave = attach(model, "32MiB")
    for _ in range(2):
        assert difference(plain(model, IDS), theirs) < CLOSE
    assert [record.reused_tokens > 0 for record in weave.records] == [False, True]
    with pytest.raises(BadCall, match="has a generate of its own already"):
        attach(model)
    detach(model)
    detach(model)
    assert difference(plain(model, IDS), theirs) == 0
    assert len(weave.records) == 2
    assert weave.is_closed


@parametrize
def test_a_pipeline_runs_on_pages(name: str, model: Any) -> None:
    system = " ".join(f"w{token}" for token in prompt(48)[0].tolist())
    asked = [f"{system} w{number} w7" for number in range(10, 13)] + [f"{system} w44 w45 w46 w47"]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    plainly = pipeline("text-generation", model=copy.deepcopy(model), tokenizer=tokenizer())
    theirs = [plainly(text, **options) for text in asked], plainly(asked, batch_size=4, **options)
    weave = attach(model, "32MiB")
    paged = pipeline("text-generation", model=model, tokenizer=tokenizer())
    assert ([paged(text, **options) for text in asked], paged(asked, batch_size=4, **options)) == theirs
    assert weave.stats().requests == 5
    assert weave.stats().fallback == 0
    assert weave.records[-1].reused_tokens >= 3 * 32


@pytest.mark.parametrize("name", ["llama"])
def test_what_pages_cannot_serve_transformers_does(name: str, model: Any) -> None:
    embeddings = model.get_input_embeddings()(IDS).detach()
    mask = torch.ones_like(IDS)
    mask[0, 30] = 0
    calls: list[dict[str, Any]] = [
        {"inputs_embeds": embeddings},
        {"inputs": IDS, "attention_mask": mask},
        {"inputs": IDS, "position_ids": torch.arange(93)[None] * 2},
        {"inputs": IDS, "use_cache": False},
    ]
    theirs = [model.generate(**call, **greedy()) for call in calls]
    with torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache in caches:
            model(IDS[:, :-1], past_key_values=cache)
    theirs.append(model.generate(IDS, past_key_values=caches[0], **greedy()))
    calls.append({"inputs": IDS, "past_key_values": caches[1]})
    weave = attach(model, "16MiB")
    for call, expected in zip(calls, theirs, strict=True):
        assert difference(model.generate(**call, **greedy()), expected) < CLOSE
        assert difference(model.generate(IDS, **greedy()), plain(copy.deepcopy(model), IDS)) < CLOSE
    assert weave.records[-1].reused_tokens == 80


@pytest.mark.parametrize("name", ["llama"])
def test_prompts_that_do_not_fit_into_the_pages_are_left_to_transformers(name: str, model: Any) -> None:
    twin = copy.deepcopy(model)
    weave = attach(model, "300KiB")
    for ids in (prompt(240), torch.cat([prompt(90, seed) for seed in range(4)])):
        for _ in range(2):
            assert difference(plain(model, ids), plain(twin, ids)) == 0
            assert "pool 'full'" in weave.records[-1].fallback
            assert difference(plain(model, IDS), plain(twin, IDS)) < CLOSE
    assert weave.records[-1].reused_tokens == 80
    assert weave.core.stats().sequences == 0


@pytest.mark.parametrize("name", ["llama"])
def test_an_attached_model_may_draft_for_itself_and_for_others(name: str, model: Any) -> None:
    ids = prompt(12).repeat(1, 5)
    twin = copy.deepcopy(model)
    theirs = plain(twin, ids, num_tokens=8, assistant_model=copy.deepcopy(model))
    weave = attach(model, "16MiB")
    for drafted in (model, twin):
        ours = plain(drafted, ids, num_tokens=8, assistant_model=model)
        assert torch.equal(ours.sequences, theirs.sequences)
    early = plain(twin, ids, num_tokens=8, assistant_early_exit=1)
    assert torch.equal(plain(model, ids, num_tokens=8, assistant_early_exit=1).sequences, early.sequences)
    assert difference(plain(model, ids), plain(twin, ids)) < CLOSE
    assert weave.core.stats().sequences == 0


@parametrize
def test_a_copy_of_an_attached_model_generates_by_itself(name: str, model: Any) -> None:
    weave, file = attach(model, "32MiB"), io.BytesIO()
    theirs = plain(model, IDS)
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert difference(plain(other, IDS), theirs) < CLOSE
        assert other.generate.__self__ is other
        assert len(weave.records) == 1


def test_an_attached_model_is_collected_with_its_pages() -> None:
    model = copy.deepcopy(model_of("llama"))
    gone = weakref.ref(attach(model, "16MiB"))
    model.generate(IDS, **greedy())
    assert gone() is not None, "nobody else holds it"
    del model
    gc.collect()
    assert gone() is None


def test_a_peft_model_is_attached_too() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(model_of("llama")), config).eval()
    theirs = plain(model, IDS)
    weave = attach(model, "16MiB")
    for _ in range(2):
        assert difference(plain(model, IDS), theirs) < CLOSE
    assert weave.records[-1].reused_tokens == 80
    with weave.past(IDS) as past, torch.no_grad():
        logits = model(IDS[:, -1:], past_key_values=past).logits
        assert (logits[:, -1] - theirs.logits[0]).abs().max() < CLOSE
    assert difference(plain(model, IDS), theirs) < CLOSE
    detach(model)
    assert difference(plain(model, IDS), theirs) == 0


def test_a_compiled_model_is_attached_too() -> None:
    model = copy.deepcopy(model_of("llama"))
    compiled = torch.compile(model, backend="eager")
    theirs = plain(model, IDS)
    weave = attach(compiled, "16MiB")
    for _ in range(2):
        assert difference(plain(compiled, IDS), theirs) < CLOSE
    assert weave.records[-1].reused_tokens == 80
    detach(compiled)
    assert "generate" not in vars(model)


def test_closing_the_weave_gives_generate_back_to_transformers() -> None:
    model = copy.deepcopy(model_of("llama"))
    weave: KVWeave = attach(model, "16MiB")
    weave.close()
    theirs = plain(copy.deepcopy(model), IDS)
    assert difference(plain(model, IDS), theirs) == 0
    detach(model)

"""Prompts with images: two images under the same tokens never meet, and every token is that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from kvweave.integrations.transformers import KVWeave, attach, detach
from kvweave.store import DictTier
from tests.integrations.models import difference, greedy, prompt
from tests.integrations.stores import started

CLOSE = 2e-5
IMAGE, START, END = 97, 98, 99
TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def gemma() -> Any:
    vision = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 7}
    config = Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 24}, vision_config=vision, mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def llava() -> Any:
    vision = CLIPVisionConfig(**SMALL, num_hidden_layers=2, num_attention_heads=2, patch_size=14, projection_dim=32)
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=vision, image_token_index=IMAGE, image_seq_length=4
    )
    return LlavaForConditionalGeneration(config)


def qwen() -> Any:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
        "spatial_merge_size": 2, "temporal_patch_size": 1, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": MROPE}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=96, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config)


KINDS = {"gemma": gemma, "llava": llava, "qwen": qwen}
parametrize = pytest.mark.parametrize("kind", KINDS)


@lru_cache(maxsize=3)
def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return KINDS[kind]().float().eval()


def image(seed: int) -> torch.Tensor:
    return torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(seed))


def asked(kind: str, *seeds: int, before: int = 20, after: int = 15, seed: int = 0) -> dict[str, Any]:
    """A prompt with so many images, as a processor would give it; each is followed by text."""
    parts = [prompt(before)]
    for _ in seeds:
        parts += [torch.tensor([[START, *[IMAGE] * 4, END]]), prompt(after, seed=seed + 1)]
    ids = torch.cat(parts, dim=1)
    types = (ids == IMAGE).long()
    if kind == "qwen":
        patches = [torch.randn(16, 48, generator=torch.Generator().manual_seed(each)) for each in seeds]
        grid = torch.tensor([[1, 4, 4]] * len(seeds))
        return {"inputs": ids, "pixel_values": torch.cat(patches), "image_grid_thw": grid, "mm_token_type_ids": types}
    pixels = {"inputs": ids, "pixel_values": torch.cat([image(each) for each in seeds])}
    return {**pixels, "token_type_ids": types} if kind == "gemma" else pixels


def plain(model: Any, given: dict[str, Any], **options: Any) -> Any:
    mask = torch.ones_like(given["inputs"])
    return model.generate(**given, attention_mask=mask, **greedy(**options), use_cache=True)


def reused(weave: KVWeave, given: dict[str, Any], **options: Any) -> int:
    theirs = plain(weave.model, given, **options)
    mask = torch.ones_like(given["inputs"])
    assert difference(weave.generate(**given, attention_mask=mask, **greedy(**options)), theirs) < CLOSE
    assert weave.core.stats().sequences == 0
    return weave.records[-1].reused_tokens


@pytest.fixture
def weave(kind: str) -> Iterator[KVWeave]:
    with KVWeave(model_of(kind), "32MiB") as made:
        yield made


@parametrize
def test_text_after_an_image_has_the_positions_of_text(kind: str, weave: KVWeave) -> None:
    text = {"inputs": prompt(50, seed=5)}
    assert reused(weave, text) == 0
    for seed in (0, 1):
        plain(weave.model, asked(kind, seed))
        theirs = plain(weave.model, text)
        plain(weave.model, asked(kind, seed, seed))
        ours = weave.generate(text["inputs"], **greedy())
        assert difference(ours, theirs) < CLOSE
        plain(weave.model, asked(kind, seed))
        with weave.past(text["inputs"]) as past, torch.no_grad():
            logits = weave.model(text["inputs"][:, -1:], past_key_values=past).logits
            assert (logits[:, -1] - theirs.logits[0]).abs().max() < CLOSE


@parametrize
def test_images_are_found_again_and_never_taken_for_one_another(kind: str, weave: KVWeave) -> None:
    one, other = asked(kind, 0), asked(kind, 1)
    assert difference(plain(weave.model, one), plain(weave.model, other)) > 100 * CLOSE, "the image matters"
    assert reused(weave, one) == 0
    assert reused(weave, one) == 32, "all of it but the rest of a block"
    assert reused(weave, other) == 0
    assert reused(weave, asked(kind, 0, seed=7)) == 0, "16 tokens are shared, and the image ends after them"
    assert reused(weave, one) == reused(weave, other) == 32
    assert reused(weave, {"inputs": one["inputs"]}) <= 16, "without the image, tokens from its start on are others"


@parametrize
def test_a_conversation_about_an_image(kind: str, weave: KVWeave) -> None:
    given = asked(kind, 0)
    for turn in range(3):
        found = reused(weave, given, num_tokens=12)
        assert found >= 16 * turn, "the image, and what was said about it"
        said = plain(weave.model, given, num_tokens=12).sequences
        more = prompt(9, seed=20 + turn)
        ids = torch.cat([said, more], dim=1)
        types: dict[str, Any] = {
            name: (ids == IMAGE).long() for name in ("token_type_ids", "mm_token_type_ids") if name in given
        }
        given = {**given, "inputs": ids, **types}


@parametrize
def test_several_images_beams_and_pieces(kind: str, weave: KVWeave) -> None:
    weave.prefill_tokens = 8
    two, swapped = asked(kind, 0, 1), asked(kind, 1, 0)
    for _ in range(2):
        reused(weave, two)
        reused(weave, swapped)
    assert weave.records[-1].reused_tokens >= 48
    theirs = plain(weave.model, two, num_beams=2)
    mask = torch.ones_like(two["inputs"])
    assert torch.equal(weave.generate(**two, attention_mask=mask, **greedy(num_beams=2)).sequences, theirs.sequences)
    assert reused(weave, asked(kind, 0)) >= 0


@parametrize
def test_batches_and_strange_places_are_left_to_transformers(kind: str, weave: KVWeave) -> None:
    one = asked(kind, 0)
    batch = {name: torch.cat([value, value]) for name, value in one.items()}
    reused(weave, batch)
    assert "images of several prompts" in weave.records[-1].fallback
    last = {
        **one,
        **{name: value[:, :25] for name, value in one.items() if value.shape[-1] == 41 and name != "pixel_values"},
    }
    reused(weave, last)
    assert "ends with an image" in weave.records[-1].fallback
    assert reused(weave, one) == 0


@pytest.mark.parametrize(("kind", "name"), [("gemma", "token_type_ids"), ("qwen", "mm_token_type_ids")])
def test_types_that_mark_other_tokens_than_those_of_images_spoil_nothing(kind: str, name: str, weave: KVWeave) -> None:
    one = asked(kind, 0)
    types, first = one[name], int(one[name].argmax())
    text, half, later, moved = torch.zeros_like(types), types.clone(), types.clone(), types.roll(1, dims=1)
    half[0, first], later[0, first + 8] = 0, 1
    for each in (text, half, later, moved):
        theirs = outcome(weave.model, {**one, name: each})
        ours = outcome(weave, {**one, name: each})
        if isinstance(theirs, Exception):
            assert type(ours) is type(theirs)
        else:
            assert difference(ours, theirs) < CLOSE
            assert "marks other tokens" in weave.records[-1].fallback
        reused(weave, one)
    without = {given: value for given, value in one.items() if given != name}
    assert reused(weave, one) == 32
    assert reused(weave, without) == 0, "it sees other positions, or other tokens, than with types"
    assert reused(weave, one) == 32


def outcome(generator: Any, given: dict[str, Any]) -> Any:
    try:
        return generator.generate(**given, attention_mask=torch.ones_like(given["inputs"]), **greedy())
    except Exception as error:
        return error


@parametrize
def test_an_attached_model_sees_images(kind: str) -> None:
    model, one = model_of(kind), asked(kind, 0)
    theirs = plain(model, one)
    weave = attach(model, "32MiB")
    try:
        for _ in range(2):
            assert difference(plain(model, one), theirs) < CLOSE
        assert weave.records[-1].reused_tokens == 32
    finally:
        detach(model)


@parametrize
def test_with_a_store_images_stay_in_memory(kind: str) -> None:
    model, tier = model_of(kind), DictTier()
    for _ in range(2):
        with started(model, tier, "32MiB") as weave:
            for seed in (0, 1, 0):
                reused(weave, asked(kind, seed, before=70, after=70))
            assert weave.records[-1].reused_tokens >= 128
            assert weave.records[-1].stored_tokens == 0
            reused(weave, {"inputs": asked(kind, 0, before=70)["inputs"][:, :70]})

"""Views of vLLM's tensors, against rows that a plain loop puts where the kernels do; and what is bound to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvweave.integrations.vllm.binding import Binder, Bound, join_stages
from kvweave.integrations.vllm.engine_groups import EngineGroup, EngineLayer, chunk_tokens, hit_alignment, saved_blocks
from kvweave.integrations.vllm.layouts import attention_views, state_views
from kvweave.plan import Parallel
from kvweave.spec import Chunk, DType, Full, LayerCache, ModelSpec, Reach, Role, Segment, State, Window
from kvweave.spec.layer_spec import Layer
from kvweave.store import PagePayloads, Schema

BLOCKS, HEADS, TOKENS, KEY, VALUE = 5, 2, 8, 4, 6


def keys_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.arange(BLOCKS * TOKENS * HEADS * KEY).reshape(BLOCKS, TOKENS, HEADS, KEY).float()
    value = -torch.arange(BLOCKS * TOKENS * HEADS * VALUE).reshape(BLOCKS, TOKENS, HEADS, VALUE).float()
    return key, value


def written(kind: str, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As the kernel of this kind writes it, item by item."""
    flat = torch.zeros(BLOCKS, HEADS, TOKENS * (KEY + VALUE))
    for block in range(BLOCKS):
        for head in range(HEADS):
            for token in range(TOKENS):
                for dim in range(KEY):
                    at = token * (KEY + VALUE) + dim if kind == "FLASH_ATTN" else dim * TOKENS + token
                    flat[block, head, at] = key[block, token, head, dim]
                for dim in range(VALUE):
                    start = token * (KEY + VALUE) + KEY if kind == "FLASH_ATTN" else TOKENS * KEY + token * VALUE
                    flat[block, head, start + dim] = value[block, token, head, dim]
    return flat.view(BLOCKS, HEADS, TOKENS, KEY + VALUE)


@pytest.mark.parametrize("kind", ["FLASH_ATTN", "CPU_ATTN vec"])
def test_a_view_finds_every_row_where_the_kernel_put_it(kind: str) -> None:
    key, value = keys_and_values()
    cache = written(kind, key, value)
    views = attention_views(kind, cache, KEY)
    assert views is not None
    assert torch.equal(views["key"], key)
    assert torch.equal(views["value"], value)
    views["key"][1, 2] = 99.5  # a view, not a copy
    assert (cache == 99.5).sum() == HEADS * KEY


def test_an_unknown_backend_has_no_view() -> None:
    assert attention_views("CPU_ATTN amx", torch.zeros(2, 2, 8, 10), KEY) is None
    assert state_views("LIGHTNING", [torch.zeros(2, 3, 4)], channels_first=True) is None
    assert state_views("MAMBA2", [torch.zeros(2, 3, 4)], channels_first=True) is None


def test_states_are_turned_to_channels_and_keys_first() -> None:
    conv, ssm = torch.rand(3, 2, 8), torch.rand(3, 4, 5, 6)
    turned = state_views("GDN_ATTN", [conv, ssm], channels_first=False)
    assert turned is not None
    assert torch.equal(turned["conv_state"], conv.transpose(1, 2))
    assert torch.equal(turned["ssm_state"], ssm.transpose(2, 3))
    on_cpu = state_views("GDN_ATTN on the CPU", [conv, ssm], channels_first=False)
    assert on_cpu is not None
    assert on_cpu["ssm_state"] is ssm
    plain = state_views("MAMBA2", [conv, ssm], channels_first=True)
    assert plain is not None
    assert plain["conv_state"] is conv


def test_positions_and_chunks_follow_the_groups() -> None:
    full, window = EngineGroup(0, 32, Full(), ()), EngineGroup(1, 48, Window(100), ())
    state, small = EngineGroup(2, 528, State(), ()), EngineGroup(3, 32, State(), ())
    assert hit_alignment([full]) == 1
    assert hit_alignment([full, window]) == 96
    assert chunk_tokens([full, window]) == 64
    assert chunk_tokens([full, state]) == 16
    assert chunk_tokens([full, small]) == 32
    assert saved_blocks(full, 32, [64, 128]) == [(1, 4)]
    assert saved_blocks(full, 32, [40]) == []
    assert saved_blocks(EngineGroup(1, 32, Window(33), ()), 0, [128]) == [(3, 4)]
    assert saved_blocks(small, 32, [64, 80, 128]) == [(1, 2), (3, 4)]


def spec(reach: Reach = Full(), dim: int = KEY) -> ModelSpec:  # noqa: B008 - frozen
    roles = tuple(
        Role(name, (HEADS, width), DType.BFLOAT16, token_axis=1, split=(Segment(HEADS),))
        for name, width in (("key", dim), ("value", VALUE))
    )
    return ModelSpec("m", (Layer((LayerCache(reach.kind, reach, roles),)),))


def bound(declared: ModelSpec | None, kind: str = "FLASH_ATTN", reach: Reach = Full(), tp: int = 1) -> Bound:  # noqa: B008
    cache = torch.zeros(BLOCKS, HEADS // tp, TOKENS, KEY + VALUE)
    layer = EngineLayer("layers.0.attn", 0, kind, (cache,), cache, 1)
    binder = Binder(declared, Parallel(tp=tp), "0.32.0", channels_first=False, chunk_tokens=16)
    return binder.bind([EngineGroup(0, TOKENS, reach, (layer.name,))], [layer])


def test_a_layer_is_stored_as_its_config_says_in_the_dtype_that_it_has() -> None:
    made = bound(spec())
    assert not made.opaque
    (cache,) = made.spec.layers[0].caches
    assert [(role.name, role.shape, role.dtype) for role in cache.roles] == [
        ("key", (HEADS, KEY), DType.FLOAT32),
        ("value", (HEADS, VALUE), DType.FLOAT32),
    ]


def test_degrees_share_one_spec() -> None:
    assert bound(spec(), tp=1).spec == bound(spec(), tp=2).spec


def test_stages_join_to_the_spec_of_the_whole_model() -> None:
    declared = ModelSpec("m", spec().layers * 4)
    groups = [EngineGroup(0, TOKENS, Full(), tuple(f"layers.{index}" for index in range(4)))]
    caches = [torch.zeros(BLOCKS, HEADS, TOKENS, KEY + VALUE) for _ in range(4)]
    layers = [EngineLayer(f"layers.{i}", i, "FLASH_ATTN", (cache,), cache, 1) for i, cache in enumerate(caches)]
    whole = Binder(declared, Parallel(), "0.32.0", channels_first=False, chunk_tokens=16).bind(groups, layers)
    stages = []
    for stage, own in enumerate((layers[:1], layers[1:], [])):
        here = [EngineGroup(0, TOKENS, Full(), tuple(layer.name for layer in own))]
        binder = Binder(declared, Parallel(pp=3, pp_rank=stage), "0.32.0", channels_first=False, chunk_tokens=16)
        stages.append(binder.bind(here, own))
    assert join_stages([stage.spec for stage in stages]) == whole.spec
    schema = Schema.of(whole.spec, parts=1, chunk_tokens=16, stages=(0, 1, 4))
    assert [PagePayloads(schema, stage.memory).writes for stage in stages] == [(0,), (1,), ()]


def test_a_window_that_the_engine_keeps_whole_must_be_loaded_whole() -> None:
    (cache,) = bound(spec(Window(4))).spec.layers[0].caches
    assert (cache.tag, cache.reach) == ("window.full", Full())
    (cache,) = bound(spec(Chunk(4)), reach=Chunk(4)).spec.layers[0].caches
    assert (cache.tag, cache.reach) == ("chunk", Chunk(4))


@pytest.mark.parametrize(
    "given", [(None, "FLASH_ATTN"), (spec(), "UNKNOWN"), (spec(dim=KEY + 1), "FLASH_ATTN"), (spec(), "CPU_ATTN amx")]
)
def test_what_is_not_known_is_stored_as_opaque_pages_of_one_backend_block_and_version(given: Any) -> None:
    declared, kind = given
    made = bound(declared, kind)
    assert [layer.name for layer in made.opaque] == ["layers.0.attn"]
    (cache,) = made.spec.layers[0].caches
    (role,) = cache.roles
    assert (role.tokens_per_row, role.row_bytes) == (TOKENS, HEADS * TOKENS * (KEY + VALUE) * 4)
    assert all(words in role.name for words in (kind, "0-32-0", f"block {TOKENS}", "tp 1"))
    assert made.unit_tokens == TOKENS
    schema = Schema.of(made.spec, chunk_tokens=2 * TOKENS, parts=8)
    assert PagePayloads(schema, made.memory).reads == (0,)

"""Backends declare, and memory has the shapes that kernels expect (FastDeploy's and RTP-LLM's acceptance cases)."""

from __future__ import annotations

import doctest
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import make_plan
from kvweave.errors import ConfigError, SpecError, UnknownName
from kvweave.plan import PoolRequest
from kvweave.spec import DType, Layer, LayerCache, ModelSpec, Read, Role, Segment, State, Window
from kvweave.tensor import (
    DSA,
    GQA,
    MLA,
    Arena,
    AttentionBackend,
    LayerRequest,
    NoCache,
    Opaque,
    Recurrent,
    assemble,
    not_hosted,
)

UNUSED = LayerRequest(0)


def arena_of(backend: AttentionBackend, request: LayerRequest, blocks: int, layers: int = 1, **how: Any) -> Arena:
    """Memory of exactly so many blocks, the NULL one among them."""
    requests = [LayerRequest(**{**fields(request), "layer": number}) for number in range(layers)]
    spec = assemble("one", [(backend, each) for each in requests])
    pools = {tag: PoolRequest(pages=blocks - 1) for tag in spec.groups()}
    return Arena(make_plan(spec, "64MB", own_pools=pools, **how))


def fields(request: LayerRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in LayerRequest.__slots__}


def shapes(arena: Arena, layer: int = 0, tag: str | None = None) -> dict[str, list[int]]:
    return {name: list(view.tensor.shape) for name, view in arena.layer(layer, tag).roles.items()}


def test_two_layers_of_gqa_are_four_tensors_heads_first() -> None:
    with arena_of(GQA(), LayerRequest(0, heads=2, key_dim=32), 5, layers=2, block_tokens=8) as arena:
        assert len(arena.tensors()) == 4
        assert shapes(arena, 1) == {"key": [5, 2, 8, 32], "value": [5, 2, 8, 32]}
        kv = arena.layer(1).kv
        assert kv is not None
        assert list(kv.shape) == [5, 2, 2, 8, 32]
        kv[3, 0], kv[3, 1] = 1, 2
        assert (arena.layer(1)["key"][3] == 1).all()
        assert (arena.layer(1)["value"][3] == 2).all()
        assert arena.layer(1)["key"].float().sum() == 2 * 8 * 32
        assert not arena.layer(0)["key"].any()


def test_kernel_blocks_split_a_page_as_in_rtp_llm() -> None:
    """MHA of 1 head x 4, 3 pages of 8 tokens, kernel blocks of 2 -> [12, 2, 1, 2, 4]."""
    request = LayerRequest(0, heads=1, key_dim=4, dtype=DType.FLOAT16)
    with arena_of(GQA(), request, 3, block_tokens=8, kernel_tokens=2) as arena:
        layer = arena.layer(0)
        assert layer.kv is not None
        assert list(layer.kv.shape) == [12, 2, 1, 2, 4]
        assert layer.kv.data_ptr() == layer["key"].data_ptr() == arena.pool("full").data_ptr()
        assert (layer.kernel_tokens, layer.block_tokens, layer.tag) == (2, 8, "full")
        assert layer.dtypes == {"key": DType.FLOAT16, "value": DType.FLOAT16}


def test_keys_and_values_of_different_width_have_no_common_view() -> None:
    with arena_of(GQA(), LayerRequest(0, heads=2, key_dim=32, value_dim=16), 3) as arena:
        assert shapes(arena) == {"key": [3, 2, 16, 32], "value": [3, 2, 16, 16]}
        assert arena.layer(0).kv is None


def test_kv_is_heads_by_tokens_also_where_rows_are_stored_token_by_token() -> None:
    roles = tuple(Role(name, (3, 4), DType.FLOAT32) for name in ("key", "value"))
    spec = ModelSpec("nhd", (Layer((LayerCache("full", UNUSED.reach, roles),)),))
    with Arena(make_plan(spec, "1MB", own_pools={"full": PoolRequest(pages=4)}, block_tokens=8)) as arena:
        layer = arena.layer(0)
        assert layer.kv is not None
        assert (list(layer["value"].shape), list(layer.kv.shape)) == ([5, 8, 3, 4], [5, 2, 3, 8, 4])
        layer["value"][2, 6, 1, 3] = 9
        assert layer.kv[2, 1, 1, 6, 3] == 9


@pytest.mark.parametrize(
    ("quant", "dtype", "width", "scale"),
    [
        ("fp8", torch.float8_e4m3fn, 32, None),
        ("fp8_e5m2", torch.float8_e5m2, 32, None),
        ("fp8_token_head", torch.float8_e4m3fn, 32, [3, 2, 8]),
        ("fp8_block", torch.float8_e4m3fn, 32, [3, 2, 8, 1]),
        ("int8", torch.int8, 32, [3, 2, 8]),
        ("int4", torch.uint8, 16, [3, 2, 8]),
    ],
)
def test_quantised_gqa_has_scales_a_token_and_head(
    quant: str, dtype: torch.dtype, width: int, scale: list[int]
) -> None:
    with arena_of(GQA(), LayerRequest(0, heads=2, key_dim=32, quant=quant), 3, block_tokens=8) as arena:
        made = shapes(arena)
        assert (made["key"], made["value"]) == ([3, 2, 8, width],) * 2
        assert arena.layer(0)["key"].dtype == dtype
        assert [made.get("key_scale"), made.get("value_scale")] == [scale, scale]


def test_mla_is_one_latent_and_no_value() -> None:
    with arena_of(MLA(256, 32), LayerRequest(0), 10, layers=2, block_tokens=32) as arena:
        assert shapes(arena) == {"latent": [10, 32, 288]}
        assert len(arena.tensors()) == 2
        assert not any("value" in name for name in arena.tensors())


def test_dsa_is_a_latent_and_an_indexer_in_bytes() -> None:
    with arena_of(DSA(), LayerRequest(0, quant="fp8"), 4, layers=2, block_tokens=64) as arena:
        assert len(arena.tensors()) == 4
        assert shapes(arena, 1, "latent") == {"latent": [4, 64, 656]}
        assert shapes(arena, 1, "indexer") == {"indexer": [4, 64 * 132]}, "planar: raw bytes of a page"
        latent, indexer = (arena.layer(1, tag).role(tag) for tag in ("latent", "indexer"))
        assert {name: (list(t.shape), t.dtype) for name, t in latent.parts.items()} == {
            "nope": ([4, 64, 512], torch.float8_e4m3fn),
            "scale": ([4, 64, 4], torch.float32),
            "rope": ([4, 64, 64], torch.bfloat16),
        }
        assert {name: (list(t.shape), t.dtype) for name, t in indexer.parts.items()} == {
            "values": ([4, 64, 128], torch.float8_e4m3fn),
            "scale": ([4, 64, 1], torch.float32),
        }


def test_scales_of_odd_dims_are_rounded_up() -> None:
    """FastDeploy's floor gives rank 192 one scale, and an indexer of 64 none."""
    with arena_of(DSA(192, 64, 64), LayerRequest(0, quant="fp8"), 4, block_tokens=64) as arena:
        assert shapes(arena, 0, "latent")["latent"][-1] == 192 + 2 * 4 + 2 * 64
        assert list(arena.layer(0, "indexer").role("indexer").parts["scale"].shape) == [4, 64, 1]


def test_states_are_one_a_page() -> None:
    mamba = Recurrent((4, 16, 8), (Segment(4, 16), Segment(2, 8)), conv_kernel=4)
    with arena_of(mamba, LayerRequest(0), 6) as arena:
        assert shapes(arena) == {"conv_state": [6, 80, 3], "ssm_state": [6, 4, 16, 8]}
        assert [view.tensor.dtype for view in arena.layer(0).roles.values()] == [torch.bfloat16, torch.float32]
    with arena_of(Recurrent((4, 16, 8)), LayerRequest(0), 6) as arena:
        assert list(shapes(arena)) == ["ssm_state"]


def test_opaque_bytes_are_a_tokens_or_a_states() -> None:
    """RTP-LLM: 512 bytes a block of 4 tokens, seen as 4 kernel blocks of 128."""
    with arena_of(Opaque(128), LayerRequest(0), 3, block_tokens=4, kernel_tokens=1) as arena:
        assert shapes(arena) == {"opaque": [12, 1, 128]}
    with arena_of(Opaque(4096), LayerRequest(0, reach=State()), 3) as arena:
        assert shapes(arena) == {"opaque": [3, 4096]}
        assert arena.layer(0).tag == "opaque_state"


def test_a_window_is_a_fact_of_the_layer_not_of_the_backend() -> None:
    spec = assemble("w", [(GQA(), LayerRequest(0)), (GQA(), LayerRequest(1, reach=Window(64)))])
    with Arena(make_plan(spec, "4MB")) as arena:
        assert [arena.layer(i).reach.span for i in (0, 1)] == [None, 64]


# ---- assembling


def test_layers_take_their_numbers_whatever_the_order() -> None:
    pairs: list[tuple[AttentionBackend, LayerRequest]] = [
        (GQA(), LayerRequest(11)),
        (MLA(), LayerRequest(10)),
        (Recurrent((2, 2)), LayerRequest(11)),
    ]
    spec = assemble("offset", pairs)
    assert [[cache.tag for cache in layer.caches] for layer in spec.layers] == [[]] * 10 + [
        ["latent"],
        ["full", "state"],
    ]
    assert spec == assemble("offset", pairs[::-1])


def test_a_layer_that_reads_another_keeps_nothing_of_its_own() -> None:
    pairs: list[tuple[AttentionBackend, LayerRequest]] = [
        (DSA(), LayerRequest(0)),
        (MLA(), LayerRequest(1, reads=(Read(0, "indexer"),))),
        (NoCache(), LayerRequest(2, reads=(Read(1, "latent"),))),
    ]
    spec = assemble("reads", pairs)
    with Arena(make_plan(spec, "1MB")) as arena:
        assert arena.layer(1, "indexer")["indexer"].data_ptr() == arena.layer(0, "indexer")["indexer"].data_ptr()
        assert arena.layer(2)["latent"].data_ptr() == arena.layer(1, "latent")["latent"].data_ptr()


def test_draft_layers_take_the_same_path() -> None:
    spec = assemble("d", [(MLA(), LayerRequest(0)), (MLA(), LayerRequest(1, draft=True))])
    with Arena(make_plan(spec, "1MB")) as arena:
        assert [name.partition("@")[0] for name in arena.tensors()] == [
            "layer.0/latent/latent",
            "draft.1/latent/latent",
        ]


def test_layers_that_differ_need_tags_that_differ() -> None:
    pairs = [(GQA(), LayerRequest(0, key_dim=64)), (GQA(), LayerRequest(1, key_dim=128))]
    with pytest.raises(SpecError, match=r"layers 0 and 1 both use tag 'full'.*give them different tags"):
        assemble("x", pairs)
    spec = assemble("x", [pairs[0], (GQA(), LayerRequest(1, key_dim=128, tag="wide"))])
    assert list(spec.groups()) == ["full", "wide"]


def test_quantisations_that_do_not_exist_are_named() -> None:
    with pytest.raises(UnknownName, match=r"unknown cache dtype 'fp8_token'; did you mean 'fp8_token_head'\?"):
        assemble("x", [(GQA(), LayerRequest(0, quant="fp8_token"))])
    with pytest.raises(ConfigError, match="MLA latents have no int8 layout"):
        assemble("x", [(MLA(), LayerRequest(0, quant="int8"))])


@dataclass(frozen=True)
class Shuffled:
    """Keys, values and scales in whatever order; refuses the host."""

    order: tuple[int, ...] = (0, 1, 2, 3)
    not_hosted: str = "its pages hold pointers"

    def caches(self, request: LayerRequest) -> Iterable[LayerCache]:
        roles = request.build.attention(request.heads, request.key_dim).roles
        indexer = request.build.indexer(64)
        made = LayerCache("full", request.reach, tuple(roles[i] for i in self.order))
        return [indexer, made] if self.order[0] else [made, indexer]


@given(st.permutations(range(4)))
def test_the_order_that_a_backend_returns_decides_nothing(order: list[int]) -> None:
    request = LayerRequest(0, heads=2, key_dim=32, quant="fp8_token_head")
    spec = assemble("x", [(Shuffled(tuple(order)), request)])
    assert spec == assemble("x", [(Shuffled(), request)])
    assert spec.digest() == assemble("x", [(Shuffled(), request)]).digest()


def test_a_backend_that_refuses_the_host_says_why_by_tag() -> None:
    pairs: list[tuple[AttentionBackend, LayerRequest]] = [(Shuffled((0, 1)), LayerRequest(0)), (MLA(), LayerRequest(1))]
    assert not_hosted(pairs) == {"indexer": "its pages hold pointers", "full": "its pages hold pointers"}


def test_the_documented_example_of_a_backend_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "backend.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 8
    assert not failed

"""Quantising writes come back within the error of their format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvweave import Cache, make_plan
from kvweave.errors import BadRows
from kvweave.plan import PoolRequest
from kvweave.spec import DType, Part, Role
from kvweave.tensor import DSA, GQA, MLA, Arena, LayerRequest, Quantiser, assemble, gather_tokens, pack, write_tokens
from kvweave.tensor.backend import AttentionBackend
from kvweave.tensor.quant import unpack
from tests.tensor.models import lives


def arena_of(backend: AttentionBackend, request: LayerRequest, **how: Any) -> Arena:
    spec = assemble("one", [(backend, request)])
    return Arena(make_plan(spec, "4MB", own_pools={tag: PoolRequest(pages=5) for tag in spec.groups()}, **how))


def fp8_error(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Half a step: 1/16 of a normal number, 2**-10 of the scale below those."""
    return torch.maximum(rows.abs() / 16, scale * 2**-10) * (1 + 1e-5)


def loud(*shape: int) -> torch.Tensor:
    """Rows whose magnitudes differ a thousandfold, with a row of zeros."""
    torch.manual_seed(1)
    rows = torch.randn(*shape) * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    rows[0] = 0
    return rows


SLOTS = np.array([16 + 3, 32 + 15, 17, 64, 79, 50])
ROWS = {slot: number for number, slot in enumerate(SLOTS.tolist())}


def read(arena: Arena, tag: str, slot: int) -> dict[str, torch.Tensor]:
    """One token, through a table row of one page."""
    tokens = arena.plan.group(tag).block_tokens
    return gather_tokens(arena.layer(0, tag), [slot // tokens], slot % tokens, slot % tokens + 1)


@pytest.mark.parametrize("quant", ["fp8_token_head", "fp8_block", "int8", "int4"])
def test_keys_and_values_come_back_with_their_scales(quant: str) -> None:
    with arena_of(GQA(), LayerRequest(0, heads=3, key_dim=160, value_dim=64, quant=quant), kernel_tokens=4) as arena:
        rows = {"key": loud(6, 3, 160), "value": loud(6, 3, 64) * 5}
        write_tokens(arena.layer(0), SLOTS, rows)
        for slot, number in ROWS.items():
            back = read(arena, "full", slot)
            assert list(back) == ["key", "value"]
            for name, given_rows in rows.items():
                wanted = given_rows[number]
                largest = {"int8": 127, "int4": 7}.get(quant, 448)
                scale = wanted.abs().amax(-1, keepdim=True) / largest
                limit = fp8_error(wanted, scale) if largest == 448 else (scale / 2 * (1 + 1e-4)).expand_as(wanted)
                assert ((back[name][0] - wanted).abs() <= limit + 1e-12).all()
                assert back[name].dtype == torch.float32


def test_blocks_of_a_row_have_scales_of_their_own() -> None:
    """A loud block does not drown a quiet one."""
    rows = torch.cat([torch.full((1, 1, 128), 1000.0), torch.full((1, 1, 32), 0.001)], dim=-1)
    values, scales = Quantiser(DType.FLOAT8_E4M3, 128).quantise(rows)
    assert scales.shape == (1, 1, 2)
    assert torch.allclose(Quantiser(DType.FLOAT8_E4M3, 128).dequantise(values, scales), rows, rtol=1e-6)


def test_int4_nibbles_lie_low_half_first() -> None:
    values, scales = Quantiser(DType.INT4).quantise(torch.tensor([[7.0, -7.0, 1.0, 0.0]]))
    assert (values.tolist(), scales.tolist()) == ([[0x97, 0x01]], [[1.0]])


def test_the_mla_row_of_656_bytes_round_trips() -> None:
    with arena_of(MLA(), LayerRequest(0, quant="fp8")) as arena:
        rows = loud(6, 576)
        write_tokens(arena.layer(0), SLOTS, {"latent": rows})
        for slot, number in ROWS.items():
            (back,) = read(arena, "latent", slot)["latent"]
            nope = rows[number, :512].view(4, 128)
            scale = nope.abs().amax(-1, keepdim=True) / 448
            assert ((back[:512].view(4, 128) - nope).abs() <= fp8_error(nope, scale)).all()
            assert (back[512:] == rows[number, 512:].to(torch.bfloat16)).all(), "rope is kept in bfloat16"
        assert arena.layer(0)["latent"].shape[-1] == 656


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_indexer_row_of_132_bytes_round_trips(power_of_two: bool) -> None:
    with arena_of(DSA(), LayerRequest(0, quant="fp8"), block_tokens=64) as arena:
        rows = loud(6, 128)
        write_tokens(arena.layer(0, "indexer"), SLOTS + 64, {"indexer": rows}, power_of_two=power_of_two)
        scales = arena.layer(0, "indexer").role("indexer").parts["scale"]
        for slot, number in ROWS.items():
            scale = scales[(slot + 64) // 64, (slot + 64) % 64, 0]
            if power_of_two:
                assert scale.log2() == scale.log2().round()
            (back,) = read(arena, "indexer", slot + 64)["indexer"]
            assert ((back - rows[number]).abs() <= fp8_error(rows[number], scale)).all()


def test_a_short_last_block_has_a_scale_too() -> None:
    with arena_of(MLA(192, 64), LayerRequest(0, quant="fp8")) as arena:
        rows = loud(6, 256)
        write_tokens(arena.layer(0), SLOTS, {"latent": rows})
        (back,) = read(arena, "latent", 50)["latent"]
        scale = rows[5, 128:192].abs().max() / 448
        assert ((back[128:192] - rows[5, 128:192]).abs() <= fp8_error(rows[5, 128:192], scale)).all()


@given(
    st.floats(-(2.0**99), 2.0**99, width=32),
    st.sampled_from([DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8, DType.INT4]),
)
@example(2.0**-132, DType.FLOAT8_E5M2)  # its scale is not normal any more, so it is far from exact
@example(3e-43, DType.INT8)
def test_the_largest_of_a_row_never_overflows(value: float, dtype: DType) -> None:
    for power_of_two in (False, True):
        quantiser = Quantiser(dtype, power_of_two=power_of_two)
        rows = torch.tensor([[value, value / 2]])
        back = quantiser.dequantise(*quantiser.quantise(rows))
        assert torch.isfinite(back).all()
        share = 4 if dtype is DType.INT4 and power_of_two else 8
        assert abs(float(back[0, 0]) - value) <= abs(value) / share * (1 + 1e-5) + 1e-30


@pytest.mark.parametrize(("quant", "largest"), [("fp8", 448.0), ("fp8_e5m2", 57344.0)])
def test_plain_roles_are_cast_and_fp8_without_scales_is_clamped(quant: str, largest: float) -> None:
    rows = torch.tensor([[[1e6, -1e6, 2.0, 0.0]]])
    with arena_of(GQA(), LayerRequest(0, heads=1, key_dim=4, quant=quant)) as arena:
        write_tokens(arena.layer(0), np.array([20]), {"key": rows, "value": rows / 1000})
        assert arena.layer(0)["key"][1, 0, 4].tolist() == [largest, -largest, 2.0, 0.0]
    with arena_of(GQA(), LayerRequest(0, heads=1, key_dim=4)) as arena:
        write_tokens(arena.layer(0), np.array([20]), {"key": rows})
        assert read(arena, "full", 20)["key"].dtype == torch.bfloat16


def test_nothing_is_written_where_one_role_does_not_fit() -> None:
    with arena_of(GQA(), LayerRequest(0, heads=3, key_dim=8, quant="int8")) as arena:
        with pytest.raises(BadRows, match=r"value@.* takes rows \[6, 3, 8\] torch.int8, not \[6, 3, 4\]"):
            write_tokens(arena.layer(0), SLOTS, {"key": loud(6, 3, 8), "value": loud(6, 3, 4)})
        assert not arena.pool("full").any()


def test_the_v4_row_of_584_bytes_round_trips() -> None:
    with Arena(lives()["v4"]) as arena:
        rows, slots = loud(6, 512), np.array([256 + 3, 512 + 255, 300, 1024, 1279, 800])
        layer = arena.layer(0)
        write_tokens(layer, slots, {"key": rows})
        scales = layer.role("key").parts["scale"].flatten(0, 1)
        for number, slot in enumerate(slots.tolist()):
            exponents = scales[slot]
            assert exponents[7] == 0, "padding"
            scale = torch.exp2(exponents[:7].float() - 127).unsqueeze(-1)
            (back,) = gather_tokens(layer, [slot // 256], slot % 256, slot % 256 + 1)["key"]
            nope = rows[number, :448].view(7, 64)
            assert ((back[:448].view(7, 64) - nope).abs() <= fp8_error(nope, scale)).all()
            assert (back[448:] == rows[number, 448:].to(torch.bfloat16)).all(), "rope is kept in bfloat16"


def mxfp4(dim: int = 128) -> Role:
    return Role.packed("indexer", [Part("values", (dim // 2,), DType.UINT8), Part("scale", (dim // 32,), DType.UINT8)])


def test_the_mxfp4_row_of_68_bytes_round_trips() -> None:
    rows = loud(6, 128)
    parts = pack(mxfp4(), rows)
    assert [(name, tuple(part.shape)) for name, part in parts.items()] == [("values", (6, 64)), ("scale", (6, 4))]
    scale = torch.exp2(parts["scale"].float() - 127).repeat_interleave(32, dim=1)
    assert (scale >= rows.abs() / 6).all(), "nothing overflows"
    limit = torch.maximum(rows.abs() / 5, scale / 4) * (1 + 1e-5)
    assert ((unpack(mxfp4(), parts) - rows).abs() <= limit).all()


def test_all_numbers_of_mxfp4_are_kept_low_half_first() -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0] * 2).view(1, 32)
    parts = pack(mxfp4(32), numbers)
    assert parts["values"][0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]
    assert parts["scale"].tolist() == [[127]]
    assert torch.equal(unpack(mxfp4(32), parts), numbers)


def test_layouts_of_others_are_not_guessed() -> None:
    strange = Role.packed("key", [Part("data", (99,), DType.UINT8), Part("scale", (3,), DType.UINT8)])
    with pytest.raises(BadRows, match=r"role 'key' \(data .*\) has a layout of its own"):
        pack(strange, torch.zeros(1, 512))
    with (
        arena_of(MLA(), LayerRequest(0, quant="fp8")) as arena,
        pytest.raises(BadRows, match=r"packs rows of 576 numbers, not \[1, 512\]"),
    ):
        write_tokens(arena.layer(0), np.array([20]), {"latent": torch.zeros(1, 512)})


def test_a_sequence_is_written_and_read_through_its_tables() -> None:
    with arena_of(
        GQA(), LayerRequest(0, heads=2, key_dim=16, quant="fp8_token_head"), block_tokens=8, kernel_tokens=4
    ) as arena:
        cache = Cache(arena.plan)
        sequence = cache.open(range(30))
        cache.extend(sequence, 30)
        rows = {name: loud(30, 2, 16) for name in ("key", "value")}
        write_tokens(arena.layer(0), cache.slots(sequence, "full", 0), rows)
        back = gather_tokens(arena.layer(0), cache.table("full")[sequence.row], 0, 30)
        scale = rows["key"].abs().amax(-1, keepdim=True) / 448
        assert ((back["key"] - rows["key"]).abs() <= fp8_error(rows["key"], scale)).all()

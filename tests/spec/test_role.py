"""Roles down to the byte: rows, packed and planar rows, aliases, alignment, shards, dtypes, order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import SpecError, UnknownName
from kvweave.spec import DType, Full, LayerCache, Part, Role, Segment
from kvweave.spec.role import PRIORITY, role_order
from tests import strategies

FP8, F32, BF16 = DType.FLOAT8_E4M3, DType.FLOAT32, DType.BFLOAT16

PACKED = {
    656: Role.packed("latent", [Part("nope", (512,), FP8), Part("scale", (4,), F32), Part("rope", (64,), BF16)]),
    132: Role.packed("indexer", [Part("values", (128,), FP8), Part("scale", (1,), F32)], planar=True),
    584: Role.packed(
        "compressed", [Part("data", (576,), DType.UINT8), Part("scale", (8,), DType.UINT8)], planar=True, align=576
    ),
    68: Role.packed(
        "indexer",
        [Part("values", (128,), DType.FLOAT4_E2M1), Part("scale", (4,), DType.FLOAT8_E8M0)],
        planar=True,
    ),
}


# ---- bytes of rows


@pytest.mark.parametrize("row_bytes", PACKED)
def test_a_packed_row_is_the_sum_of_its_parts(row_bytes: int) -> None:
    role = PACKED[row_bytes]
    assert role.row_bytes == row_bytes
    assert role.shape == (row_bytes,)
    assert role.dtype is DType.UINT8


@pytest.mark.parametrize(
    ("shape", "dtype", "row_bytes"),
    [
        ((8, 128), "bfloat16", 2048),
        ((576,), "bf16", 1152),
        ((512,), "fp8", 512),
        ((2, 128), "int4", 128),
        ((128,), "fp4", 64),
        ((3,), "int64", 24),
        ((32, 128, 128), "float32", 32 * 128 * 128 * 4),
        ((1, 0), "bfloat16", 0),
    ],
)
def test_a_row_is_its_elements(shape: tuple[int, ...], dtype: str, row_bytes: int) -> None:
    assert Role("key", shape, DType.parse(dtype)).row_bytes == row_bytes


@pytest.mark.parametrize(
    ("num_rows", "block_bytes"), [(32, 19008), (1, 1152), (2, 1728), (64, 37440), (128, 74880), (132, 77184)]
)
def test_rows_of_584_bytes_end_on_multiples_of_576(num_rows: int, block_bytes: int) -> None:
    assert PACKED[584].block_bytes(num_rows) == block_bytes


@given(strategies.roles(), st.integers(0, 300))
def test_a_block_holds_its_rows_and_less_than_one_alignment_more(role: Role, num_rows: int) -> None:
    over = role.block_bytes(num_rows) - role.row_bytes * num_rows
    assert 0 <= over < role.align
    assert role.block_bytes(num_rows) % role.align == 0


def test_an_alias_stores_nothing_of_its_own() -> None:
    key = Role("key", (1, 512), BF16)
    value = replace(key, name="value", alias_of="key")
    assert value.row_bytes == 0
    assert value.block_bytes(64) == 0
    assert LayerCache("window", Full(), (key, value)).bytes_per_token() == 1024


@given(strategies.roles())
def test_a_role_starts_where_all_its_elements_may(role: Role) -> None:
    for dtype in (role.dtype, *(part.dtype for part in role.parts)):
        assert role.start_align % max(1, dtype.bits // 8) == 0
    assert role.start_align % role.align == 0


# ---- shards


@pytest.mark.parametrize(
    ("units", "ranks", "mine"),
    [(8, 16, 1), (12, 8, 3), (8, 8, 1), (8, 4, 2), (8, 3, 8), (1, 8, 1), (10, 4, 5), (40, 16, 5), (96, 1, 96)],
)
def test_heads_are_divided_as_far_as_they_divide_and_replicated_beyond(units: int, ranks: int, mine: int) -> None:
    role = Role("key", (units, 128), BF16, token_axis=1, split=(Segment(units),))
    assert role.shard(ranks).shape == (mine, 128)
    assert role.shard(ranks).row_bytes == mine * 256


def test_a_convolution_splits_its_heads_and_replicates_its_one_group() -> None:
    """Bamba: 128 heads of 64 channels, then B and C of one group of 128."""
    conv = Role("conv_state", (8192 + 256, 3), BF16, split=(Segment(128, 64), Segment(1, 128), Segment(1, 128)))
    assert conv.shard(8).shape == (16 * 64 + 256, 3)
    assert conv.shard(8).split == (Segment(16, 64), Segment(1, 128), Segment(1, 128))


def test_groups_that_divide_are_divided_beside_the_heads() -> None:
    """Nemotron-H: 8 groups of 128 states."""
    pair = Segment(8, 128)
    conv = Role("conv_state", (128 * 80 + 2 * 1024, 3), BF16, split=(Segment(128, 80), pair, pair))
    assert conv.shard(4).shape == (32 * 80 + 2 * 256, 3)
    assert conv.shard(16).shape == (8 * 80 + 2 * 128, 3)


def test_a_role_without_a_split_is_whole_on_every_rank() -> None:
    latent = Role("latent", (576,), BF16)
    assert latent.shard(8) == latent
    assert PACKED[656].shard(8) == PACKED[656]


@given(strategies.roles(), st.integers(1, 16))
def test_the_distinct_shards_of_each_run_add_up_to_the_whole(role: Role, ranks: int) -> None:
    mine = role.shard(ranks)
    assert len(mine.split) == len(role.split)
    for whole, part in zip(role.split, mine.split, strict=True):
        distinct = math.gcd(whole.units, ranks) if whole.units else 1
        assert part.units * distinct == whole.units
        assert part.width == whole.width
    assert mine.shape[1:] == role.shape[1:]
    assert mine.row_bytes * ranks >= role.row_bytes


@given(strategies.roles(), st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3, 4)))
def test_a_shard_of_a_shard_is_a_shard(role: Role, outer: int, inner: int) -> None:
    units = [segment.units for segment in role.split]
    if all(count % (outer * inner) == 0 for count in units):
        assert role.shard(outer).shard(inner) == role.shard(outer * inner)


# ---- what a role may not be


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, ("a role needs a name",)),
        ({"shape": ()}, ("role 'key'", "shape", "()")),
        ({"shape": (8, -1)}, ("role 'key'", "shape", "-1")),
        ({"shape": (8, 1.5)}, ("role 'key'", "shape", "1.5")),
        ({"tokens_per_row": 0}, ("role 'key'", "tokens_per_row", "at least 1", "0")),
        ({"align": -4}, ("role 'key'", "align", "at least 1", "-4")),
        ({"token_axis": 3}, ("role 'key'", "token_axis 3", "2 axes")),
        ({"token_axis": -1}, ("role 'key'", "token_axis -1")),
        ({"planar": True}, ("role 'key'", "planar", "parts")),
        ({"split": (Segment(4), Segment(2, 3))}, ("role 'key'", "4 x 1 + 2 x 3", "8")),
        ({"shape": (1, 7), "dtype": DType.INT4}, ("role 'key'", "7 elements", "28 bits")),
        ({"shape": (2, 7), "dtype": DType.INT4}, ("role 'key'", "last axis", "28 bits")),
        ({"parts": (Part("a", (5,), FP8),)}, ("role 'key'", "5 bytes", "(8, 128)")),
    ],
)
def test_a_contradiction_is_named_with_its_field_and_numbers(change: dict[str, Any], words: tuple[str, ...]) -> None:
    given: dict[str, Any] = {"name": "key", "shape": (8, 128), "dtype": BF16}
    with pytest.raises(SpecError) as error:
        Role(**{**given, **change})
    for word in words:
        assert word in str(error.value)


def test_a_packed_row_is_not_divided() -> None:
    with pytest.raises(SpecError, match=r"role 'latent': packed rows are whole"):
        replace(PACKED[656], split=(Segment(656),))
    with pytest.raises(SpecError, match=r"role 'latent': packed rows are whole"):
        replace(PACKED[656], token_axis=1)


def test_a_part_of_half_a_byte_is_named() -> None:
    with pytest.raises(SpecError, match=r"part 'values': 3 elements of int4 are 12 bits"):
        Role.packed("indexer", [Part("values", (3,), DType.INT4)])


# ---- dtypes


@pytest.mark.parametrize("dtype", DType)
def test_a_dtype_has_the_bits_that_its_name_says(dtype: DType) -> None:
    number = "".join(char if char.isdigit() else " " for char in dtype.value).split()[0]
    assert dtype.bits == int(number)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", BF16),
        ("torch.bfloat16", BF16),
        ("half", DType.FLOAT16),
        ("Float32", F32),
        ("fp8", FP8),
        ("fp8_e5m2", DType.FLOAT8_E5M2),
        (DType.INT4, DType.INT4),
    ],
)
def test_a_dtype_is_known_by_its_short_names(name: str, dtype: DType) -> None:
    assert DType.parse(name) is dtype
    assert Role("key", (2,), name).dtype is dtype  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "nearest"), [("bfloat61", "bfloat16"), ("flot32", "float32"), ("fp88", "fp8")])
def test_an_unknown_dtype_suggests_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown dtype '{wrong}'; did you mean '{nearest}'"):
        DType.parse(wrong)


def test_a_dtype_like_none_lists_what_is_known() -> None:
    with pytest.raises(UnknownName, match=r"known: .*bfloat16"):
        DType.parse("???")


# ---- order


def test_roles_come_in_the_order_of_the_contract_whatever_the_caller_says() -> None:
    names = ["zebra", "ssm_state", "value", "apple", "indexer", "key"]
    cache = LayerCache("full", Full(), tuple(Role(name, (2,), BF16) for name in names))
    assert [role.name for role in cache.roles] == ["key", "value", "indexer", "ssm_state", "apple", "zebra"]
    assert sorted(PRIORITY, key=role_order) == list(PRIORITY)

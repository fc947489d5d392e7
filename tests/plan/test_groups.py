"""Blocks and kernel blocks: what a sequence holds, how a page divides, and which sizes a group may have."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvweave import from_config, make_plan
from kvweave.errors import PlanError, UnknownName
from kvweave.plan import Group, Plan
from kvweave.spec import Chunk, DType, Full, Layer, LayerCache, ModelSpec, Part, Reach, Role, SinkWindow, State, Window
from tests import strategies

KEY = Role("key", (2, 8), DType.BFLOAT16)


def group(reach: Reach, block_tokens: int, context_shards: int = 1) -> Group:
    return Group("full", LayerCache("full", reach, (KEY,)), (0,), block_tokens, block_tokens, context_shards)


def blocks_while_computing(reach: Reach, position: int, size: int) -> set[int]:
    """The blocks of every token that the query at a position reads, and of its own."""
    tokens = set(range(min(reach.head, position + 1))) | set(range(reach.tail(position), position + 1))
    return {token // size for token in tokens}


# ---- what a sequence holds


@settings(max_examples=200)
@given(strategies.reaches, st.integers(1, 20), st.integers(0, 200), st.integers(1, 5))
@example(SinkWindow(40, 70), 4, 60, 1)  # sinks that the window still covers
@example(SinkWindow(4, 9), 8, 60, 2)
def test_blocks_held_are_the_most_of_any_position_on_the_way(reach: Reach, size: int, length: int, ranks: int) -> None:
    """With context parallelism the ranks allocate a block each at a time, as the core's tables do."""
    held = group(reach, size, ranks).num_blocks_held(length)
    if not reach.per_token:
        assert held == min(length, 1)
        return
    counts = [len(blocks_while_computing(reach, position, size * ranks)) for position in range(length)]
    assert held == max(counts, default=0)


def test_a_chunk_may_have_held_more_blocks_long_before_the_end() -> None:
    """Chunks of 67 tokens in blocks of 64 straddle three blocks only where they start at 62 or 63."""
    counts = [len(blocks_while_computing(Chunk(67), position, 64)) for position in range(5200)]
    assert max(counts) == 3 > max(counts[-300:])
    assert group(Chunk(67), 64).num_blocks_held(5200) == 3


@pytest.mark.parametrize(
    ("reach", "length", "held"),
    [
        (Full(), 100, 7),
        (Full(), 96, 6),
        (Window(128), 10**6, 9),
        (Window(129), 10**6, 9),
        (Window(130), 10**6, 10),
        (Window(16), 10**6, 2),
        (Window(1), 10**6, 1),
        (Chunk(64), 10**6, 4),
        (SinkWindow(4, 32), 10**6, 4),
        (State(), 10**6, 1),
    ],
)
def test_blocks_held_of_known_reaches(reach: Reach, length: int, held: int) -> None:
    assert group(reach, 16).num_blocks_held(length) == held


@pytest.mark.parametrize("length", [0, -5])
def test_a_sequence_of_nothing_holds_nothing(length: int) -> None:
    assert group(Full(), 16).num_blocks_held(length) == 0
    assert group(State(), 16).num_blocks_held(length) == 0


def test_sinks_and_window_may_meet_on_one_rank() -> None:
    """Blocks 0 and 4 are both rank 0's of 4, though two blocks on four ranks would be one each."""
    assert group(SinkWindow(4, 1), 4, 4).num_blocks_held(18) == 2


@pytest.mark.parametrize("reach", [Full(), Window(37), Chunk(67), Chunk(64), SinkWindow(40, 70)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_held_of_a_long_sequence_are_found_in_its_last_part(
    monkeypatch: pytest.MonkeyPatch, reach: Reach, ranks: int
) -> None:
    whole = [group(reach, 16, ranks).num_blocks_held(length) for length in range(3000, 12_000, 777)]
    monkeypatch.setattr("kvweave.plan.group.MOST_BLOCKS", 210)
    assert [group(reach, 16, ranks).num_blocks_held(length) for length in range(3000, 12_000, 777)] == whole


@pytest.mark.parametrize(
    ("reach", "held"), [(Full(), 2**36), (Window(4096), 257), (Chunk(8191), 513), (SinkWindow(4, 32), 4)]
)
def test_blocks_held_of_a_trillion_tokens_take_no_memory_by_their_number(reach: Reach, held: int) -> None:
    tracemalloc.start()
    assert group(reach, 16).num_blocks_held(2**40) == held
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_ranks_may_be_many() -> None:
    assert group(SinkWindow(4, 32), 16, 10**9).num_blocks_held(10**6) == 1


def test_a_chunk_that_repeats_too_late_to_be_counted_is_refused_with_the_cure() -> None:
    with pytest.raises(PlanError, match=r"repeats after 16,777,213 blocks only.*a block size that divides 16,777,213"):
        group(Chunk(2**24 - 3), 16).num_blocks_held(2**30)


# ---- how a page divides


@given(strategies.plans(most_bytes=1000))
def test_a_block_is_its_kernel_blocks(made: Plan) -> None:
    for held in made.groups:
        one = replace(held, block_tokens=held.kernel_tokens)
        assert one.kernel_blocks == 1
        assert held.payload_bytes == held.kernel_blocks * one.payload_bytes
        assert held.page_bytes == held.kernel_blocks * one.page_bytes
        assert held.block_tokens == held.kernel_blocks * held.kernel_tokens
        if held.layers:
            assert held.page_stride == held.kernel_blocks * held.kernel_stride


@given(strategies.plans(most_bytes=1000))
def test_the_rows_of_a_page_are_those_of_its_tokens(made: Plan) -> None:
    for held in made.groups:
        rows = 1 if not held.cache.reach.per_token else held.block_tokens
        per_token = sum(role.row_bytes * rows // role.tokens_per_row for role in held.cache.roles)
        assert held.payload_bytes == per_token * len(held.layers)


@given(strategies.plans(most_bytes=1000))
def test_roles_of_a_kernel_block_follow_one_another_without_overlap(made: Plan) -> None:
    for held in made.groups:
        end = 0
        for role in held.cache.roles:
            if role.alias_of is None:
                start = held.role_offsets[role.name]
                assert start >= end
                assert start - end < role.start_align
                assert start % role.start_align == 0
                end = start + role.block_bytes(held.num_rows(role))
        assert 0 <= held.layer_bytes - end < held.layer_align


# ---- which sizes a group may have


PLANAR = Role.packed(
    "indexer", [Part("values", (128,), DType.FLOAT8_E4M3), Part("scale", (1,), DType.FLOAT32)], planar=True
)
CACHES = {
    "full": LayerCache("full", Full(), (KEY,)),
    "indexer": LayerCache("indexer", Full(), (PLANAR,), kernel_tokens=64),
    "rows": LayerCache("rows", Full(), (replace(KEY, tokens_per_row=4),)),
    "wish": LayerCache("wish", Window(8), (KEY,), block_tokens=4),
    "state": LayerCache("state", State(), (Role("ssm_state", (64,), DType.FLOAT32),)),
}
SPEC = ModelSpec("all", (Layer(tuple(CACHES.values())),))


def sizes(**how: Any) -> dict[str, tuple[int, int]]:
    return {held.tag: (held.block_tokens, held.kernel_tokens) for held in make_plan(SPEC, "10MB", **how).groups}


def test_a_group_gets_what_is_asked_for_or_the_least_that_it_can_do_with() -> None:
    assert sizes() == {"full": (16, 16), "indexer": (64, 64), "rows": (16, 16), "wish": (4, 4), "state": (16, 16)}
    assert sizes(block_tokens=6)["rows"] == (8, 8)
    assert sizes(block_tokens=100)["indexer"] == (128, 64)
    assert sizes(block_tokens=256)["indexer"] == (256, 64)


def test_a_block_that_grew_is_noted() -> None:
    notes = make_plan(SPEC, "10MB").notes
    assert notes == ("group 'indexer' has blocks of 64 tokens, not 16: its rows and kernel need 64",)


def test_block_tokens_are_free_by_group() -> None:
    wish = {"full": 32, "indexer": 128, "rows": 8, "wish": 12, "state": 1024}
    assert {tag: block for tag, (block, _) in sizes(block_tokens=wish).items()} == wish
    assert sizes(block_tokens={"full": 32})["rows"] == (16, 16)


def test_a_named_group_that_cannot_have_its_block_is_an_error() -> None:
    with pytest.raises(PlanError, match="group 'indexer': block_tokens 96 is no multiple of 64"):
        sizes(block_tokens={"indexer": 96})
    with pytest.raises(PlanError, match="group 'rows': block_tokens 6 is no multiple of 4"):
        sizes(block_tokens={"rows": 6})


@pytest.mark.parametrize("block_tokens", [0, -16, {"full": 0}, {"full": -1}])
def test_a_block_of_nothing_is_an_error(block_tokens: Any) -> None:
    with pytest.raises(PlanError, match="group 'full': block_tokens must be at least 1, got"):
        sizes(block_tokens=block_tokens)


def test_kernel_tokens_divide_the_blocks_that_they_apply_to() -> None:
    assert sizes(block_tokens=64, kernel_tokens=16) == {
        "full": (64, 16),
        "indexer": (64, 64),
        "rows": (64, 16),
        "wish": (4, 4),
        "state": (64, 64),
    }
    assert sizes(block_tokens=64, kernel_tokens={"full": 8})["full"] == (64, 8)
    assert sizes(block_tokens=64, kernel_tokens={"full": 8})["rows"] == (64, 64)


def test_a_planar_page_is_never_split_below_its_kernel() -> None:
    assert sizes(block_tokens=256, kernel_tokens=16)["indexer"] == (256, 64)
    with pytest.raises(PlanError, match="group 'indexer': kernel_tokens 16 is no multiple of 64"):
        sizes(block_tokens=256, kernel_tokens={"indexer": 16})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"kernel_tokens": 32}, ("group 'full'", "kernel_tokens 32", "block_tokens 16")),
        ({"kernel_tokens": 12}, ("group 'full'", "kernel_tokens 12", "block_tokens 16")),
        ({"kernel_tokens": {"rows": 2}}, ("group 'rows'", "kernel_tokens 2", "4")),
        ({"kernel_tokens": 0}, ("group 'full'", "kernel_tokens 0")),
        ({"kernel_tokens": -8}, ("group 'full'", "kernel_tokens -8")),
    ],
)
def test_kernel_tokens_that_do_not_divide_are_an_error_with_both_numbers(
    how: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as error:
        sizes(**how)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["block_tokens", "kernel_tokens"])
def test_sizes_for_a_tag_that_is_not_there_suggest_the_nearest(name: str) -> None:
    with pytest.raises(UnknownName, match=r"unknown tag 'indxer'; did you mean 'indexer'\?"):
        sizes(**{name: {"indxer": 64}})


def test_attention_blocks_stay_small_beside_states_of_megabytes() -> None:
    """What the shared pool is for: 16 tokens a block, where one page size would make them hundreds."""
    spec = from_config(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 8,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "dtype": "bfloat16",
        }
    )
    made = make_plan(spec, "1GiB")
    assert made.group("full").block_tokens == 16
    assert made.group("state").page_bytes > 100 * made.group("full").page_bytes
    assert made.padding_share() <= 0.05


def test_positions_may_be_many() -> None:
    """A million tokens in blocks of one: held is found over blocks, not by a walk in Python."""
    assert group(Window(5000), 1).num_blocks_held(10**6) == 5000
    assert isinstance(group(Window(5000), 16).num_blocks_held(10**6), int)
    assert np.ceil(5000 / 16) <= group(Window(5000), 16).num_blocks_held(10**6) <= np.ceil(5000 / 16) + 1

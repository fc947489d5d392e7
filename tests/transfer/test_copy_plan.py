"""Copy plans: which pages go where, by the reach formula and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import make_plan
from kvweave.errors import BadCopy
from kvweave.plan import Layout, Plan
from kvweave.pool import NULL
from kvweave.spec import Layer, LayerCache, ModelSpec, Reach
from kvweave.transfer import ChunkLayout, CopyPlan, join, make_move, needed, whole_chunks
from kvweave.transfer.check import MemoryRange, check_buffers, check_pages, check_places
from kvweave.transfer.pieces import num_layers, part_bytes, split_by_layers, split_by_size
from tests import strategies
from tests.tensor.models import HYBRID, KEY, VALUE

MADE = make_plan(HYBRID, "2MB", block_tokens=8, layout=Layout.LAYER_MAJOR)
LAYOUT = ChunkLayout.of(MADE, 16)


def tables(num_chunks: int = 8) -> dict[str, np.ndarray]:
    return {
        "full": np.arange(100, 100 + 2 * num_chunks),
        "window": np.arange(200, 200 + 2 * num_chunks),
        "state": np.arange(300, 300 + num_chunks),
    }


def places(copies: CopyPlan, tag: str) -> set[tuple[int, int, int]]:
    """(page, chunk number, block)"""
    return {
        (int(page), copies.chunks[chunk], int(block))
        for move in copies.moves
        if move.tag == tag
        for page, chunk, block in zip(move.pages, move.chunks, move.blocks, strict=True)
    }


def test_whole_chunks_hold_every_block_and_the_state_at_their_ends() -> None:
    copies = whole_chunks(LAYOUT, tables(), 2, 4)
    assert copies.chunks == (2, 3)
    assert places(copies, "full") == {(104, 2, 0), (105, 2, 1), (106, 3, 0), (107, 3, 1)}
    assert places(copies, "state") == {(302, 2, 0), (303, 3, 0)}
    sizes = {part.tag: part.block_bytes for part in LAYOUT.groups}
    assert copies.num_bytes == 4 * sizes["full"] + 4 * sizes["window"] + 2 * sizes["state"]
    assert copies.num_pages == 10


def test_what_is_needed_is_the_tail_of_every_group() -> None:
    copies = needed(LAYOUT, tables(), 64)
    assert {page for page, _, _ in places(copies, "full")} == set(range(100, 108))
    assert {page for page, _, _ in places(copies, "window")} == {205, 206, 207}
    assert places(copies, "state") == {(303, 3, 0)}


@given(
    reach=strategies.reaches,
    position=st.integers(0, 160),
    skip=st.integers(0, 10),
    block=st.sampled_from((4, 8, 16)),
)
def test_needed_is_the_formula_token_by_token(reach: Reach, position: int, skip: int, block: int) -> None:
    made = make_plan(ModelSpec("x", (Layer((LayerCache("x", reach, (KEY, VALUE)),)),)), "2MB", block_tokens=block)
    layout = ChunkLayout.of(made, 32)
    width = 160 // block if reach.per_token else 5
    copies = needed(layout, {"x": np.arange(1, width + 1)}, position, skip=skip * block)
    if reach.per_token:
        tokens = {*range(min(reach.head, position)), *range(int(reach.tail(position)), position)}
        blocks = {token // block for token in tokens if token >= skip * block}
        expected = {(b + 1, b * block // 32, b % (32 // block)) for b in blocks}
    else:
        expected = {(-(-position // 32), -(-position // 32) - 1, 0)} if position else set()
    assert places(copies, "x") == expected


def test_null_pages_are_errors_unless_they_may_be_absent() -> None:
    rows = tables()
    rows["window"][:5] = rows["state"][:3] = NULL
    with pytest.raises(BadCopy, match="block 0 of 'window' has no page .*absent=True"):
        whole_chunks(LAYOUT, rows, 0, 4)
    copies = whole_chunks(LAYOUT, rows, 0, 4, absent=True)
    assert {page for page, _, _ in places(copies, "window")} == {205, 206, 207}
    assert len(needed(LAYOUT, rows, 64).moves) == 3


def test_tokens_to_skip_are_whole_blocks() -> None:
    assert {page for page, _, _ in places(needed(LAYOUT, tables(), 64, skip=40), "full")} == {105, 106, 107}
    with pytest.raises(BadCopy, match="20 tokens to skip are no whole number .* 'full', which span 8 tokens; skip 16"):
        needed(LAYOUT, tables(), 64, skip=20)
    with pytest.raises(BadCopy, match="-8 tokens to skip"):
        whole_chunks(LAYOUT, tables(), 0, 1, skip=-8)


def test_what_the_tables_do_not_have_is_named() -> None:
    with pytest.raises(BadCopy, match="blocks up to 17 of 'full' are wanted, but its table has 16 pages"):
        whole_chunks(LAYOUT, tables(), 8, 9)
    with pytest.raises(BadCopy, match="no table for 'window'; make the layout of the tags full"):
        whole_chunks(LAYOUT, {"full": [1, 2]}, 0, 1)
    with pytest.raises(BadCopy, match="chunks 2 to 1 are no range"):
        whole_chunks(LAYOUT, tables(), 2, 1)
    with pytest.raises(BadCopy, match="position -1"):
        needed(LAYOUT, tables(), -1)


def test_ends_only_chunks_cannot_be_entered_in_the_middle() -> None:
    near = LayerCache("near", HYBRID.layers[1].caches[0].reach, (KEY, VALUE))
    made = make_plan(ModelSpec("x", (Layer((near,)),)), "2MB", block_tokens=8)
    layout = ChunkLayout.of(made, 64, ends_only=True)
    assert len(needed(layout, {"near": np.arange(1, 9)}, 64).moves[0]) == 3
    with pytest.raises(BadCopy, match="block 2 of 'near', needed at 40, .* go on from a multiple of 64"):
        needed(layout, {"near": np.arange(1, 9)}, 40)


def test_plans_are_joined_in_order() -> None:
    copies = join([needed(LAYOUT, tables(), 32), whole_chunks(LAYOUT, tables(), 4, 5)])
    assert copies.chunks == (0, 1, 4)
    assert copies.num_bytes == needed(LAYOUT, tables(), 32).num_bytes + whole_chunks(LAYOUT, tables(), 4, 5).num_bytes
    assert (108, 4, 0) in places(copies, "full")
    assert [move.tag for move in copies.only(["state"]).moves] == ["state"]
    with pytest.raises(BadCopy, match="plans of two layouts"):
        join([copies, whole_chunks(ChunkLayout.of(MADE, 32), tables(), 0, 1)])
    with pytest.raises(BadCopy, match="no plans"):
        join([])


def test_plans_do_not_change_when_the_tables_do() -> None:
    rows = tables()
    copies = whole_chunks(LAYOUT, rows, 0, 1)
    rows["full"][:] = 7
    assert places(copies, "full") == {(100, 0, 0), (101, 0, 1)}
    with pytest.raises(ValueError, match="read-only"):
        copies.moves[0].pages[0] = 3


def check(copies: CopyPlan, extents: list[MemoryRange] | None = None, fills_pages: bool = True) -> None:
    size = copies.layout.num_bytes
    given = [MemoryRange("cpu", 10_000 * i, size) for i in range(len(copies.chunks))] if extents is None else extents
    check_buffers(copies, given, fills_chunks=not fills_pages)
    check_places(copies, fills_chunks=not fills_pages)
    check_pages(copies, MADE, fills_pages=fills_pages)


def one(tag: str, pages: list[int], chunks: list[int], blocks: list[int]) -> CopyPlan:
    return CopyPlan(LAYOUT, (0, 1), (make_move(tag, pages, chunks, blocks),))


def test_pages_and_places_that_are_not_there_are_named() -> None:
    first = MADE.group("full").pages_per_superpage
    past = MADE.num_pages("full") + first
    for page in (-1, first - 1, past):
        with pytest.raises(
            BadCopy, match=f"page {page}.* of 'full' is out of range: its pages are {first} to {past - 1}"
        ):
            check(one("full", [page], [0], [0]))
    with pytest.raises(BadCopy, match="chunk 2 of 'full' is not among the plan's 2"):
        check(one("full", [first], [2], [0]))
    with pytest.raises(BadCopy, match="block 2 of 'full' is not in a chunk: it holds 0 to 1"):
        check(one("full", [first], [0], [2]))
    with pytest.raises(BadCopy, match="2 pages of 'full' for 1 chunks"):
        one("full", [1, 2], [0], [0])


def test_nothing_is_filled_twice() -> None:
    first = MADE.group("full").pages_per_superpage
    with pytest.raises(BadCopy, match=f"page {first} of 'full' would be filled twice"):
        check(one("full", [first, first], [0, 1], [0, 0]))
    check(one("full", [first, first], [0, 1], [0, 0]), fills_pages=False)
    with pytest.raises(BadCopy, match="block 1 of 'full' would be filled twice in chunk 0"):
        check(one("full", [first, first + 1], [0, 0], [1, 1]), fills_pages=False)
    with pytest.raises(BadCopy, match="buffers of chunks 0 and 1 overlap"):
        size = LAYOUT.num_bytes
        check(one("full", [first], [0], [0]), [MemoryRange("cpu", 0, size), MemoryRange("cpu", size - 1, size)], False)


def test_two_groups_never_fill_one_super_page() -> None:
    moves = [make_move(tag, [MADE.group(tag).pages_per_superpage], [0], [0]) for tag in ("full", "window")]
    with pytest.raises(BadCopy, match="pages of 'full' and 'window' are in super-page 1, which only one can own"):
        check(CopyPlan(LAYOUT, (0,), tuple(moves)))


@given(
    made=strategies.plans(most_bytes=10_000),
    small=st.integers(1, 4096),
    large=st.integers(1, 20_000),
    layers=st.sampled_from((None, 1, 2, 5)),
    rising=st.booleans(),
)
def test_pieces_hold_every_layer_of_every_page_once(
    made: Plan, small: int, large: int, layers: int | None, rising: bool
) -> None:
    layout = ChunkLayout.of(made, 32 * 3)
    moves = [
        make_move(
            part.tag,
            np.arange(3 * part.num_blocks),
            np.arange(3).repeat(part.num_blocks),
            [*range(part.num_blocks)] * 3,
        )
        for part in layout.groups
    ]
    copies = CopyPlan(layout, (0, 1, 2), tuple(moves))
    pieces = list(
        split_by_layers(copies, layers, large) if layers else split_by_size(copies, small, large, rising=rising)
    )
    seen: set[tuple[int, int, int]] = set()
    for piece in pieces:
        assert piece.num_bytes == sum(part_bytes(copies, part) for part in piece.parts)
        for part in piece.parts:
            cells = {
                (part.move, entry, layer)
                for entry in range(part.first, part.last)
                for layer in range(part.low, part.high)
            }
            assert cells
            assert not cells & seen
            seen |= cells
        check_layers(copies, seen, piece.layers)
    assert sum(piece.num_bytes for piece in pieces) == copies.num_bytes
    assert pieces[-1].layers >= num_layers(copies)


def check_layers(copies: CopyPlan, seen: set[tuple[int, int, int]], layers: int) -> None:
    """All of the model's layers below `layers` were seen."""
    for number, move in enumerate(copies.moves):
        own = copies.layout.group(move.tag).group.layers
        for slot, layer in enumerate(own):
            assert layer >= layers or all((number, entry, slot) in seen for entry in range(len(move)))


def test_pieces_are_small_where_a_pipeline_starts_or_ends() -> None:
    copies = whole_chunks(LAYOUT, tables(), 0, 8)
    grain = 2 * LAYOUT.group("full").block_bytes
    rising, falling = (
        [p.num_bytes for p in split_by_size(copies, grain, 8 * grain, rising=up)] for up in (True, False)
    )
    assert rising[0] <= grain < max(rising)
    assert falling[-1] <= grain < max(falling)
    assert sum(rising) == sum(falling) == copies.num_bytes
    assert len(falling) == len(rising), "what is left over is no piece of its own at the end"

"""Rows by slot, states by page, whole pages: written here, read back there, and nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import Cache, make_plan
from kvweave.cache import Copy
from kvweave.errors import BadRows, UnknownName
from kvweave.plan import Parallel, Plan
from kvweave.spec import Full, Layer, LayerCache, ModelSpec, Role
from kvweave.tensor import (
    Arena,
    RoleView,
    carry_out,
    copy_pages,
    gather_rows,
    read_rows,
    row_slots,
    write_rows,
    zero_pages,
)
from kvweave.tensor.torch_dtypes import flat_bytes
from tests import strategies
from tests.tensor.engine import same, sign
from tests.tensor.models import HYBRID, STATE, lives

PLANS = lives()


def all_views(arena: Arena) -> list[RoleView]:
    return [arena.layer(view.layer, view.tag).role(view.role) for view in arena.plan.views()]


@settings(max_examples=60)
@given(strategies.plans(most_bytes=60_000), st.data())
def test_what_is_written_through_one_view_is_read_there_and_seen_by_no_other(made: Plan, data: st.DataObject) -> None:
    """Any role: packed, planar, askew, narrow, compressed, aliased, of states."""
    with Arena(made) as arena:
        views = [view for view in all_views(arena) if view.role.alias_of is None and view.role.row_bytes]
        view = data.draw(st.sampled_from(views))
        tokens = view.role.tokens_per_row
        numbers = data.draw(st.lists(st.integers(0, view.num_slots // tokens - 1), max_size=9, unique=True))
        slots = np.array(numbers, np.int64) * tokens
        for pool in made.pools:
            arena.pool(pool.name).fill_(0)
        rows = sign(view, numbers)
        write_rows(view, slots, rows)
        assert same(read_rows(view, slots), rows)
        written = sum(int((arena.pool(pool.name) != 0).sum()) for pool in made.pools)
        assert written == int((flat_bytes(rows) != 0).sum()), "a byte elsewhere was touched"


def test_rows_are_where_the_page_and_the_offset_say() -> None:
    with Arena(PLANS["hybrid page_major"]) as arena:  # blocks of 8 tokens, kernel blocks of 4
        view = arena.layer(4).role("key")
        rows = torch.arange(3 * 16).view(3, 2, 8).to(torch.bfloat16)
        write_rows(view, np.array([5 * 8 + 6, -1, 7 * 8 + 1]), rows)
        assert (view.tensor[5 * 2 + 1, :, 2] == rows[0]).all()
        assert (view.tensor[7 * 2, :, 1] == rows[2]).all()
        assert not view.tensor[0].any(), "-1 is skipped, not sent to the NULL page"
        assert (view.tensor != 0).sum() == (rows[[0, 2]] != 0).sum()


def test_slots_may_be_tensors_and_rows_any_strides() -> None:
    with Arena(PLANS["hybrid page_major"]) as arena:
        view = arena.layer(0).role("value")
        rows = torch.randn(8, 2, 4).to(torch.bfloat16).permute(2, 1, 0)
        slots = torch.tensor([9, 40, 11, 88])
        write_rows(view, slots, rows)
        assert same(read_rows(view, slots), rows)


def test_states_go_by_page() -> None:
    with Arena(PLANS["hybrid layer_major"]) as arena:
        view = arena.layer(3).role("ssm_state")
        states = torch.randn(2, 4, 8, 8)
        write_rows(view, np.array([7, 3]), states)
        assert same(view.tensor[3], states[1])
        assert same(read_rows(view, np.array([7])), states[:1])
        assert not arena.layer(2)["ssm_state"].any()
        with pytest.raises(BadRows, match="'state' holds states, not tokens: read them by page"):
            gather_rows(view, np.ones(4), 0, 4)


def test_packed_rows_may_be_written_by_part_and_a_page_is_planar() -> None:
    with Arena(PLANS["dsa fp8"]) as arena:
        view = arena.layer(1, "indexer").role("indexer")
        values, scale = torch.randn(2, 128).to(torch.float8_e4m3fn), torch.randn(2, 1)
        write_rows(view, np.array([64 * 5, 64 * 5 + 63]), {"values": values, "scale": scale})
        page = view.tensor[5]
        assert same(page[:128], values[0].view(torch.uint8))
        assert same(page[63 * 128 : 64 * 128], values[1].view(torch.uint8))
        assert same(page[64 * 128 :].view(torch.float32)[[0, 63]], scale.ravel())
        whole = read_rows(view, np.array([64 * 5 + 63]))
        assert same(whole, torch.cat([values[1:].view(torch.uint8), scale[1:].view(torch.uint8)], dim=1))


def test_compressed_rows_are_written_where_they_end() -> None:
    slots = np.array([6, 7, 8, -1, 10, 11, 19])
    assert row_slots(slots, 4).tolist() == [7, 11, 19]
    assert row_slots(slots, 1).tolist() == [6, 7, 8, 10, 11, 19]


def test_a_gather_of_compressed_rows_takes_whole_rows_only() -> None:
    cache = LayerCache("csa", Full(), (Role("compressed", (4,), "float32", tokens_per_row=4),))  # type: ignore[arg-type]
    with Arena(make_plan(ModelSpec("csa", (Layer((cache,)),)), "1MB", block_tokens=8)) as arena:
        view = arena.layer(0).role("compressed")
        table = np.array([3, 9, 2])
        rows = torch.arange(5.0)[:, None].expand(5, 4)
        write_rows(view, np.array([3 * 8 + 3, 3 * 8 + 7, 9 * 8 + 3, 9 * 8 + 7, 2 * 8 + 3]), rows)
        assert gather_rows(view, table, 0, 23)[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert gather_rows(view, table, 5, 16)[:, 0].tolist() == [2, 3]
        assert gather_rows(view, table, 5, 7).shape == (0, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_writes_and_gathers_its_own_blocks(rank: int) -> None:
    cache = LayerCache("full", Full(), (Role("key", (2,), "float32"),), context_split=True)  # type: ignore[arg-type]
    spec = ModelSpec("cp", (Layer((cache,)),))
    made = make_plan(spec, "64kB", block_tokens=4, parallel=Parallel(cp=2, cp_rank=rank))
    books = Cache(made)
    with Arena(made) as arena:
        sequence = books.open(range(27))
        carry_out(arena, books.extend(sequence, 27))
        view = arena.layer(0).role("key")
        rows = torch.arange(27.0)[:, None].expand(27, 2)
        write_rows(view, books.slots(sequence, "full", 0), rows)
        mine = [t for t in range(3, 27) if t // 4 % 2 == rank]
        assert gather_rows(view, books.table("full")[sequence.row], 3, 27)[:, 0].tolist() == mine


# ---- refusals leave everything as it was


def test_rows_that_do_not_fit_are_refused_with_both_shapes() -> None:
    with Arena(PLANS["hybrid page_major"]) as arena:
        view = arena.layer(0).role("key")
        good, slots = torch.ones(2, 2, 8, dtype=torch.bfloat16), np.array([8, 9])
        with pytest.raises(
            BadRows, match=r"takes rows \[2, 2, 8\] torch.bfloat16, not \[2, 2, 8\] torch.float32; cast"
        ):
            write_rows(view, slots, good.float())
        with pytest.raises(BadRows, match=r"takes rows \[1, 2, 8\]"):
            write_rows(view, slots[:1], good)
        for wrong in (-2, view.num_slots):
            with pytest.raises(BadRows, match=rf"slot {wrong} is not among the {view.num_slots} of layer.0/full/key@"):
                write_rows(view, np.array([8, wrong]), good)
        with pytest.raises(BadRows, match="slot -1 is not among"):
            read_rows(view, np.array([-1]))
        assert not view.tensor.any()


def test_packed_rows_that_do_not_fit_are_refused() -> None:
    with Arena(PLANS["dsa fp8"]) as arena:
        view = arena.layer(0, "indexer").role("indexer")
        with pytest.raises(BadRows, match=r"packed rows of 132 bytes, not \[1, 128\] torch.uint8"):
            write_rows(view, np.array([64]), torch.zeros(1, 128, dtype=torch.uint8))
        with pytest.raises(BadRows, match="has the parts scale, values, not values"):
            write_rows(view, np.array([64]), {"values": torch.zeros(1, 128)})


def test_tokens_whose_page_is_gone_are_an_error_and_not_zeros() -> None:
    with Arena(PLANS["hybrid page_major"]) as arena:
        view = arena.layer(1).role("key")
        table = np.array([0, 12, 13])
        assert gather_rows(view, table, 8, 20).shape == (12, 2, 8)
        with pytest.raises(BadRows, match="token 7 of 'window' has no page"):
            gather_rows(view, table, 7, 20)
        with pytest.raises(BadRows, match="tokens 8 to 25 of 'window' are outside a table row of 3 pages"):
            gather_rows(view, table, 8, 25)


# ---- whole pages


@pytest.mark.parametrize("name", PLANS)
def test_a_copied_page_has_every_layer_role_and_lane(name: str) -> None:
    made = PLANS[name]
    for group in made.groups:
        with Arena(made) as arena:
            pages = arena.pages(group.tag)
            first, last = group.pages_per_superpage, len(pages) - 1
            pages[first] = torch.randint(1, 255, pages[first].shape, dtype=torch.uint8)
            carry_out(arena, [Copy(group.tag, np.array([first], np.int32), np.array([last], np.int32))])
            for layer in group.layers:
                for view in arena.layer(layer, group.tag).roles.values():
                    each = view.tensor.view(len(pages), -1, *view.tensor.shape[1:])
                    assert each[first].view(torch.uint8).all()
                    assert same(each[last], each[first])
            assert not pages[first + 1 : last].any()


def test_copies_are_made_in_order_within_one_and_between_several() -> None:
    with Arena(PLANS["hybrid independent"]) as arena:
        pages = arena.pages("full")
        for number in (1, 2, 3, 4):
            pages[number] = number
        ids = [np.array(numbers, np.int32) for numbers in ((1, 2), (2, 3), (4,), (1,))]
        carry_out(arena, [Copy("full", ids[0], ids[1]), Copy("full", ids[2], ids[3])])
        assert [int(pages[number].unique()) for number in (1, 2, 3, 4)] == [4, 1, 1, 4]


def test_a_copy_that_makes_no_sense_is_found_before_any_is_made() -> None:
    with Arena(PLANS["hybrid independent"]) as arena:
        pages = arena.pages("full")
        pages[1] = 9
        good = Copy("full", np.array([1], np.int32), np.array([2], np.int32))
        for wrong, text in ((0, r"page 0 \(the NULL page\) of 'full' is out of range"), (41, "its pages are 1 to 40")):
            with pytest.raises(BadRows, match=text):
                carry_out(arena, [good, Copy("full", np.array([1], np.int32), np.array([wrong], np.int32))])
        with pytest.raises(BadRows, match="1 pages of 'full' cannot become 2"):
            carry_out(arena, [good, Copy("full", np.array([1], np.int32), np.array([2, 3], np.int32))])
        with pytest.raises(UnknownName, match="'ful'; did you mean 'full'"):
            carry_out(arena, [good, good._replace(tag="ful")])
        assert not pages[2].any()


def test_copies_for_groups_of_other_stages_are_nothing_to_do() -> None:
    made = make_plan(HYBRID, "1MB", parallel=Parallel(pp=3, pp_rank=1))
    assert [group.tag for group in made.groups if group.layers] == ["state"]
    with Arena(made) as arena:
        carry_out(arena, [Copy("full", np.zeros(1, np.int32), np.zeros(1, np.int32))])
        assert list(arena.layer(2).roles) == [role.name for role in STATE.roles]


def test_wiped_pages_are_zeros_and_their_neighbours_are_not() -> None:
    made = PLANS["hybrid layer_major"]
    with Arena(made) as arena:
        first = made.group("window").pages_per_superpage
        arena.pool("shared").fill_(255)
        zero_pages(arena, "window", [first, first + 2])
        assert [bool(arena.pages("window")[first + n].any()) for n in range(4)] == [False, True, False, True]


def test_pages_that_look_different_are_not_copied() -> None:
    with (
        Arena(PLANS["dsa fp8"]) as one,
        Arena(PLANS["dsa fp8 layer_major"]) as other,
        pytest.raises(Exception, match="pages of 'latent' are"),
    ):
        copy_pages(one, other, "latent", [9], [9])

"""Host caches: the same pages in other memory, every role and scale of them, given back once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import make_plan
from kvweave.errors import ArenaClosed, BadRows, OutOfMemory, PlanError, UnknownName
from kvweave.plan import Layout, Parallel, Place, PoolRequest
from kvweave.tensor import DSA, GQA, Arena, HostMirror, LayerRequest, Memory, Opaque, assemble, not_hosted
from kvweave.tensor.backend import AttentionBackend
from tests.tensor.engine import same
from tests.tensor.models import HYBRID, lives

PLANS = lives()
SCALED: list[tuple[AttentionBackend, LayerRequest]] = [
    (GQA(), LayerRequest(0, heads=2, key_dim=32, quant="fp8_token_head")),
    (DSA(), LayerRequest(1, quant="fp8")),
    (GQA(), LayerRequest(2, heads=2, key_dim=32, quant="fp8_token_head", draft=True)),
]


@pytest.mark.parametrize("layout", Layout)
def test_a_page_goes_and_comes_back_with_every_role_scale_and_draft_layer(layout: Layout) -> None:
    made = make_plan(assemble("scaled", SCALED), "20MB", layout=layout, block_tokens=128, kernel_tokens={"full": 32})
    tags = [group.tag for group in made.groups]
    with Arena(made) as arena, HostMirror(arena, dict.fromkeys(tags, 3)) as mirror:
        assert mirror.is_whole
        for group in made.groups:
            page, other = group.pages_per_superpage, group.pages_per_superpage + 1
            pages = arena.pages(group.tag)
            pages[page] = torch.randint(1, 255, pages[page].shape, dtype=torch.uint8)
            before = pages[page].clone()
            mirror.store(group.tag, [page], [2])
            check_roles(arena, mirror, group.tag, page, 2)
            pages[page] = 0
            mirror.load(group.tag, [2], [other])
            assert same(pages[other], before)
            assert not pages[page].any()
            assert not mirror.arena.pages(group.tag)[0].any(), "the NULL page stays zeros"


def check_roles(arena: Arena, mirror: HostMirror, tag: str, page: int, host_page: int) -> None:
    group, seen = arena.plan.group(tag), 0
    for layer in group.layers:
        for name, view in arena.layer(layer, tag).roles.items():
            here = view.tensor.unflatten(0, (-1, group.kernel_blocks))[page]
            there = mirror.layer(layer, tag)[name].unflatten(0, (-1, group.kernel_blocks))[host_page]
            assert same(here, there)
            assert here.view(torch.uint8).all()
            seen += 1
    assert seen == len(group.layers) * len(group.cache.roles) > 0


def test_in_page_major_a_page_is_one_run_on_both_sides() -> None:
    with Arena(PLANS["hybrid page_major"]) as arena, HostMirror(arena, {"full": 2, "state": 2}) as mirror:
        for tag in ("full", "state"):
            assert arena.pages(tag)[1].is_contiguous()
            assert mirror.arena.pages(tag)[1].is_contiguous()


def test_what_cannot_be_mirrored_is_skipped_with_the_reason() -> None:
    pairs: list[tuple[AttentionBackend, LayerRequest]] = [
        *SCALED,
        (Opaque(64, not_hosted="its pages hold pointers"), LayerRequest(3)),
    ]
    made = make_plan(
        assemble("x", pairs), "8MB", block_tokens=64, own_pools={"indexer": PoolRequest(pages=3, place=Place.HOST)}
    )
    asked = {"full": 3, "opaque": 3, "indexer": 3}
    with Arena(made) as arena, HostMirror(arena, asked, not_hosted=not_hosted(pairs)) as mirror:
        stats = mirror.stats()
        assert stats.num_pages == {"full": 3, "latent": 0, "indexer": 0, "opaque": 0}
        assert stats.skipped == {
            "latent": "no pages were asked for",
            "indexer": "its pool is host memory already",
            "opaque": "its pages hold pointers",
        }
        assert not mirror.is_whole
        assert [pool.name for pool in stats.memory.pools] == ["full"]
        with pytest.raises(BadRows, match="group 'opaque' is not mirrored: its pages hold pointers"):
            mirror.store("opaque", [5], [1])
        with pytest.raises(BadRows, match="group 'latent' is not mirrored: no pages were asked for"):
            mirror.load("latent", [1], [5])


def test_groups_of_other_stages_are_skipped() -> None:
    made = make_plan(HYBRID, "1MB", parallel=Parallel(pp=3, pp_rank=1))
    with Arena(made) as arena, HostMirror(arena, {"state": 2, "full": 2}) as mirror:
        assert mirror.stats().skipped["full"] == "none of its layers is on this rank"
        assert mirror.is_whole


def test_memory_is_taken_and_given_back_symmetrically_and_once() -> None:
    memory = Memory()
    arena = Arena(PLANS["hybrid independent"], memory)
    alone = memory.num_live, memory.live_bytes
    for _ in range(3):
        mirror = HostMirror(arena, {"full": 4, "window": 2})
        pages = 5 * arena.plan.stride_bytes("full") + 3 * arena.plan.stride_bytes("window")
        assert (memory.num_live, memory.live_bytes) == (alone[0] + 2, alone[1] + pages)
        mirror.close()
        mirror.close()
        assert (memory.num_live, memory.live_bytes) == alone
        with pytest.raises(ArenaClosed, match="this mirror is closed"):
            mirror.store("full", [1], [1])
    arena.close()
    assert memory.num_live == 0


def test_a_mirror_that_does_not_fit_leaves_nothing_but_the_arena() -> None:
    with Arena(PLANS["hybrid independent"]) as arena:
        before = arena.memory.num_live
        with pytest.raises(OutOfMemory, match="pool 'window'"):
            HostMirror(arena, {"full": 4, "window": 1 << 52})
        assert arena.memory.num_live == before


def test_wishes_that_make_no_sense_are_refused() -> None:
    with Arena(PLANS["hybrid independent"]) as arena:
        with pytest.raises(UnknownName, match="unknown tag 'ful'; did you mean 'full'"):
            HostMirror(arena, {"ful": 4})
        with pytest.raises(PlanError, match="a mirror of 'full' cannot have -1 pages"):
            HostMirror(arena, {"full": -1})
        with HostMirror(arena, {"full": 2}) as mirror:
            with pytest.raises(BadRows, match="page 3 of 'full' is out of range: its pages are 1 to 2"):
                mirror.store("full", np.array([1]), np.array([3]))
            with pytest.raises(BadRows, match=r"page 0 \(the NULL page\)"):
                mirror.load("full", [0], [1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_stats_say_that_pinned_memory_was_not_to_be_had() -> None:
    with Arena(PLANS["hybrid independent"]) as arena, HostMirror(arena, {"full": 2}) as mirror:
        (pool,) = mirror.stats().memory.pools
        assert (pool.asked, pool.given) == (Place.PINNED, Place.HOST)

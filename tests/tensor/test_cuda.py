"""The same over CUDA memory: lives of sequences, pinned mirrors, running out. Skipped where there is no GPU."""

from __future__ import annotations

import random

import pytest
import torch

from kvweave import make_plan
from kvweave.errors import OutOfMemory
from kvweave.plan import Place, PoolRequest
from kvweave.tensor import Arena, HostMirror, Memory, gather_tokens, write_tokens
from tests.tensor.engine import same
from tests.tensor.models import DSA, HYBRID, lives
from tests.tensor.test_lives import live

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
PLANS = lives()


@pytest.mark.parametrize("name", PLANS)
def test_every_row_is_read_back_as_it_was_written_on_the_gpu(name: str) -> None:
    with Arena(PLANS[name], "cuda") as arena:
        assert all(pool.device == "cuda:0" for pool in arena.stats().pools)
        assert live(PLANS[name], arena, random.Random(0)) > 0


@pytest.mark.parametrize("name", PLANS)
def test_pages_go_to_pinned_memory_and_come_back(name: str) -> None:
    made = PLANS[name]
    with Arena(made, "cuda") as arena, HostMirror(arena, {group.tag: 3 for group in made.groups}) as mirror:
        assert mirror.is_whole
        for group in made.groups:
            page = group.pages_per_superpage
            pages = arena.pages(group.tag)
            pages[page] = torch.randint(1, 255, pages[page].shape, dtype=torch.uint8, device="cuda")
            before = pages[page].clone()
            mirror.store(group.tag, [page], [2])
            pages[page] = 0
            mirror.load(group.tag, [2], [page + 1])
            assert same(pages[page + 1], before)
            assert mirror.arena.pool(group.tag).is_pinned()
        assert {(pool.asked, pool.given) for pool in mirror.stats().memory.pools} == {(Place.PINNED, Place.PINNED)}


def test_pinned_pools_have_exactly_their_bytes_and_are_unpinned_when_given_back() -> None:
    made = make_plan(HYBRID, "1MB", own_pools={"full": PoolRequest(pages=5, place=Place.PINNED)})
    memory = Memory("cuda")
    arena = Arena(made, memory)
    pool = arena.pool("full")
    assert pool.is_pinned()
    assert pool.untyped_storage().nbytes() == made.pool("full").num_bytes
    arena.close()
    arena.close()
    assert not pool.is_pinned()
    assert memory.num_live == 0


def test_a_gpu_that_is_too_small_leaves_nothing_allocated() -> None:
    before = torch.cuda.memory_allocated()
    made = make_plan(HYBRID, 1 << 45, own_pools={"full": PoolRequest(pages=5)})
    memory = Memory("cuda")
    with pytest.raises(OutOfMemory, match="of cuda:0 memory"):
        Arena(made, memory)
    assert (memory.num_live, torch.cuda.memory_allocated()) == (0, before)


def test_packed_rows_are_quantised_on_the_gpu() -> None:
    with Arena(make_plan(DSA, "8MB", block_tokens=64), "cuda") as arena:
        rows = torch.randn(6, 576, device="cuda")
        slots = torch.arange(6, device="cuda") + 64 * arena.plan.group("latent").pages_per_superpage
        write_tokens(arena.layer(1, "latent"), slots, {"latent": rows})
        back = gather_tokens(arena.layer(1, "latent"), [int(slots[0]) // 64], 0, 6)["latent"]
        assert (back - rows).abs().max() <= rows.abs().max() / 16
        assert back.device.type == "cuda"


def test_writes_and_copies_may_be_captured_in_a_graph() -> None:
    """Addresses stay, so a graph replays onto the same pages; padding goes to slot 0, the NULL page."""
    with Arena(PLANS["hybrid page_major"], "cuda") as arena:
        key = arena.layer(0)["key"]
        index, rows = torch.tensor([30, 0], device="cuda"), torch.ones(2, 2, 4, 8, dtype=key.dtype, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            key.index_copy_(0, index, rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            key.index_copy_(0, index, rows)
        rows.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        assert (arena.layer(0)["key"][30] == 3).all()

"""The CUDA copier keeps the contract, and some promises of its own. Skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvweave.operation import OperationState
from kvweave.plan import Layout, Place, PoolRequest
from kvweave.transfer import ChunkLayout, Copier, Direction, Mover, whole_chunks
from tests.tensor.models import HYBRID
from tests.transfer.contract import CopierContract, example, hybrid
from tests.transfer.worlds import World, buffers, chunk_tokens, in_rows, planned, shrunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class TestCUDA(CopierContract):
    device = "cuda"

    @pytest.fixture
    def copier(self) -> Iterator[Copier]:
        yield from opened()


class TestSmallPieces(TestCUDA):
    """The same with staging slots that are soon full, so that pieces, slots and layers are cut."""

    @pytest.fixture
    def copier(self) -> Iterator[Copier]:
        sizes = {"piece_bytes": 8192, "small_bytes": 2048, "packed_bytes": 4096}
        yield from opened(**sizes, direct_bytes=4096, slots=2)


def opened(**tuning: int) -> Iterator[Copier]:
    from kvweave.transfer.copy_templates import CopyTuning
    from kvweave.transfer.cuda_copier import CUDACopier

    made = CUDACopier(tuning=CopyTuning(**tuning))
    yield made
    made.close()


@pytest.fixture
def copier() -> Iterator[Copier]:
    yield from opened()


@pytest.mark.parametrize("shift", [0, 8, 4, 2, 1])
@pytest.mark.parametrize("layout", Layout)
def test_chunks_on_the_gpu_need_no_staging_and_may_lie_askew(layout: Layout, shift: int, copier: Copier) -> None:
    made = example("deepseek-v3.2", layout, True)
    with World(made, 1, "cuda") as world, World(made, 1) as twin:
        chunk = ChunkLayout.of(made, chunk_tokens(made), ends_only=True)
        tables = world.tables(chunk, 1)
        assert all(np.array_equal(tables[tag], pages) for tag, pages in twin.tables(chunk, 1).items())
        copies = whole_chunks(chunk, tables, 0, 1, absent=True)
        memory = torch.zeros(chunk.num_bytes + shift, dtype=torch.uint8, device="cuda")[shift:]
        expected = buffers(chunk, 1)
        Mover(world.arena, copier, background=False).store(copies, [memory]).wait(20)
        Mover(twin.arena, background=False).store(copies, expected).wait(20)
        rows = in_rows(chunk)
        assert np.array_equal(memory.cpu().numpy()[rows], expected[0].numpy()[rows])
        before = world.read(tables)
        world.scramble()
        Mover(world.arena, copier, background=False).load(copies, [memory]).wait(20)
        after = world.read(tables)
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_memory_that_is_not_pinned_is_slower_and_right(copier: Copier) -> None:
    made = hybrid(Layout.LAYER_MAJOR)
    with World(made, 2, "cuda") as world:
        layout = ChunkLayout.of(made, 16)
        tables = world.tables(layout, 2)
        copies = whole_chunks(layout, tables, 0, 2)
        mover = Mover(world.arena, copier, background=False)
        chunks = [bytearray(layout.num_bytes) for _ in range(2)]
        mover.store(copies, chunks).wait(20)
        before = world.read(tables)
        world.scramble()
        mover.load(copies, chunks).wait(20)
        after = world.read(tables)
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_groups_on_the_host_go_along(copier: Copier) -> None:
    made = planned(HYBRID, 2, 2, block_tokens=8, own_pools={"window": PoolRequest(pages=40, place=Place.PINNED)})
    with World(made, 3, "cuda") as world:
        layout = ChunkLayout.of(made, 16)
        tables = world.tables(layout, 2)
        copies = whole_chunks(layout, tables, 0, 2)
        mover = Mover(world.arena, copier, background=False)
        chunks = buffers(layout, 2, "cuda")
        mover.store(copies, chunks).wait(20)
        before = world.read(tables)
        world.scramble()
        mover.load(copies, chunks, layers=1).wait(20)
        after = world.read(tables)
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_transfer_comes_after_what_the_stream_does_and_layers_before_what_it_does_next(copier: Copier) -> None:
    """A slow kernel writes the pages that are stored; what is loaded is read layer by layer, without a host wait."""
    spec = shrunk("llama-3.1-8b", layers=8)
    made = planned(spec, 2, 8, layout=Layout.LAYER_MAJOR, block_tokens=16)
    with World(made, 4, "cuda") as world, Mover(world.arena, copier) as mover:
        layout = ChunkLayout.of(made, 16)
        tables, others = world.tables(layout, 8), world.tables(layout, 8)
        chunks = buffers(layout, 8, "cuda")
        torch.cuda._sleep(50_000_000)
        for _, tensor, blocks in world.rows(tables):
            tensor[torch.from_numpy(blocks)] = 3
        mover.store(whole_chunks(layout, tables, 0, 8), chunks).wait(20)
        load = mover.load(whole_chunks(layout, others, 0, 8), chunks, layers=1)
        found = []
        for layer in range(8):
            load.wait_layer(layer, 20)
            key = world.arena.layer(layer)["key"]
            found.append((key[torch.from_numpy(others["full"].astype(np.int64)).cuda()] == 3).all())
        assert all(bool(one) for one in found)
        load.wait(20)
        assert load.state is OperationState.DONE


def test_staging_is_bounded_reused_and_given_back() -> None:
    from kvweave.transfer.copy_templates import CopyTuning
    from kvweave.transfer.cuda_copier import CUDACopier

    made = planned(shrunk("llama-3.1-8b", layers=8), 2, 64, layout=Layout.LAYER_MAJOR, block_tokens=16)
    with World(made, 5, "cuda") as world:
        layout = ChunkLayout.of(made, 16)
        copies = whole_chunks(layout, world.tables(layout, 64), 0, 64)
        chunks = buffers(layout, 64, "cuda")
        before = torch.cuda.memory_allocated()
        copier = CUDACopier(tuning=CopyTuning(piece_bytes=1 << 20, slots=3))
        mover = Mover(world.arena, copier, background=False)
        for _ in range(5):
            mover.store(copies, chunks).wait(20)
            taken = torch.cuda.memory_allocated() - before
            assert 0 < taken <= 3 * ((1 << 20) + (1 << 19))
        mover.close()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("layout", Layout)
def test_a_prepared_copy_may_be_started_often_and_sees_what_is_there_then(layout: Layout, copier: Copier) -> None:
    made = example("deepseek-v3.2", layout, False)
    with World(made, 7, "cuda") as world:
        chunk = ChunkLayout.of(made, chunk_tokens(made), ends_only=True)
        tables, others = world.tables(chunk, 1), world.tables(chunk, 1)
        (memory,) = buffers(chunk, 1, "cuda")
        mover = Mover(world.arena, copier, background=False)
        store = mover.prepare(whole_chunks(chunk, tables, 0, 1, absent=True), [memory], Direction.STORE)
        load = mover.prepare(whole_chunks(chunk, others, 0, 1, absent=True), [memory], Direction.LOAD, layers=1)
        for _ in range(3):
            world.sign(tables)
            mover.start(store).wait(20)
            mover.start(load).wait(20)
            signed, found = world.read(tables), world.read(others)
            assert all(np.array_equal(signed[name], found[name]) for name in signed)


def test_both_ways_go_on_at_once(copier: Copier) -> None:
    made = hybrid(Layout.LAYER_MAJOR)
    with World(made, 6, "cuda") as world, Mover(world.arena, copier) as mover:
        layout = ChunkLayout.of(made, 16)
        tables, others = world.tables(layout, 2), world.tables(layout, 2)
        copies, back = whole_chunks(layout, tables, 0, 2), whole_chunks(layout, others, 0, 2)
        chunks = buffers(layout, 2, "cuda")
        mover.store(copies, chunks).wait(20)
        handles = [mover.store(copies, buffers(layout, 2, "cuda")) for _ in range(20)]
        handles += [mover.load(back, chunks) for _ in range(20)]
        for handle in handles:
            handle.wait(20)
        signed, found = world.read(tables), world.read(others)
        assert all(np.array_equal(signed[name], found[name]) for name in signed)

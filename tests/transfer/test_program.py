"""What a GPU is told to do, done by hand on the host: the same plans, the same bytes, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvweave.plan import Layout
from kvweave.transfer import ChunkLayout, Copier, Job, Mover, Step, Way, whole_chunks
from kvweave.transfer.drafts import Drafts, Tuning, drafted
from kvweave.transfer.program import Call
from kvweave.transfer.tables import TILE, tiles_of, widest
from tests.transfer.contract import CopierContract, hybrid
from tests.transfer.worlds import World, buffers

NEVER = 1 << 60
SMALL = Tuning(piece_bytes=8192, small_bytes=2048, packed_bytes=4096, direct_bytes=NEVER)


class ByHand:
    """Carries programs out as the kernel and the copy engines would."""

    def __init__(self, tuning: Tuning, on_host: bool = True) -> None:
        self.drafts, self.on_host = Drafts(tuning), on_host

    def prepare(self, job: Job) -> Job:
        return job

    def steps(self, job: Job) -> Iterator[Step]:
        drafts = self.drafts.of(job) if self.on_host else drafted(job, self.drafts.tuning, on_host=False)
        for draft in drafts:
            self.carry_out(Call(draft, job), job.way)
            yield Step(draft.num_bytes, draft.layers)

    def close(self) -> None:
        pass

    def carry_out(self, call: Call, way: Way) -> None:
        memory = np.full(call.draft.staged_bytes, 0xDD, np.uint8)
        staging = memory.ctypes.data if memory.size else 0
        if way is Way.LOAD:
            copy(call, staging, way)
        for here, there, size in table(call).tolist():
            for number in (here, there + staging, size):
                assert number % min(8, call.vector_bytes) == 0
            ends = (there + staging, here) if way is Way.STORE else (here, there + staging)
            ctypes.memmove(*ends, size)
        if way is Way.STORE:
            copy(call, staging, way)


def table(call: Call) -> np.ndarray:
    """The tiles of a call in bytes, as the device makes them of its sheet."""
    made, at = [np.empty((0, TILE), np.int64)], 0
    for line in call.draft.lines:
        count = len(line.entries)
        pages, places = call.sheet[at : at + 2 * count].reshape(2, count)
        starts = np.stack([pages, places, np.zeros_like(pages)], 1)
        made.append((starts[:, None] + tiles_of(line.cut)).reshape(-1, TILE))
        assert len(made[-1]) == line.num_tiles
        at += 2 * count
    assert at == len(call.sheet)
    return np.concatenate(made)


def copy(call: Call, staging: int, way: Way) -> None:
    """What copy engines do: single runs, and rows."""

    def run(here: int, there: int, size: int) -> None:
        ctypes.memmove(*((there, here) if way is Way.STORE else (here, there)), size)

    for offset, place, size, chunk in call.draft.flat.T.tolist():
        run(staging + offset, int(call.job.starts[chunk]) + place, size)
    for rows in call.draft.strided:
        for row in range(rows.height):
            there = int(call.job.starts[rows.chunk]) + rows.place + row * rows.pitch
            run(staging + rows.offset + row * rows.width, there, rows.width)


class TestByHand(CopierContract):
    @pytest.fixture
    def copier(self) -> Copier:
        return ByHand(Tuning(direct_bytes=NEVER))


class TestByHandInSmallPieces(CopierContract):
    @pytest.fixture
    def copier(self) -> Copier:
        return ByHand(SMALL)


class TestByHandOnTheDevice(CopierContract):
    """As if the chunks were there: no staging."""

    @pytest.fixture
    def copier(self) -> Copier:
        return ByHand(SMALL, on_host=False)


@pytest.mark.parametrize("layout", Layout)
def test_drafts_are_made_once_for_jobs_that_differ_in_pages_and_buffers(layout: Layout) -> None:
    made = hybrid(layout)
    with World(made, 1) as world, Mover(world.arena, ByHand(SMALL), background=False) as mover:
        chunk = ChunkLayout.of(made, 16)

        def job(way: Way = Way.STORE, chunks: int = 2, **how: Any) -> Job:
            plan = whole_chunks(chunk, tables, 0, chunks)
            return mover._job(plan, buffers(chunk, chunks), way, how.get("layers"))

        tables = world.tables(chunk, 2)
        drafts = Drafts(SMALL)
        first = list(drafts.of(job()))
        tables = world.tables(chunk, 2)
        again = list(drafts.of(job()))
        assert [one is two for one, two in zip(first, again, strict=True)] == [True] * len(first)
        for other in (job(Way.LOAD), job(chunks=1), job(layers=1)):
            assert not {*map(id, drafts.of(other))} & {*map(id, first)}


def test_a_draft_half_read_is_gone_through_from_the_start_by_the_next() -> None:
    made = hybrid(Layout.LAYER_MAJOR)
    with World(made, 2) as world, Mover(world.arena, background=False) as mover:
        chunk = ChunkLayout.of(made, 16)
        job = mover._job(whole_chunks(chunk, world.tables(chunk, 2), 0, 2), buffers(chunk, 2), Way.STORE, None)
        drafts = Drafts(SMALL)
        begun = drafts.of(job)
        first = next(begun)
        whole = list(drafts.of(job))
        assert [first, *begun] == whole
        assert sum(draft.num_bytes for draft in whole) == job.num_bytes


def test_vectors_are_as_wide_as_all_addresses_allow() -> None:
    assert [widest(bits) for bits in (0, 1024, 1024 | 8, 12, 6, 7)] == [16, 16, 8, 4, 2, 1]

"""What a GPU is told to do, done by hand on the host: the same plans, the same bytes, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvweave.plan import Layout
from kvweave.transfer import ChunkLayout, Copier, CopyJob, CopyStep, Direction, Mover, whole_chunks
from kvweave.transfer.copy_templates import CopyTuning, TemplateCache, make_templates
from kvweave.transfer.prepared_copy import BoundCopy
from kvweave.transfer.tiles import TILE, tiles_of, widest
from tests.transfer.contract import CopierContract, hybrid
from tests.transfer.worlds import World, buffers

NEVER = 1 << 60
SMALL = CopyTuning(piece_bytes=8192, small_bytes=2048, packed_bytes=4096, direct_bytes=NEVER)


class ByHand:
    """Carries programs out as the kernel and the copy engines would."""

    def __init__(self, tuning: CopyTuning, on_host: bool = True) -> None:
        self.templates, self.on_host = TemplateCache(tuning), on_host

    def prepare(self, job: CopyJob) -> CopyJob:
        return job

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        templates = (
            self.templates.of(job) if self.on_host else make_templates(job, self.templates.tuning, on_host=False)
        )
        for template in templates:
            self.carry_out(BoundCopy(template, job), job.direction)
            yield CopyStep(template.num_bytes, template.layers)

    def close(self) -> None:
        pass

    def carry_out(self, bound: BoundCopy, direction: Direction) -> None:
        memory = np.full(bound.template.staged_bytes, 0xDD, np.uint8)
        staging = memory.ctypes.data if memory.size else 0
        if direction is Direction.LOAD:
            copy(bound, staging, direction)
        for here, there, size in table(bound).tolist():
            for number in (here, there + staging, size):
                assert number % min(8, bound.vector_bytes) == 0
            ends = (there + staging, here) if direction is Direction.STORE else (here, there + staging)
            ctypes.memmove(*ends, size)
        if direction is Direction.STORE:
            copy(bound, staging, direction)


def table(bound: BoundCopy) -> np.ndarray:
    """The tiles of a call in bytes, as the device makes them of its sheet."""
    made, at = [np.empty((0, TILE), np.int64)], 0
    for batch in bound.template.batches:
        count = len(batch.entries)
        pages, places = bound.address_table[at : at + 2 * count].reshape(2, count)
        starts = np.stack([pages, places, np.zeros_like(pages)], 1)
        made.append((starts[:, None] + tiles_of(batch.tiling)).reshape(-1, TILE))
        assert len(made[-1]) == batch.num_tiles
        at += 2 * count
    assert at == len(bound.address_table)
    return np.concatenate(made)


def copy(bound: BoundCopy, staging: int, direction: Direction) -> None:
    """What copy engines do: single runs, and rows."""

    def run(here: int, there: int, size: int) -> None:
        ctypes.memmove(*((there, here) if direction is Direction.STORE else (here, there)), size)

    for offset, place, size, chunk in bound.template.flat.T.tolist():
        run(staging + offset, int(bound.job.starts[chunk]) + place, size)
    for rows in bound.template.strided:
        for row in range(rows.height):
            there = int(bound.job.starts[rows.chunk]) + rows.place + row * rows.pitch
            run(staging + rows.offset + row * rows.width, there, rows.width)


class TestByHand(CopierContract):
    @pytest.fixture
    def copier(self) -> Copier:
        return ByHand(CopyTuning(direct_bytes=NEVER))


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

        def job(direction: Direction = Direction.STORE, chunks: int = 2, **how: Any) -> CopyJob:
            plan = whole_chunks(chunk, tables, 0, chunks)
            return mover._job(plan, buffers(chunk, chunks), direction, how.get("layers"))

        tables = world.tables(chunk, 2)
        templates = TemplateCache(SMALL)
        first = list(templates.of(job()))
        tables = world.tables(chunk, 2)
        again = list(templates.of(job()))
        assert [one is two for one, two in zip(first, again, strict=True)] == [True] * len(first)
        for other in (job(Direction.LOAD), job(chunks=1), job(layers=1)):
            assert not {*map(id, templates.of(other))} & {*map(id, first)}


def test_a_draft_half_read_is_gone_through_from_the_start_by_the_next() -> None:
    made = hybrid(Layout.LAYER_MAJOR)
    with World(made, 2) as world, Mover(world.arena, background=False) as mover:
        chunk = ChunkLayout.of(made, 16)
        job = mover._job(whole_chunks(chunk, world.tables(chunk, 2), 0, 2), buffers(chunk, 2), Direction.STORE, None)
        templates = TemplateCache(SMALL)
        begun = templates.of(job)
        first = next(begun)
        whole = list(templates.of(job))
        assert [first, *begun] == whole
        assert sum(template.num_bytes for template in whole) == job.num_bytes


def test_vectors_are_as_wide_as_all_addresses_allow() -> None:
    assert [widest(bits) for bits in (0, 1024, 1024 | 8, 12, 6, 7)] == [16, 16, 8, 4, 2, 1]

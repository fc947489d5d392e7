"""Programs: a job as the calls that carry it out on a GPU, piece by piece. Making them needs no device.

Three ways for a part, by how its pages lie:
    staged   the kernel packs many runs into staging memory, and a copy engine moves them as one
    direct   the copy engine takes pages from where they are: one run each (page-major pools), or some rows of a stride.
             The second is slower, but nothing comes before it: so pipelines start (stores) or end (loads) with it
    packed   chunks on the device itself: the kernel alone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvweave.transfer import dma
from kvweave.transfer.copier import Job, Way
from kvweave.transfer.lines import chunk_lines, chunk_places, staged_lines
from kvweave.transfer.pieces import Part, Piece, part_bytes
from kvweave.transfer.tables import Lines, Table, tabulate


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide which way a part goes, as measured on an H200 over PCIe 5."""

    piece_bytes: int = 32 << 20
    slots: int = 3
    small_bytes: int = 2 << 20
    """Where a pipeline starts or ends."""
    unprepared_bytes: int = 8 << 20
    """The same where the next piece is still to be worked out, which takes the host longer than copying the small."""
    direct_bytes: int = 1 << 20
    """Runs of this size and more need no kernel: a copy engine pauses 2 us between copies, 5% of 2 MiB."""
    strided_bytes: int = 16 << 10
    """Rows of this size and more are worth a strided copy, where it saves waiting for the kernel."""
    packed_bytes: int = 1 << 29
    """What one launch moves, where chunks are on the device."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """Rows between staging memory, packed from `offset` on, and a chunk, where they are `pitch` apart."""

    offset: int
    place: int
    pitch: int
    width: int
    height: int
    chunk: int

    def joined(self, other: StagedCopy) -> StagedCopy | None:
        """Both as one, where the other goes on in the same chunk, with nothing between."""
        size = self.width * self.height
        flat = self.width == self.pitch and other.width == other.pitch and self.chunk == other.chunk
        if not flat or (self.offset + size, self.place + size) != (other.offset, other.place):
            return None
        size += other.width * other.height
        return replace(self, pitch=size, width=size, height=1)

    def issue(self, staging: int, way: Way, stream: int) -> None:
        here = (staging + self.offset, self.width)
        there = (self.place, self.pitch)
        to, source = (there, here) if way is Way.STORE else (here, there)
        dma.rows(*to, *source, self.width, self.height)(stream)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One piece: copies that go directly, and what the kernel moves, into `staged_bytes` of staging memory if any.

    `table` is there, and lies at `table_at` on the device, if the job was prepared.
    """

    num_bytes: int
    layers: int
    direct: tuple[dma.Ready, ...] = ()
    lines: tuple[Lines, ...] = ()
    table: Table | None = None
    table_at: int | None = None
    staged_bytes: int = 0
    staged: tuple[StagedCopy, ...] = ()

    def tabulated(self) -> Table:
        """What the kernel is told. Worked out when it is asked for: the copy of a load is under way by then."""
        return self.table or tabulate(self.lines)


def compiled(job: Job, tuning: Tuning) -> Iterator[Call]:
    """The calls of a job, each made when it is asked for."""
    if all(buffer.array is None for buffer in job.buffers):
        for piece in job.pieces(tuning.packed_bytes, tuning.packed_bytes):
            lines = tuple(line for part in piece.parts for line in chunk_lines(job, part))
            yield Call(piece.num_bytes, piece.layers, lines=lines)
        return
    started = False
    for piece, is_last in _flagged(job.pieces(tuning.small_bytes, tuning.piece_bytes)):
        at_an_end = not started if job.way is Way.STORE else is_last
        started = True
        yield _call(job, piece, tuning, at_an_end)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Calls whose tables are on the device; `tables` keeps them there."""

    calls: tuple[Call, ...]
    tables: object


def _call(job: Job, piece: Piece, tuning: Tuning, at_an_end: bool) -> Call:
    direct = [part for part in piece.parts if _is_direct(job, part, tuning, at_an_end)]
    ready = tuple(copy for part in direct for copy in _direct(job, part))
    parts = [part for part in piece.parts if part not in direct]
    if not parts:
        return Call(piece.num_bytes, piece.layers, ready)
    sizes = [part_bytes(job.copies, part) for part in parts]
    starts = np.cumsum([0, *sizes]).tolist()
    lines = tuple(staged_lines(job, parts, starts))
    staged: list[StagedCopy] = []
    for copy in (copy for part, start in zip(parts, starts, strict=False) for copy in _staged(job, part, start)):
        longer = staged[-1].joined(copy) if staged else None
        staged[-1:] = [longer] if longer else [*staged[-1:], copy]
    return Call(piece.num_bytes, piece.layers, ready, lines, staged_bytes=starts[-1], staged=tuple(staged))


def _flagged(pieces: Iterator[Piece]) -> Iterator[tuple[Piece, bool]]:
    """Each piece, and whether it is the last."""
    before = next(pieces, None)
    for piece in pieces:
        assert before is not None
        yield before, False
        before = piece
    if before is not None:
        yield before, True


def _is_direct(job: Job, part: Part, tuning: Tuning, at_an_end: bool) -> bool:
    """Whether a part goes without the kernel: in long runs, or at an end of the pipeline in rows of a stride."""
    for runs in job.runs(part):
        strided = runs.units > 1
        least = tuning.strided_bytes if at_an_end else tuning.direct_bytes
        if runs.unit_bytes < least or (strided and (not at_an_end or runs.unit_stride > dma.MOST_PITCH)):
            return False
    return True


def _direct(job: Job, part: Part) -> Iterator[dma.Ready]:
    """Each page between its pool and its chunk, by the copy engine."""
    for pages, places, runs, apart in chunk_lines(job, part):
        for block in range(runs.blocks):
            here, there = pages + block * runs.kernel_stride, places + block * apart
            if runs.units == 1:
                to, source = (there, here) if job.way is Way.STORE else (here, there)
                yield dma.many(to, source, runs.unit_bytes)
                continue
            for page, place in zip(here.tolist(), there.tolist(), strict=True):
                flat, strided = (place, runs.unit_bytes), (page, runs.unit_stride)
                first, second = (flat, strided) if job.way is Way.STORE else (strided, flat)
                yield dma.rows(*first, *second, runs.unit_bytes, runs.units)


def _staged(job: Job, part: Part, start: int) -> Iterator[StagedCopy]:
    """A part between staging memory and its chunks: blocks side by side in a chunk are one copy."""
    move = job.copies.moves[part.move]
    group = job.copies.layout.group(move.tag)
    width, pitch = (part.high - part.low) * group.layer_bytes, group.group.kernel_stride
    places = chunk_places(job, part) + part.low * group.layer_bytes
    chunks = move.chunks[part.first : part.last]
    breaks = np.flatnonzero((np.diff(places) != group.block_bytes) | (np.diff(chunks) != 0)) + 1
    for first, last in pairwise([0, *breaks.tolist(), len(places)]):
        rows = (last - first) * group.kernel_blocks
        offset = start + first * group.kernel_blocks * width
        yield StagedCopy(offset, int(places[first]), pitch, width, rows, int(chunks[first]))

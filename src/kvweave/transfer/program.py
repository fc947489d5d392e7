"""Programs: a job as the calls that carry it out on a GPU, piece by piece. Making them needs no device.

Three ways for a part, by how its pages lie:
    staged   the kernel packs many runs into staging memory, and a copy engine moves them as one
    direct   the copy engine takes pages from where they are, in long runs (large pages of page-major pools)
    packed   chunks on the device itself: the kernel alone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvweave.transfer import dma
from kvweave.transfer.copier import Job, Way
from kvweave.transfer.graph import Graph
from kvweave.transfer.lines import chunk_lines, chunk_places, staged_lines
from kvweave.transfer.pieces import Part, Piece, part_bytes
from kvweave.transfer.tables import Lines, Table, tabulate


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide which way a part goes, as measured on an H200 over PCIe 5."""

    piece_bytes: int = 64 << 20
    slots: int = 2
    small_bytes: int = 4 << 20
    """Where a pipeline starts or ends."""
    unprepared_bytes: int = 8 << 20
    """The same where the next piece is still to be worked out, which takes the host longer than copying the small."""
    direct_bytes: int = 8 << 20
    """Runs of this size and more need no kernel: a copy engine pauses 2 us between copies, 5% of 2 MiB."""
    packed_bytes: int = 1 << 29
    """What one launch moves, where chunks are on the device."""
    graph_bytes: int = 256 << 20
    """Prepared copies of at most this are one graph, and so one step."""


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
    if any(buffer.array is not None for buffer in job.buffers):
        for piece in job.pieces(min(tuning.small_bytes, tuning.piece_bytes), tuning.piece_bytes):
            yield _call(job, piece, tuning)
        return
    for piece in job.pieces(tuning.packed_bytes, tuning.packed_bytes):
        lines = tuple(line for part in piece.parts for line in chunk_lines(job, part))
        yield Call(piece.num_bytes, piece.layers, lines=lines)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Calls whose tables are on the device, where `tables` keeps them; all in one graph, if they are few."""

    calls: tuple[Call, ...]
    tables: object
    graph: Graph | None = None

    @property
    def staged_bytes(self) -> int:
        """Staging memory that the largest of them takes."""
        return max((call.staged_bytes for call in self.calls), default=0)


def _call(job: Job, piece: Piece, tuning: Tuning) -> Call:
    direct = [part for part in piece.parts if _is_direct(job, part, tuning)]
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


def _is_direct(job: Job, part: Part, tuning: Tuning) -> bool:
    """Whether a part goes without the kernel: every page in long runs."""
    return all(runs.units == 1 and runs.unit_bytes >= tuning.direct_bytes for runs in job.runs(part))


def _direct(job: Job, part: Part) -> Iterator[dma.Ready]:
    """The pages between their pool and their chunks, by the copy engine."""
    for pages, places, runs, apart in chunk_lines(job, part):
        for block in range(runs.blocks):
            here, there = pages + block * runs.kernel_stride, places + block * apart
            to, source = (there, here) if job.way is Way.STORE else (here, there)
            yield dma.many(to, source, runs.unit_bytes)


def _staged(job: Job, part: Part, start: int) -> Iterator[StagedCopy]:
    """A part between staging memory and its chunks: blocks side by side in a chunk are one copy."""
    move = job.copies.moves[part.move]
    group = job.copies.layout.group(move.tag)
    width, pitch = (part.high - part.low) * group.layer_bytes, group.group.kernel_stride
    places = chunk_places(job, part) + part.low * group.layer_bytes
    chunks = move.chunks[part.first : part.last]
    goes_on = (places[1:] - places[:-1] == group.block_bytes) & (chunks[1:] == chunks[:-1])
    breaks = np.flatnonzero(~goes_on) + 1
    for first, last in pairwise([0, *breaks.tolist(), len(places)]):
        rows = (last - first) * group.kernel_blocks
        offset = start + first * group.kernel_blocks * width
        yield StagedCopy(offset, int(places[first]), pitch, width, rows, int(chunks[first]))

"""Drafts: a job cut into pieces for a GPU, as far as that is the same for any pages and any buffers.

To work one out takes longer than a small copy. Most copies are of some whole chunks and look like one before.

Three ways for a part, by how its pages lie:
    staged   the kernel packs many runs into staging memory, and a copy engine moves them as one
    direct   the copy engine takes pages from where they are, in long runs (large pages of page-major pools)
    packed   chunks on the device itself: the kernel alone
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import count, pairwise
from operator import or_
from typing import Any

import numpy as np

from kvweave.transfer.copier import Job
from kvweave.transfer.copies import Numbers
from kvweave.transfer.lines import Line, chunk_lines, chunk_places, staged_lines
from kvweave.transfer.pieces import Part, Piece, part_bytes

KEPT = 256
"""Jobs whose drafts are kept, those that were asked for last."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide which way a part goes, as measured on an H200 over PCIe 5."""

    piece_bytes: int = 64 << 20
    slots: int = 2
    small_bytes: int = 8 << 20
    """Where a pipeline starts or ends: the host takes less to issue the next piece than this one to be copied."""
    direct_bytes: int = 2 << 20
    """Runs of this size and more need no kernel."""
    single_bytes: int = 8 << 20
    """The same with a driver that takes one run at a time, between which a copy engine pauses 2 us: 5% of 2 MiB."""
    packed_bytes: int = 1 << 29
    """What one launch moves, where chunks are on the device."""
    tape_bytes: int = 1 << 30
    """Prepared copies of at most this are one tape, and so one step."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """Rows between staging memory, packed from `offset` on, and `place` in a chunk, where they are `pitch` apart."""

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

    @property
    def is_flat(self) -> bool:
        return self.height == 1 or self.width == self.pitch


@dataclass(frozen=True, eq=False)
class Draft:
    """One piece: parts that go directly, and what the kernel moves, into `staged_bytes` of staging memory if any."""

    num_bytes: int
    layers: int
    direct: tuple[Part, ...] = ()
    lines: tuple[Line, ...] = ()
    staged_bytes: int = 0
    staged: tuple[StagedCopy, ...] = ()

    @cached_property
    def bits(self) -> int:
        return reduce(or_, (line.bits for line in self.lines), 0)

    @cached_property
    def num_tiles(self) -> int:
        return sum(line.num_tiles for line in self.lines)

    @cached_property
    def flat(self) -> Numbers:
        """Of the staged copies that are one run each: offset, place, size and chunk."""
        runs = [(copy.offset, copy.place, copy.width * copy.height, copy.chunk) for copy in self.staged if copy.is_flat]
        return np.array(runs, np.int64).reshape(-1, 4).T

    @cached_property
    def strided(self) -> tuple[StagedCopy, ...]:
        """The others."""
        return tuple(copy for copy in self.staged if not copy.is_flat)


class Drafts:
    """The drafts of jobs, worked out once for those that differ in pages and buffers only. Any thread may ask."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._kept: OrderedDict[object, _Remembered] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, job: Job) -> Iterator[Draft]:
        """Each is made when it is first asked for."""
        key = _key(job)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = _Remembered(drafted(replace(job, buffers=()), self.tuning, _on_host(job)))
                found.owners = job.arena.plan, job.copies.layout
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return iter(found)


class _Remembered:
    """What an iterator gives, to be gone through again and again, by any threads."""

    def __init__(self, source: Iterator[Draft]) -> None:
        self._source, self._made = source, list[Draft]()
        self._lock = threading.Lock()
        self.owners: Any = None
        """Kept, since the key knows them by their identity."""

    def __iter__(self) -> Iterator[Draft]:
        for index in count():
            with self._lock:
                if index == len(self._made):
                    self._made += [draft for draft in [next(self._source, None)] if draft is not None]
                if index == len(self._made):
                    return
            yield self._made[index]


def _key(job: Job) -> object:
    """Equal for jobs with the same drafts. Plans and layouts by identity: to compare them takes long."""
    return id(job.arena.plan), id(job.copies.layout), job.way, job.layers, _on_host(job), job.copies.shape


def _on_host(job: Job) -> bool:
    return any(buffer.array is not None for buffer in job.buffers)


def drafted(job: Job, tuning: Tuning, on_host: bool) -> Iterator[Draft]:
    """The drafts of a job, of which neither pages nor buffers are looked at; `on_host`: where the chunks are."""
    if on_host:
        for piece in job.pieces(min(tuning.small_bytes, tuning.piece_bytes), tuning.piece_bytes):
            yield _draft(job, piece, tuning)
        return
    for piece in job.pieces(tuning.packed_bytes, tuning.packed_bytes):
        yield Draft(piece.num_bytes, piece.layers, lines=tuple(chunk_lines(job, piece.parts)))


def _draft(job: Job, piece: Piece, tuning: Tuning) -> Draft:
    direct = tuple(part for part in piece.parts if _is_direct(job, part, tuning))
    parts = [part for part in piece.parts if part not in direct]
    starts = np.cumsum([0, *(part_bytes(job.copies, part) for part in parts)]).tolist()
    staged: list[StagedCopy] = []
    for copy in (copy for part, start in zip(parts, starts, strict=False) for copy in _staged(job, part, start)):
        longer = staged[-1].joined(copy) if staged else None
        staged[-1:] = [longer] if longer else [*staged[-1:], copy]
    lines = tuple(staged_lines(job, parts, starts))
    return Draft(piece.num_bytes, piece.layers, direct, lines, starts[-1], tuple(staged))


def _is_direct(job: Job, part: Part, tuning: Tuning) -> bool:
    """Whether a part goes without the kernel: every page in long runs."""
    return all(runs.units == 1 and runs.unit_bytes >= tuning.direct_bytes for runs in job.runs(part))


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

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

from kvweave.transfer.copier import CopyJob
from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.page_batches import PageBatch, chunk_batches, chunk_places, staged_batches
from kvweave.transfer.pieces import MoveSlice, Piece, part_bytes

KEPT = 256
"""Jobs whose drafts are kept, those that were asked for last."""


@dataclass(frozen=True, slots=True)
class CopyTuning:
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
    recorded_bytes: int = 1 << 30
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
class CopyTemplate:
    """One piece: parts that go directly, and what the kernel moves, into `staged_bytes` of staging memory if any."""

    num_bytes: int
    layers: int
    direct: tuple[MoveSlice, ...] = ()
    batches: tuple[PageBatch, ...] = ()
    staged_bytes: int = 0
    staged: tuple[StagedCopy, ...] = ()

    @cached_property
    def bits(self) -> int:
        return reduce(or_, (batch.bits for batch in self.batches), 0)

    @cached_property
    def num_tiles(self) -> int:
        return sum(batch.num_tiles for batch in self.batches)

    @cached_property
    def flat(self) -> Numbers:
        """Of the staged copies that are one run each: offset, place, size and chunk."""
        runs = [(copy.offset, copy.place, copy.width * copy.height, copy.chunk) for copy in self.staged if copy.is_flat]
        return np.array(runs, np.int64).reshape(-1, 4).T

    @cached_property
    def strided(self) -> tuple[StagedCopy, ...]:
        """The others."""
        return tuple(copy for copy in self.staged if not copy.is_flat)


class TemplateCache:
    """The drafts of jobs, worked out once for those that differ in pages and buffers only. Any thread may ask."""

    def __init__(self, tuning: CopyTuning) -> None:
        self.tuning = tuning
        self._kept: OrderedDict[object, _SharedIterator] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, job: CopyJob) -> Iterator[CopyTemplate]:
        """Each is made when it is first asked for."""
        key = _key(job)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = _SharedIterator(
                    make_templates(replace(job, buffers=()), self.tuning, _on_host(job))
                )
                found.owners = job.arena.plan, job.copies.layout
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return iter(found)


class _SharedIterator:
    """What an iterator gives, to be gone through again and again, by any threads."""

    def __init__(self, source: Iterator[CopyTemplate]) -> None:
        self._source, self._made = source, list[CopyTemplate]()
        self._lock = threading.Lock()
        self.owners: Any = None
        """Kept, since the key knows them by their identity."""

    def __iter__(self) -> Iterator[CopyTemplate]:
        for index in count():
            with self._lock:
                if index == len(self._made):
                    self._made += [template for template in [next(self._source, None)] if template is not None]
                if index == len(self._made):
                    return
            yield self._made[index]


def _key(job: CopyJob) -> object:
    """Equal for jobs with the same drafts. Plans and layouts by identity: to compare them takes long."""
    return id(job.arena.plan), id(job.copies.layout), job.direction, job.layers, _on_host(job), job.copies.shape


def _on_host(job: CopyJob) -> bool:
    return any(buffer.array is not None for buffer in job.buffers)


def make_templates(job: CopyJob, tuning: CopyTuning, on_host: bool) -> Iterator[CopyTemplate]:
    """The drafts of a job, of which neither pages nor buffers are looked at; `on_host`: where the chunks are."""
    if on_host:
        for piece in job.pieces(min(tuning.small_bytes, tuning.piece_bytes), tuning.piece_bytes):
            yield _template(job, piece, tuning)
        return
    for piece in job.pieces(tuning.packed_bytes, tuning.packed_bytes):
        yield CopyTemplate(piece.num_bytes, piece.layers, batches=tuple(chunk_batches(job, piece.parts)))


def _template(job: CopyJob, piece: Piece, tuning: CopyTuning) -> CopyTemplate:
    direct = tuple(part for part in piece.parts if _is_direct(job, part, tuning))
    parts = [part for part in piece.parts if part not in direct]
    starts = np.cumsum([0, *(part_bytes(job.copies, part) for part in parts)]).tolist()
    staged: list[StagedCopy] = []
    for copy in (copy for part, start in zip(parts, starts, strict=False) for copy in _staged(job, part, start)):
        longer = staged[-1].joined(copy) if staged else None
        staged[-1:] = [longer] if longer else [*staged[-1:], copy]
    batches = tuple(staged_batches(job, parts, starts))
    return CopyTemplate(piece.num_bytes, piece.layers, direct, batches, starts[-1], tuple(staged))


def _is_direct(job: CopyJob, part: MoveSlice, tuning: CopyTuning) -> bool:
    """Whether a part goes without the kernel: every page in long runs."""
    return all(runs.units == 1 and runs.unit_bytes >= tuning.direct_bytes for runs in job.runs(part))


def _staged(job: CopyJob, part: MoveSlice, start: int) -> Iterator[StagedCopy]:
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

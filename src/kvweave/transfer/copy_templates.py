"""Copy templates: a job split into pieces for a GPU, as far as that does not depend on its pages and buffers.

Making one takes longer than a small copy, and most copies have the shape of an earlier one, so templates are cached.

How a slice is copied depends on the layout of its pages:
    staged   the kernel packs many runs into staging memory, and a copy engine moves them as one
    direct   the copy engine copies pages from their pool, in long runs (large pages of page-major pools)
    packed   the chunks are on the device: the kernel alone
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
"""Number of jobs whose templates are cached, the most recently used ones."""


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """Sizes that decide how a slice is copied; measured on an H200 over PCIe 5."""

    piece_bytes: int = 64 << 20
    slots: int = 2
    small_bytes: int = 8 << 20
    """Pieces at the start or end of a pipeline: larger ones delay it, and issuing smaller ones takes longer than
    copying them."""
    direct_bytes: int = 2 << 20
    """Runs from this size on are copied without the kernel."""
    single_bytes: int = 8 << 20
    """`direct_bytes` for drivers that copy one run at a time: between runs a copy engine pauses 2 us, which is 5% of
    2 MiB."""
    packed_bytes: int = 1 << 29
    """Bytes of one launch, if the chunks are on the device."""
    recorded_bytes: int = 1 << 30
    """Prepared copies up to this size are recorded in one command buffer, and are one step."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """Rows packed in staging memory from `offset` on, copied to `place` in a chunk, where they are `pitch` apart."""

    offset: int
    place: int
    pitch: int
    width: int
    height: int
    chunk: int

    def joined(self, other: StagedCopy) -> StagedCopy | None:
        """Both copies as one, if the other continues this one in the same chunk without a gap; else None."""
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
    """One piece: slices copied directly, and batches that the kernel moves, through `staged_bytes` of staging memory
    if not 0."""

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
        """The staged copies that are one run each: their offsets, places, sizes and chunks."""
        runs = [(copy.offset, copy.place, copy.width * copy.height, copy.chunk) for copy in self.staged if copy.is_flat]
        return np.array(runs, np.int64).reshape(-1, 4).T

    @cached_property
    def strided(self) -> tuple[StagedCopy, ...]:
        """The staged copies that are not."""
        return tuple(copy for copy in self.staged if not copy.is_flat)


class TemplateCache:
    """Templates by the shape of a job, so that jobs that differ in pages and buffers only share them. Thread-safe."""

    def __init__(self, tuning: CopyTuning) -> None:
        self.tuning = tuning
        self._kept: OrderedDict[object, _SharedIterator] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, job: CopyJob) -> Iterator[CopyTemplate]:
        """The templates of a job; each is made when it is first reached."""
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
    """The items of an iterator, which any number of threads may go through again."""

    def __init__(self, source: Iterator[CopyTemplate]) -> None:
        self._source, self._made = source, list[CopyTemplate]()
        self._lock = threading.Lock()
        self.owners: Any = None
        """Objects whose ids are part of the key: kept alive, so that no other object gets the same id."""

    def __iter__(self) -> Iterator[CopyTemplate]:
        for index in count():
            with self._lock:
                if index == len(self._made):
                    self._made += [template for template in [next(self._source, None)] if template is not None]
                if index == len(self._made):
                    return
            yield self._made[index]


def _key(job: CopyJob) -> object:
    """Equal for jobs with the same templates. Plans and layouts are compared by identity, which is faster than by
    value."""
    return id(job.arena.plan), id(job.copies.layout), job.direction, job.layers, _on_host(job), job.copies.shape


def _on_host(job: CopyJob) -> bool:
    return any(buffer.array is not None for buffer in job.buffers)


def make_templates(job: CopyJob, tuning: CopyTuning, on_host: bool) -> Iterator[CopyTemplate]:
    """The templates of a job; neither its pages nor its buffers are read. `on_host`: whether the chunks are on the
    host."""
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
    """Whether a slice is copied without the kernel: each page is in runs of `direct_bytes` or more."""
    return all(runs.units == 1 and runs.unit_bytes >= tuning.direct_bytes for runs in job.runs(part))


def _staged(job: CopyJob, part: MoveSlice, start: int) -> Iterator[StagedCopy]:
    """The copies of a slice between staging memory and its chunks; adjacent blocks of a chunk are one copy."""
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

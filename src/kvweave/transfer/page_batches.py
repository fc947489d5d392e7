"""Page batches: pages of a slice with one layout, and their places; with the addresses of both for given pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvweave.transfer.copier import CopyJob
from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.pieces import MoveSlice, part_bytes
from kvweave.transfer.tiles import Tiling


@dataclass(frozen=True, slots=True, eq=False)
class PageBatch:
    """Entries of a move. `places` are relative to the start of their chunks, or of staging memory."""

    move: int
    tiling: Tiling
    entries: Numbers
    places: Numbers

    @property
    def bits(self) -> int:
        """The bitwise or of all strides, sizes and places: a power of two divides it only if it divides all of them."""
        return self.tiling.bits | int(np.bitwise_or.reduce(self.places))

    @property
    def num_pages(self) -> int:
        return len(self.entries)

    @property
    def num_tiles(self) -> int:
        return self.num_pages * self.tiling.num_tiles


def chunk_places(job: CopyJob, part: MoveSlice) -> Numbers:
    """Where the blocks of a slice start, relative to the start of their chunks."""
    move = job.copies.moves[part.move]
    group = job.copies.layout.group(move.tag)
    places: Numbers = (move.blocks[part.first : part.last] - group.first_block) * group.block_bytes + group.offset
    return places


def chunk_batches(job: CopyJob, parts: Iterable[MoveSlice]) -> list[PageBatch]:
    """Batches for copies between pages and chunks."""
    found: _Found = defaultdict(list)
    for part in parts:
        entries, places = np.arange(part.first, part.last), chunk_places(job, part)
        for runs in job.runs(part):
            found[part.move, Tiling(runs, runs.flat_stride)].append((entries, places + runs.flat_start))
    return _grouped(found)


def staged_batches(job: CopyJob, parts: Iterable[MoveSlice], starts: Iterable[int]) -> list[PageBatch]:
    """Batches for copies between pages and staging memory, in which each slice is packed: only its layers, from its
    start on."""
    found: _Found = defaultdict(list)
    for part, start in zip(parts, starts, strict=False):
        layer_bytes = job.copies.layout.group(job.copies.moves[part.move].tag).layer_bytes
        entries = np.arange(part.first, part.last)
        page_bytes = part_bytes(job.copies, part) // len(entries)
        places = start + np.arange(len(entries)) * page_bytes - part.low * layer_bytes
        pitch = (part.high - part.low) * layer_bytes
        for runs in job.runs(part):
            found[part.move, Tiling(runs, pitch)].append((entries, places + runs.flat_start))
    return _grouped(found)


_Found: TypeAlias = "defaultdict[tuple[int, Tiling], list[tuple[Numbers, Numbers]]]"


def _grouped(found: _Found) -> list[PageBatch]:
    """One batch for all pages of a move with the same layout."""
    return [PageBatch(*key, *map(np.concatenate, zip(*some, strict=True))) for key, some in found.items()]


def addresses(job: CopyJob, batch: PageBatch, *, staged: bool) -> tuple[Numbers, Numbers]:
    """The addresses of a batch's pages, and their places: addresses in chunks, or offsets in staging memory."""
    move, runs = job.copies.moves[batch.move], batch.tiling.runs
    pages: Numbers = move.pages[batch.entries] * runs.page_stride
    pages += job.pools[batch.move] + runs.start
    return pages, batch.places if staged else batch.places + job.starts[move.chunks[batch.entries]]

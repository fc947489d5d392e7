"""Prepared copies: templates bound to the addresses of a job's pages and buffers, ready to be issued. Needs no
device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple, Protocol

import numpy as np

from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.copier import CopyJob, Direction
from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.copy_templates import CopyTemplate
from kvweave.transfer.page_batches import PageBatch, addresses, chunk_batches
from kvweave.transfer.pieces import MoveSlice
from kvweave.transfer.tiles import PageTiles, widest


class TiledPages(Protocol):
    """Pages that are cut alike."""

    @property
    def num_pages(self) -> int: ...

    @property
    def tiling(self) -> PageTiles: ...


class TabulatedCopy(Protocol):
    """What the device makes the kernel's table of: how pages are cut, and where each is and goes."""

    @property
    def batches(self) -> Sequence[TiledPages]: ...

    @property
    def num_tiles(self) -> int: ...

    @property
    def address_table(self) -> Numbers:
        """Batch by batch, the addresses of pages and of their places."""
        ...

    @property
    def vector_bytes(self) -> int: ...


class BulkCopy(NamedTuple):
    """Runs of bytes for a copy engine."""

    targets: Numbers
    sources: Numbers
    sizes: Numbers


@dataclass(frozen=True, eq=False)
class BoundCopy:
    """A template bound to the pages and buffers of a job.

    Addresses are computed when they are first needed: copies between buffers and staging memory need none of pages.
    `table_at` is the address of the kernel's table, if the job was prepared.
    """

    template: CopyTemplate
    job: CopyJob
    table_at: int | None = None

    @property
    def batches(self) -> tuple[PageBatch, ...]:
        return self.template.batches

    @property
    def num_tiles(self) -> int:
        return self.template.num_tiles

    @cached_property
    def direct(self) -> tuple[BulkCopy, ...]:
        return tuple(_direct(self.job, self.template.direct))

    @cached_property
    def address_table(self) -> Numbers:
        staged = bool(self.template.staged_bytes)
        found = [numbers for batch in self.template.batches for numbers in addresses(self.job, batch, staged=staged)]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    @cached_property
    def vector_bytes(self) -> int:
        """The widest vector that is aligned everywhere: 16, 8, 4, 2 or 1 bytes."""
        ends = [] if self.template.staged_bytes else self.job.starts.tolist()
        return widest(reduce(or_, [*ends, *self.job.pools], self.template.bits))


def _direct(job: CopyJob, parts: Iterable[MoveSlice]) -> Iterator[BulkCopy]:
    """Copies between pool and chunks by the copy engine."""
    for batch in chunk_batches(job, parts):
        pages, places = addresses(job, batch, staged=False)
        runs, pitch, _ = batch.tiling
        for block in range(runs.blocks):
            here, there = pages + block * runs.kernel_stride, places + block * pitch
            to, source = (there, here) if job.direction is Direction.STORE else (here, there)
            yield BulkCopy(to, source, np.full(len(to), runs.unit_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCopy:
    """Bound copies whose tables are on the device, kept alive by `tables`; recorded in one command buffer if they
    are small."""

    bound_copies: tuple[BoundCopy, ...]
    tables: object
    commands: CommandBuffer | None = None

    @property
    def num_bytes(self) -> int:
        return sum(bound.template.num_bytes for bound in self.bound_copies)

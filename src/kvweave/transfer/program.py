"""Programs: drafts with the addresses of a job's pages and buffers, ready to be issued. Making them needs no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from kvweave.transfer.copier import Job, Way
from kvweave.transfer.copies import Numbers
from kvweave.transfer.drafts import Draft
from kvweave.transfer.lines import addresses, chunk_lines
from kvweave.transfer.pieces import Part
from kvweave.transfer.tables import widest
from kvweave.transfer.tape import Tape


class Straight(NamedTuple):
    """Runs of bytes that a copy engine moves."""

    targets: Numbers
    sources: Numbers
    sizes: Numbers


@dataclass(frozen=True, eq=False)
class Call:
    """A draft for the pages and buffers of a job, or of one that differs in these only.

    What is not asked for is not worked out: copies between buffers and staging memory need no addresses of pages. The
    kernel's table lies at `table_at`, if the job was prepared.
    """

    draft: Draft
    job: Job
    table_at: int | None = None

    @cached_property
    def direct(self) -> tuple[Straight, ...]:
        return tuple(_direct(self.job, self.draft.direct))

    @cached_property
    def sheet(self) -> Numbers:
        """What the device makes the kernel's table of: line by line, the addresses of its pages and where they go."""
        staged = bool(self.draft.staged_bytes)
        found = [numbers for line in self.draft.lines for numbers in addresses(self.job, line, staged=staged)]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    @cached_property
    def vector_bytes(self) -> int:
        """The widest vector that starts at a multiple of itself everywhere: 16, 8, 4, 2 or 1."""
        ends = [] if self.draft.staged_bytes else self.job.starts.tolist()
        return widest(reduce(or_, [*ends, *self.job.pools], self.draft.bits))


def _direct(job: Job, parts: Iterable[Part]) -> Iterator[Straight]:
    """The pages between their pool and their chunks, by the copy engine."""
    for line in chunk_lines(job, parts):
        pages, places = addresses(job, line, staged=False)
        runs, pitch = line.cut
        for block in range(runs.blocks):
            here, there = pages + block * runs.kernel_stride, places + block * pitch
            to, source = (there, here) if job.way is Way.STORE else (here, there)
            yield Straight(to, source, np.full(len(to), runs.unit_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Calls whose tables are on the device, where `tables` keeps them; all on one tape, if they are few."""

    calls: tuple[Call, ...]
    tables: object
    tape: Tape | None = None

    @property
    def num_bytes(self) -> int:
        return sum(call.draft.num_bytes for call in self.calls)

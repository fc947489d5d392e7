"""Programs: drafts with the addresses of a job's pages and buffers, ready to be issued. Making them needs no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from kvweave.transfer.copier import Buffer, Job, Way
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


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A draft for some pages and buffers.

    `sheet` is what the device makes the kernel's table of: line after line, the addresses of its pages and where they
    go. The table itself lies at `table_at`, if the job was prepared.
    """

    draft: Draft
    buffers: tuple[Buffer, ...]
    starts: Numbers
    """Their addresses."""
    direct: tuple[Straight, ...]
    sheet: Numbers
    vector_bytes: int = 1
    """The widest vector that starts at a multiple of itself everywhere: 16, 8, 4, 2 or 1."""
    table_at: int | None = None


def filled(job: Job, draft: Draft) -> Call:
    """A draft of this job, or of one that differs in pages and buffers only, as it is to be carried out."""
    staged = bool(draft.staged_bytes)
    bits = reduce(or_, job.pools, draft.bits if staged else draft.bits | int(np.bitwise_or.reduce(job.starts)))
    sheet = [numbers for line in draft.lines for numbers in addresses(job, line, staged=staged)]
    made = np.concatenate(sheet) if sheet else np.empty(0, np.int64)
    return Call(draft, job.buffers, job.starts, tuple(_direct(job, draft.direct)), made, widest(bits))


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

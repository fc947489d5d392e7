"""Lines: where the pages of a part are, and where they go, as addresses for the copy kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvweave.transfer.copier import Job
from kvweave.transfer.copies import Numbers
from kvweave.transfer.pieces import Part, part_bytes
from kvweave.transfer.runs import Runs
from kvweave.transfer.tables import Lines


def chunk_places(job: Job, part: Part) -> Numbers:
    """Where the part's blocks start in their chunks."""
    move = job.copies.moves[part.move]
    group = job.copies.layout.group(move.tag)
    places: Numbers = move.blocks[part.first : part.last] * group.block_bytes
    places += job.starts[move.chunks[part.first : part.last]]
    places += group.offset - group.first_block * group.block_bytes
    return places


def chunk_lines(job: Job, part: Part) -> list[Lines]:
    """Between pages and chunks."""
    places = chunk_places(job, part)
    return [Lines(_pages(job, part, runs), places + runs.flat_start, runs, runs.flat_stride) for runs in job.runs(part)]


def staged_lines(job: Job, parts: Sequence[Part], starts: Sequence[int]) -> list[Lines]:
    """Between pages and staging memory, where each part is packed: its layers and nothing else, from its start on."""
    made = []
    for part, start in zip(parts, starts, strict=False):
        layer_bytes = job.copies.layout.group(job.copies.moves[part.move].tag).layer_bytes
        count = part.last - part.first
        places = start + np.arange(count) * (part_bytes(job.copies, part) // count) - part.low * layer_bytes
        pitch = (part.high - part.low) * layer_bytes
        made += [Lines(_pages(job, part, runs), places + runs.flat_start, runs, pitch) for runs in job.runs(part)]
    return made


def _pages(job: Job, part: Part, runs: Runs) -> Numbers:
    """The addresses of the part's pages, as far as these runs of them go."""
    move = job.copies.moves[part.move]
    pool = job.arena.pool(job.arena.plan.group(move.tag).pool).data_ptr()
    pages: Numbers = pool + runs.start + move.pages[part.first : part.last] * runs.page_stride
    return pages

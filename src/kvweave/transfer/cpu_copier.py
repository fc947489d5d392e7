"""The CPU copier: one call copies all pages of a group to their chunks or back, with several threads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from kvweave.copying import Bytes, StridedBlocks, copy_blocks
from kvweave.transfer.copier import ChunkBuffer, CopyJob, CopyStep, Direction, host_bytes
from kvweave.transfer.pieces import MoveSlice

PIECE_BYTES = 128 << 20
"""Bytes copied before it is checked whether the transfer was cancelled."""


class CPUCopier:
    """Copies between memories of the host, by at most `threads` threads."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(8, os.cpu_count() or 1)

    def prepare(self, job: CopyJob) -> CopyJob:
        return job

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        for piece in job.pieces(PIECE_BYTES, PIECE_BYTES):
            for parts in _by_layers(piece.parts):
                self._carry_out(job, parts)
            yield CopyStep(piece.num_bytes, piece.layers)

    def close(self) -> None:
        """Nothing to free."""

    def _carry_out(self, job: CopyJob, parts: list[MoveSlice]) -> None:
        """Copy slices of the same layers of one move."""
        move = job.copies.moves[parts[0].move]
        chunk_group = job.copies.layout.group(move.tag)
        pool = host_bytes(job.arena, job.arena.plan.group(move.tag).pool)
        entries = np.concatenate([np.arange(part.first, part.last) for part in parts])
        pages, chunks, blocks = move.pages[entries], move.chunks[entries], move.blocks[entries]
        places = chunk_group.offset + (blocks - chunk_group.first_block) * chunk_group.block_bytes
        memories = [_array(buffer) for buffer in job.buffers]
        for runs in job.runs(parts[0]):
            here = StridedBlocks([pool], runs.start + pages * runs.page_stride, (runs.kernel_stride, runs.unit_stride))
            there = StridedBlocks(memories, places + runs.flat_start, (runs.flat_stride, runs.unit_bytes), chunks)
            to, source = (there, here) if job.direction is Direction.STORE else (here, there)
            copy_blocks(to, source, (runs.blocks, runs.units, runs.unit_bytes), threads=self.threads)


def _by_layers(parts: Iterable[MoveSlice]) -> Iterable[list[MoveSlice]]:
    """Slices by move and layers."""
    found: defaultdict[tuple[int, int, int], list[MoveSlice]] = defaultdict(list)
    for part in parts:
        found[part.move, part.low, part.high].append(part)
    return found.values()


def _array(buffer: ChunkBuffer) -> Bytes:
    assert buffer.array is not None, "the CPU copier moves host memory only"
    return buffer.array

"""The CPU copier: one strided copy a page, whatever its lanes and kernel blocks; several threads share large pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from kvweave.transfer.copier import Bytes, Job, Step, Way, host_bytes
from kvweave.transfer.pieces import Part
from kvweave.transfer.runs import Runs

PIECE_BYTES = 128 << 20
"""What is dealt out to the threads at once: with a quarter of it, 8 threads were 12% slower, and 16 28%."""
SHARE_BYTES = 1 << 20
"""Less than this is not worth another thread."""


class CPUCopier:
    """Copies with numpy, which lets go of the interpreter meanwhile. `threads`: at most so many at once."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self.threads, "kvweave-copy") if self.threads > 1 else None

    def prepare(self, job: Job) -> Job:
        return job

    def steps(self, job: Job) -> Iterator[Step]:
        for piece in job.pieces(PIECE_BYTES, PIECE_BYTES):
            self._carry_out([copy for part in piece.parts for copy in _copies(job, part)], piece.num_bytes)
            yield Step(piece.num_bytes, piece.layers)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _carry_out(self, copies: list[tuple[Bytes, Bytes]], num_bytes: int) -> None:
        """All copies, dealt out to the threads; an error in one of them is raised here, when all have ended."""
        shares = min(self.threads, num_bytes // SHARE_BYTES)
        if self._pool is None or shares < 2:
            _copy_all(copies)
            return
        pieces = [half for copy in copies for half in _split(*copy, shares)]
        waiting = [self._pool.submit(_copy_all, pieces[share::shares]) for share in range(shares)]
        errors = [error for future in waiting if (error := future.exception())]
        if errors:
            raise errors[0]


def _copy_all(copies: list[tuple[Bytes, Bytes]]) -> None:
    for to, source in copies:
        np.copyto(to, source)


def _split(to: Bytes, source: Bytes, shares: int) -> list[tuple[Bytes, Bytes]]:
    """A copy as several, along its longest axis but the last, or along that where it is all there is."""
    if to.nbytes < shares * SHARE_BYTES:
        return [(to, source)]
    axis = int(np.argmax(to.shape[:-1])) if max(to.shape[:-1]) >= shares else to.ndim - 1
    return list(zip(np.array_split(to, shares, axis), np.array_split(source, shares, axis), strict=True))


def _copies(job: Job, part: Part) -> Iterator[tuple[Bytes, Bytes]]:
    """(to, from) for each stretch of entries that follow one another on both sides: `[pages, blocks, units, bytes]`."""
    move = job.copies.moves[part.move]
    chunk_group = job.copies.layout.group(move.tag)
    group = job.arena.plan.group(move.tag)
    pool = host_bytes(job.arena, group.pool)
    pages, chunks, blocks = (a[part.first : part.last] for a in (move.pages, move.chunks, move.blocks))
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(blocks) != 1) | (np.diff(chunks) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    for runs in job.runs(part):
        for first, last in pairwise(bounds):
            chunk = job.buffers[chunks[first]].array
            assert chunk is not None, "the CPU copier moves host memory only"
            at = chunk_group.offset + (int(blocks[first]) - chunk_group.first_block) * chunk_group.block_bytes
            page = _strided(pool, runs.start + int(pages[first]) * runs.page_stride, last - first, runs)
            flat = _flat(chunk, at, last - first, runs, chunk_group.block_bytes)
            yield (flat, page) if job.way is Way.STORE else (page, flat)


def _strided(pool: Bytes, start: int, count: int, runs: Runs) -> Bytes:
    strides = (runs.page_stride, runs.kernel_stride, runs.unit_stride, 1)
    return _window(pool, start, (count, runs.blocks, runs.units, runs.unit_bytes), strides)


def _flat(chunk: Bytes, at: int, count: int, runs: Runs, block_bytes: int) -> Bytes:
    strides = (block_bytes, runs.flat_stride, runs.unit_bytes, 1)
    return _window(chunk, at + runs.flat_start, (count, runs.blocks, runs.units, runs.unit_bytes), strides)


def _window(memory: Bytes, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """A view that numpy itself checks to lie within `memory`."""
    return np.ndarray(shape, np.uint8, memory, start, strides)

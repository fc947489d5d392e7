"""The reference copier: copies each role of each kernel block through the views that kernels use. Slow."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.copying import Bytes
from kvweave.plan import View
from kvweave.transfer.copier import CopyJob, CopyStep, Direction, host_bytes
from kvweave.transfer.pieces import MoveSlice

PIECE_BYTES = 1 << 20


class ReferenceCopier:
    """Correct by inspection: it uses no lanes, strides or runs, only the views of plan and chunk."""

    def prepare(self, job: CopyJob) -> CopyJob:
        return job

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        for piece in job.pieces(PIECE_BYTES, PIECE_BYTES):
            for part in piece.parts:
                _copy(job, part)
            yield CopyStep(piece.num_bytes, piece.layers)

    def close(self) -> None:
        """Nothing to free."""


def _copy(job: CopyJob, part: MoveSlice) -> None:
    move = job.copies.moves[part.move]
    chunk_group = job.copies.layout.group(move.tag)
    group = job.arena.plan.group(move.tag)
    pool = host_bytes(job.arena, group.pool)
    for layer in group.layers[part.low : part.high]:
        for role in group.cache.roles:
            here, there = job.arena.plan.view(layer, role.name, move.tag), chunk_group.view(layer, role.name)
            for index in range(part.first, part.last):
                chunk = job.buffers[move.chunks[index]].array
                assert chunk is not None, "the reference copier moves host memory only"
                for kernel in range(group.kernel_blocks):
                    at = int(move.pages[index]) * group.kernel_blocks + kernel
                    to = (int(move.blocks[index]) - chunk_group.first_block) * group.kernel_blocks + kernel
                    mine, other = _block(pool, here, at), _block(chunk, there, to)
                    if job.direction is Direction.STORE:
                        other[:] = mine
                    else:
                        mine[:] = other


def _block(memory: Bytes, view: View, kernel_block: int) -> Bytes:
    """The bytes of a role in one kernel block."""
    start = view.offset + kernel_block * view.strides[0]
    size = view.dtype.align_bytes
    for axis in view.shape[1:]:
        size *= axis
    return memory[start : start + size]

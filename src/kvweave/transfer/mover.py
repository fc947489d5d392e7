"""The mover: transfers between the pages of an arena and chunks, in both directions at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from kvweave.errors import ArenaClosed, BadCopy
from kvweave.tensor import Arena
from kvweave.transfer.check import check_buffers, check_layout, check_pages, check_places
from kvweave.transfer.copier import ChunkBuffer, Copier, CopyJob, Direction
from kvweave.transfer.copy_plan import CopyPlan
from kvweave.transfer.cpu_copier import CPUCopier
from kvweave.transfer.layout import ChunkLayout
from kvweave.transfer.transfer import Progress, Transfer

Buffers: TypeAlias = Sequence[Any]
"""Tensors, arrays, or other objects with a buffer."""
KNOWN = 1024
"""Number of plan shapes whose checks are cached: checking one takes as long as copying a megabyte."""


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Number of transfers and of their bytes, by direction."""

    stores: int = 0
    loads: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0


class Mover:
    """Stores pages into chunks and loads them back. Thread-safe.

    An invalid copy is an error at once, before any byte moves; later errors are those of the `Transfer`. With
    `background`, one thread for each direction carries out transfers in order. Otherwise the caller's thread issues all
    of the transfer: on a CPU it is done then; on a GPU it is queued with the least delay, and cannot be cancelled. A
    copy that was prepared as a single step is issued at once in either case. On a GPU a transfer runs after the work of
    the caller's current stream.
    """

    def __init__(self, arena: Arena, copier: Copier | None = None, *, background: bool = True) -> None:
        self.arena = arena
        self.copier = copier or copier_for(arena)
        self._threads = (
            {direction: ThreadPoolExecutor(1, f"kvweave-{direction}") for direction in Direction} if background else {}
        )
        self._stats = MoverStats()
        self._closed = False
        self._known: dict[Hashable, ChunkLayout] = {}
        """Plan shapes that passed the checks, with their layouts, which are part of the key by identity and so kept
        alive."""

    def store(
        self,
        copies: CopyPlan,
        buffers: Sequence[Any],
        *,
        layers: int | None = None,
        on_progress: Progress | None = None,
    ) -> Transfer:
        """Copy pages into chunks, one buffer for each of `copies.chunks`. Other bytes of a chunk stay as they were.
        Pages must not be written until the transfer is done."""
        return self.start(self._job(copies, buffers, Direction.STORE, layers), on_progress)

    def load(
        self,
        copies: CopyPlan,
        buffers: Sequence[Any],
        *,
        layers: int | None = None,
        on_progress: Progress | None = None,
    ) -> Transfer:
        """Copy chunks into pages. With `layers`, that many layers of the model at a time: see `Transfer.wait_layer`."""
        return self.start(self._job(copies, buffers, Direction.LOAD, layers), on_progress)

    def prepare(
        self, copies: CopyPlan, buffers: Buffers, direction: Direction, *, layers: int | None = None
    ) -> CopyJob:
        """Check a copy and compute what can be computed in advance; the result can be started repeatedly, with little
        delay.

        On a GPU, a copy into pinned buffers without `layers` and of at most `CopyTuning.recorded_bytes` is then a
        single step.
        """
        return self.copier.prepare(self._job(copies, buffers, direction, layers))

    def start(self, job: CopyJob, on_progress: Progress | None = None) -> Transfer:
        """Start a copy that was prepared by this mover."""
        self._check_open()
        steps = self.copier.steps(job)
        transfer = Transfer(job.direction, job.num_bytes, on_progress)
        if self._threads and job.num_bytes and (on_progress is not None or not job.is_single):
            self._threads[job.direction].submit(transfer.run, steps, until_done=True)
        else:
            transfer.run(steps, until_done=False)
        self._count(job.direction, job.num_bytes)
        return transfer

    def stats(self) -> MoverStats:
        return self._stats

    def close(self) -> None:
        """Wait for transfers in flight, and free the copier's resources; calling it twice is fine."""
        self._closed = True
        for thread in self._threads.values():
            thread.shutdown()
        self.copier.close()

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _job(self, copies: CopyPlan, memory: Buffers, direction: Direction, layers: int | None) -> CopyJob:
        self._check_open()
        if layers is not None and layers < 1:
            raise BadCopy(f"a step completes at least 1 layer, not {layers}")
        buffers = tuple(map(ChunkBuffer.of, memory))
        if direction is Direction.STORE and any(b.array is not None and not b.array.flags.writeable for b in buffers):
            raise BadCopy("a chunk cannot be stored in a read-only buffer")
        stores = direction is Direction.STORE
        key = id(copies.layout), stores, copies.shape
        if key not in self._known:
            check_layout(copies.layout, self.arena.plan)
            check_places(copies, fills_chunks=stores)
            if len(self._known) == KNOWN:
                self._known.clear()
            self._known[key] = copies.layout
        check_buffers(copies, [buffer.extent for buffer in buffers], fills_chunks=stores)
        check_pages(copies, self.arena.plan, fills_pages=not stores)
        return CopyJob(self.arena, copies, buffers, direction, layers)

    def _check_open(self) -> None:
        if self._closed or self.arena.is_closed:
            raise ArenaClosed("the mover, or its arena, is closed")

    def _count(self, direction: Direction, num_bytes: int) -> None:
        s = self._stats
        if direction is Direction.STORE:
            self._stats = MoverStats(s.stores + 1, s.loads, s.stored_bytes + num_bytes, s.loaded_bytes)
        else:
            self._stats = MoverStats(s.stores, s.loads + 1, s.stored_bytes, s.loaded_bytes + num_bytes)


def copier_for(arena: Arena) -> Copier:
    """The fastest copier for the device of an arena."""
    if arena.memory.device.type == "cuda":
        from kvweave.transfer.cuda_copier import CUDACopier  # noqa: PLC0415  (Triton is there with CUDA only)

        return CUDACopier(arena.memory.device)
    return CPUCopier()

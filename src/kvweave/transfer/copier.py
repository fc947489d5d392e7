"""The copier protocol: a copier carries out a copy plan step by step. All copiers run the same plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvweave.copying import Bytes
from kvweave.errors import BadCopy
from kvweave.tensor import Arena
from kvweave.transfer.check import MemoryRange
from kvweave.transfer.copy_plan import CopyPlan, Numbers
from kvweave.transfer.pieces import MoveSlice, Piece, split_by_layers, split_by_size
from kvweave.transfer.runs import Runs, runs_of


class Direction(StrEnum):
    """From pages into chunks, or from chunks into pages."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBuffer:
    """A chunk's memory: an array if it is on the host, otherwise an address. `owner` keeps it alive."""

    extent: MemoryRange
    array: Bytes | None
    owner: object

    @classmethod
    def of(cls, memory: Any) -> ChunkBuffer:
        """From a tensor, an array, or anything with a buffer (bytes, mmap, shared memory); its bytes must be
        contiguous.

        To use a buffer repeatedly, make it once: that saves looking at the memory each time.
        """
        if isinstance(memory, ChunkBuffer):
            return memory
        if isinstance(memory, torch.Tensor):
            if not memory.is_contiguous():
                raise BadCopy(f"a chunk's buffer must be one run of bytes, not a tensor with strides {memory.stride()}")
            flat = memory.detach().reshape(-1).view(torch.uint8)
            array = flat.numpy() if flat.device.type == "cpu" else None
            return cls(MemoryRange(str(flat.device), flat.data_ptr(), flat.numel()), array, memory)
        try:
            array = np.frombuffer(memory, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise BadCopy(f"a chunk's buffer must be one run of bytes: {error}") from error
        return cls(MemoryRange("cpu", array.ctypes.data, array.nbytes), array, memory)


@dataclass(frozen=True, eq=False)
class CopyJob:
    """A checked copy, as copiers take it."""

    arena: Arena
    copies: CopyPlan
    buffers: tuple[ChunkBuffer, ...]
    direction: Direction
    layers: int | None = None
    """Layers of the model that each step completes; None: steps need not follow layers."""
    prepared: Any = None
    """What the copier's `prepare` returned, if the copy was prepared."""
    is_single: bool = False
    """Whether the prepared copy is a single step, which is issued as soon as `steps` is called."""
    _runs: dict[tuple[int, int, int], tuple[Runs, ...]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.copies.num_bytes

    @cached_property
    def starts(self) -> Numbers:
        """The addresses of the buffers."""
        return np.array([buffer.extent.start for buffer in self.buffers], np.int64)

    @cached_property
    def pools(self) -> list[int]:
        """For each move, the address of its pool."""
        groups = [self.arena.plan.group(move.tag) for move in self.copies.moves]
        return [self.arena.pool(group.pool).data_ptr() for group in groups]

    def runs(self, part: MoveSlice) -> tuple[Runs, ...]:
        """The runs of a slice's pages in their pool; computed once for all slices of the same layers."""
        key = part.move, part.low, part.high
        if key not in self._runs:
            tag = self.copies.moves[part.move].tag
            group = self.arena.plan.group(tag)
            layer_bytes = self.copies.layout.group(tag).layer_bytes
            self._runs[key] = runs_of(group, self.arena.plan.pool(group.pool), layer_bytes, part.low, part.high)
        return self._runs[key]

    def with_tags(self, tags: Iterable[str]) -> CopyJob:
        """The same copy, of some groups alone."""
        return replace(self, copies=self.copies.only(tags), _runs={})

    def pieces(self, small: int, large: int) -> Iterator[Piece]:
        """The job in pieces of about `large` bytes at most, and of `small` bytes where a pipeline starts or ends."""
        if self.layers is not None:
            return split_by_layers(self.copies, self.layers, large)
        return split_by_size(self.copies, small, large, rising=self.direction is Direction.STORE)


class Completion(Protocol):
    """Tells when a step that goes on after it was issued is done."""

    def is_done(self) -> bool:
        """Whether the step is done; raises its error if it failed. Does not block."""
        ...

    def spin(self, seconds: float) -> None:
        """Poll until the step is done, for `seconds` at most, without sleeping."""
        ...

    def block_stream(self, stream: Any) -> None:
        """Make later work on `stream` (None: the current one) wait for the step."""
        ...


class CopyStep(NamedTuple):
    """`num_bytes` that were moved, or will be when `completion` is done; then all layers below `layers` are
    complete."""

    num_bytes: int
    layers: int
    completion: Completion | None = None


class Copier(Protocol):
    """Carries out copies. May be used by several threads, for one job each."""

    def prepare(self, job: CopyJob) -> CopyJob:
        """The same job with everything computed in advance that does not need the copy to start: to save time later."""
        ...

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        """Issue the job piece by piece; a single step at once. Closing the iterator early leaves the rest undone."""
        ...

    def close(self) -> None:
        """Free its resources; calling it twice is fine."""
        ...


def host_bytes(arena: Arena, pool: str) -> Bytes:
    """The bytes of a pool that is on the host."""
    array: Bytes = arena.pool(pool).numpy()
    return array

"""The seam: a copier carries out a copy plan, step by step. Every copier runs the same plans."""

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
    """Out of the pages into chunks, or back."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBuffer:
    """A chunk's memory: on the host as an array, elsewhere by address. `owner` keeps it alive."""

    extent: MemoryRange
    array: Bytes | None
    owner: object

    @classmethod
    def of(cls, memory: Any) -> ChunkBuffer:
        """Of a tensor, an array, or anything with a buffer (bytes, mmap, shared memory): whole bytes in one run.

        Buffers that are used again and again are worth making once.
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
    """A checked copy: what a copier is given."""

    arena: Arena
    copies: CopyPlan
    buffers: tuple[ChunkBuffer, ...]
    direction: Direction
    layers: int | None = None
    """Layers of the model that each step completes; None: no matter which."""
    prepared: Any = None
    """What a copier has made of it, see `prepare`."""
    is_single: bool = False
    """Whether that is a single step, which is issued as soon as the steps are asked for."""
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
        """Where a part's pages lie in their pool; worked out once for all parts of the same layers."""
        key = part.move, part.low, part.high
        if key not in self._runs:
            tag = self.copies.moves[part.move].tag
            group = self.arena.plan.group(tag)
            layer_bytes = self.copies.layout.group(tag).layer_bytes
            self._runs[key] = runs_of(group, self.arena.plan.pool(group.pool), layer_bytes, part.low, part.high)
        return self._runs[key]

    def with_tags(self, tags: Iterable[str]) -> CopyJob:
        """The share of some groups."""
        return replace(self, copies=self.copies.only(tags), _runs={})

    def pieces(self, small: int, large: int) -> Iterator[Piece]:
        """The job in pieces of at most about `large` bytes; `small` where a pipeline starts or ends."""
        if self.layers is not None:
            return split_by_layers(self.copies, self.layers, large)
        return split_by_size(self.copies, small, large, rising=self.direction is Direction.STORE)


class Completion(Protocol):
    """Tells when a step is over, where it goes on after it was issued."""

    def is_done(self) -> bool:
        """Whether it is; raises what broke it. Does not block."""
        ...

    def spin(self, seconds: float) -> None:
        """Come back when it is over, at once, or after so long."""
        ...

    def block_stream(self, stream: Any) -> None:
        """What is put on `stream` (None: the current one) from now on comes after the step."""
        ...


class CopyStep(NamedTuple):
    """Bytes moved, or on their way until `completion` is over; then the model's layers below `layers` are there."""

    num_bytes: int
    layers: int
    completion: Completion | None = None


class Copier(Protocol):
    """Carries out jobs. May be used by several threads, one job each."""

    def prepare(self, job: CopyJob) -> CopyJob:
        """The job with all worked out that can be before it starts, for whoever has time now and none then."""
        ...

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        """Issue the job piece by piece, a single one at once; closing the iterator early leaves the rest undone."""
        ...

    def close(self) -> None:
        """Give back what it holds; twice is once."""
        ...


def host_bytes(arena: Arena, pool: str) -> Bytes:
    """A pool's bytes, on the host."""
    array: Bytes = arena.pool(pool).numpy()
    return array

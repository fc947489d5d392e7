"""Copies of blocks between host memories. A block is a grid of runs of bytes, with strides of its own on either side.

block i      planes x rows runs of `size` bytes
run (p, r)   at starts[i] + p * strides[0] + r * strides[1] of memories[memory_index[i]]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadCopy

try:
    from kvweave.copying._native import copy as _native
except ImportError:  # built without a C compiler: numpy copies the same bytes, more slowly
    _native = None  # type: ignore[assignment]

Bytes: TypeAlias = "NDArray[np.uint8]"
Numbers: TypeAlias = "NDArray[np.int64]"
Shape: TypeAlias = tuple[int, int, int]

IS_NATIVE = _native is not None
THREAD_BYTES = 2 << 20
"""Bytes that one thread should copy at least: for fewer, starting a thread takes longer than the copy."""
STREAMED_BYTES = 4 << 20
"""From this size on a copy bypasses the processor's cache: its bytes would be evicted from the cache before they are
read.
"""


@dataclass(frozen=True, slots=True, eq=False)
class StridedBlocks:
    """One side of a copy: where each block starts, in which memory, and the strides between its runs."""

    memories: Sequence[Bytes]
    starts: Numbers
    strides: tuple[int, int] = (0, 0)
    memory_index: Numbers | None = None
    """For each block the index of its memory; None: all blocks are in `memories[0]`."""


def copy(to: Bytes, source: Bytes, *, threads: int = 1) -> None:
    """Copy bytes over as many others. The two must not overlap; this is not checked."""
    if to.nbytes != source.nbytes:
        raise BadCopy(f"{source.nbytes} bytes do not go into {to.nbytes}")
    start = np.zeros(1, np.int64)
    copy_blocks(StridedBlocks([to], start), StridedBlocks([source], start), (1, 1, to.nbytes), threads=threads)


def copy_blocks(to: StridedBlocks, source: StridedBlocks, shape: Shape, *, threads: int = 1) -> None:
    """Copy blocks of `shape` (planes, rows, bytes of a run), `to.starts[i]` from `source.starts[i]`; blocks until done.

    Every address is checked to lie within its memory. Runs that are written must not overlap one another; this is not
    checked. `threads` is the largest number used, the caller's thread included.
    """
    if len(to.starts) != len(source.starts) or min(shape) < 0:
        raise BadCopy(f"{len(source.starts)} blocks of {shape} do not go into {len(to.starts)}")
    if any(not memory.flags.writeable for memory in to.memories):
        raise BadCopy("bytes cannot be copied into memory that is read-only")
    num_bytes = len(to.starts) * shape[0] * shape[1] * shape[2]
    if not num_bytes:
        return
    here, there = _addresses(to, shape), _addresses(source, shape)
    if threads > 1:
        threads = max(1, min(threads, num_bytes // THREAD_BYTES, os.cpu_count() or 1))
    if _native is None:
        _copy_by_numpy(to, source, shape, threads)
    else:
        _native(here, to.strides, there, source.strides, shape, num_bytes >= STREAMED_BYTES, threads)


def _addresses(blocks: StridedBlocks, shape: Shape) -> Numbers:
    """The address of each block, checked to lie within its memory."""
    for memory in blocks.memories:
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous:
            raise BadCopy(f"memory must be one run of bytes, not {memory.dtype} with strides {memory.strides}")
    starts = np.ascontiguousarray(blocks.starts, np.int64)
    reach = [stride * (count - 1) for stride, count in zip(blocks.strides, shape, strict=False)]
    before, behind = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0) + shape[2]
    if blocks.memory_index is None and len(blocks.memories) == 1:
        (memory,) = blocks.memories  # small copies are many: this costs a third of what follows
        if starts.min() + before >= 0 and starts.max() + behind <= memory.nbytes:
            placed: Numbers = starts + memory.ctypes.data
            return placed
    memory_index = np.zeros(len(blocks.starts), np.int64) if blocks.memory_index is None else blocks.memory_index
    if len(memory_index) != len(starts) or memory_index.min() < 0 or memory_index.max() >= len(blocks.memories):
        raise BadCopy(f"{len(starts)} blocks name memories other than the {len(blocks.memories)} given")
    first, last = starts + before, starts + behind
    wrong = (first < 0) | (last > np.array([memory.nbytes for memory in blocks.memories])[memory_index])
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        size = blocks.memories[memory_index[at]].nbytes
        raise BadCopy(f"block {at} spans bytes {first[at]} to {last[at]} of a memory of {size} bytes")
    addresses: Numbers = starts + np.array([memory.ctypes.data for memory in blocks.memories])[memory_index]
    return addresses


def _copy_by_numpy(to: StridedBlocks, source: StridedBlocks, shape: Shape, threads: int) -> None:
    def carry_out(first: int) -> None:
        for number in range(first, len(to.starts), threads):
            np.copyto(_window(to, number, shape), _window(source, number, shape))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(carry_out, range(threads)))


def _window(blocks: StridedBlocks, number: int, shape: Shape) -> Bytes:
    memory = blocks.memories[0 if blocks.memory_index is None else int(blocks.memory_index[number])]
    return np.ndarray(shape, np.uint8, memory, int(blocks.starts[number]), (*blocks.strides, 1))

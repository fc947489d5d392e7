# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803  (Triton reads annotations: arguments have none, constants are in capitals)
"""The copy kernel: one program moves one tile, wherever its page is cut. Gather and scatter differ in the way only.

A page is some runs of bytes in its pool and one in the chunk. What a program has to do it looks up in one place, so one
launch moves pages of many groups, pools and chunks, and rows of any width go in 16-byte vectors.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvweave.transfer.driver import check, cuda
from kvweave.transfer.tables import TILE, TILE_BYTES, Table

STEP_BYTES = 4 << 10
"""What a program loads before it stores: 32 bytes a thread, so that many programs fit beside one another."""
WARPS = 4
FETCH_WORDS = 512
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
SCRATCH = (0, 0)
"""Triton's kernels take up to two more addresses, for memory that these do not use."""


@triton.jit
def move(
    memory,
    flat,
    tiles,
    NUMBERS: tl.constexpr,
    WHOLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_VECTOR: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Move a tile of at most WHOLE words from a page to its place (GATHER), or back.

    Pages count from `memory` (address 0), places from `flat`, in words.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * NUMBERS
    here = tl.multiple_of(tl.load(tile), PER_VECTOR)
    there = tl.multiple_of(tl.load(tile + 1), PER_VECTOR)
    count = tl.multiple_of(tl.load(tile + 2).to(tl.int32), PER_VECTOR)
    source = memory + here if GATHER else flat + there
    target = flat + there if GATHER else memory + here
    for start in tl.static_range(0, WHOLE, STEP):
        words = start + tl.arange(0, STEP)
        inside = words < count
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])
def bring(target, source, count, STEP: tl.constexpr):
    """Copy `count` int64 of the host's pinned memory to the device."""
    words = tl.program_id(0) * STEP + tl.arange(0, STEP)
    inside = words < count
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


@cache
def _compiled(device: int, vector_bytes: int, gather: bool) -> Any:  # noqa: ARG001  (kernels belong to a device)
    """The kernel for one width and way: made once, then launched without being looked up."""
    word = min(8, vector_bytes)
    pointers = WORDS[word], WORDS[word], torch.int64
    constants = TILE, TILE_BYTES // word, STEP_BYTES // word, vector_bytes // word, gather
    return _loaded(move.warmup(*pointers, *constants, num_warps=WARPS, grid=(1,)))


@cache
def _bring(device: int) -> Any:  # noqa: ARG001
    return _loaded(bring.warmup(torch.int64, torch.int64, 0, FETCH_WORDS, num_warps=WARPS, grid=(1,)))


def _loaded(kernel: Any) -> tuple[int, int]:
    """The driver's handle of a kernel, and the shared memory it takes."""
    assert kernel.run is not None, "asking for its launcher is what loads it"
    return kernel.function, kernel.metadata.shared


def launch(table: Table, address: int, flat: int, stream: int, device: int, *, gather: bool) -> None:
    """Move what a table says, which lies at `address` on the device; its places count from `flat`. Does not block."""
    _launch(_compiled(device, table.vector_bytes, gather), len(table.tiles), stream, 0, flat, address)


def fetch(target: int, source: int, count: int, stream: int, device: int) -> None:
    """Copy `count` int64 from pinned memory, without a copy engine. Does not block."""
    _launch(_bring(device), -(-count // FETCH_WORDS), stream, target, source, count)


def _launch(kernel: tuple[int, int], programs: int, stream: int, *arguments: int) -> None:
    """By the driver itself: Triton's own way takes the host 20 us."""
    function, shared = kernel
    values = (ctypes.c_uint64 * (len(arguments) + len(SCRATCH)))(*arguments, *SCRATCH)
    start = ctypes.addressof(values)
    places = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
    check(cuda().cuLaunchKernel(function, programs, 1, 1, 32 * WARPS, 1, 1, shared, stream, places, None))


def current_stream(device: int) -> int:
    """The stream that the caller's work is on, by the short way."""
    return int(triton.runtime.driver.active.get_current_stream(device))

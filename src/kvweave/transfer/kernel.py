# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803  (Triton reads annotations: arguments have none, constants are in capitals)
"""The copy kernel: one program moves one tile, wherever its page is cut. Gather and scatter differ in the way only.

A page is some runs of bytes in its pool and one in the chunk. What a program has to do it looks up: its tile's row, the
row's shape. So one launch moves pages of many groups, pools and chunks, and rows of any width go in 16-byte vectors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvweave.transfer.tables import ROW, SHAPE, TILE_BYTES, Table

STEP_BYTES = 4 << 10
"""What a program loads before it stores: 32 bytes a thread, so that many programs fit beside one another."""
WARPS = 4
FETCH_WORDS = 1024
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def move(
    memory,
    flat,
    tiles,
    rows,
    shapes,
    ROW: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PER_VECTOR: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Move a tile of TILE words from a page to its place (GATHER), or back.

    Pages count from `memory` (address 0), places from `flat`, in words.
    """
    tile = tl.program_id(0)
    row = rows + tl.load(tiles + tile).to(tl.int64) * ROW
    page = tl.load(row)
    place = tl.load(row + 1)
    index = (tile - tl.load(row + 2)).to(tl.int32)
    shape = shapes + tl.load(row + 3) * SHAPE
    units = tl.load(shape).to(tl.int32)
    parts = tl.load(shape + 1).to(tl.int32)
    kernel_stride = tl.load(shape + 2)
    unit_stride = tl.load(shape + 3)
    unit_words = tl.load(shape + 4)
    pitch = tl.load(shape + 5)
    run = index // parts
    skip = (index % parts).to(tl.int64) * TILE
    unit = run % units
    block = run // units
    here = tl.multiple_of(page + block * kernel_stride + unit * unit_stride + skip, PER_VECTOR)
    there = tl.multiple_of(place + block * pitch + unit * unit_words + skip, PER_VECTOR)
    count = tl.multiple_of(tl.minimum(unit_words - skip, TILE).to(tl.int32), PER_VECTOR)
    source = memory + here if GATHER else flat + there
    target = flat + there if GATHER else memory + here
    for start in tl.static_range(0, TILE, STEP):
        words = start + tl.arange(0, STEP)
        inside = words < count
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])
def bring(target, source, count, STEP: tl.constexpr):
    """Copy `count` int32 of the host's pinned memory to the device."""
    words = tl.program_id(0) * STEP + tl.arange(0, STEP)
    inside = words < count
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


@cache
def _compiled(device: int, vector_bytes: int, gather: bool) -> Any:  # noqa: ARG001  (kernels belong to a device)
    """The kernel for one width and way: made once, then launched without being looked up."""
    word = min(8, vector_bytes)
    pointers = (WORDS[word], WORDS[word], torch.int32, torch.int64, torch.int64)
    return move.warmup(*pointers, *_constants(vector_bytes, gather), num_warps=WARPS, grid=(1,))


@cache
def _bring(device: int) -> Any:  # noqa: ARG001
    return bring.warmup(torch.int32, torch.int32, 0, FETCH_WORDS, num_warps=WARPS, grid=(1,))


def _constants(vector_bytes: int, gather: bool) -> tuple[Any, ...]:
    word = min(8, vector_bytes)
    return ROW, SHAPE, TILE_BYTES // word, STEP_BYTES // word, vector_bytes // word, gather


def launch(table: Table, address: int, flat: int, stream: int, device: int, *, gather: bool) -> None:
    """Move what a table says, which lies at `address` on the device; its places count from `flat`. Does not block."""
    kernel = _compiled(device, table.vector_bytes, gather)
    addresses = (0, flat, address, address + table.rows_at, address + table.shapes_at)
    kernel[(table.num_tiles, 1, 1)](*addresses, *_constants(table.vector_bytes, gather), stream=stream)


def fetch(target: int, source: int, count: int, stream: int, device: int) -> None:
    """Copy `count` int32 from pinned memory, without a copy engine. Does not block."""
    _bring(device)[(-(-count // FETCH_WORDS), 1, 1)](target, source, count, FETCH_WORDS, stream=stream)


def current_stream(device: int) -> int:
    """The stream that the caller's work is on, by the short way."""
    return int(triton.runtime.driver.active.get_current_stream(device))

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803  (Triton reads annotations: arguments have none, constants are in capitals)
"""The copy kernel: one program moves one tile, wherever its page lies. Gather and scatter differ in direction only.

A page is several runs of bytes in its pool and one run in the chunk. A program looks its tile up in a table, so that
one launch moves pages of many groups, pools and chunks, and rows of any width are moved in 16-byte vectors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.prepared_copy import TabulatedCopy
from kvweave.transfer.tiles import TILE, TILE_BYTES, PageTiles

STEP_BYTES = 4 << 10
"""Bytes that a program loads before it stores: 32 bytes a thread, so that many programs are resident at once."""
WRITTEN_BYTES = 256
"""Bytes that only one warp writes: two cache lines. Every second run of 2112 bytes starts within such a pair; where
two warps wrote to one pair, scattering them with the latents beside them ran at .89 of a device copy instead of .91."""
WARPS = 4
SPREAD_TILES = 256
"""Tiles that one program of `spread` writes."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def move(
    memory,
    flat,
    tiles,
    NUMBERS: tl.constexpr,
    WHOLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_VECTOR: tl.constexpr,
    LINE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Move a tile of at most WHOLE words from its page to its place in the chunk (GATHER), or back.

    Page addresses are relative to `memory` (address 0), places to `flat`, both in words. Steps end at multiples of LINE
    of the target, so that no two warps of a program write to one line.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * NUMBERS
    here = tl.multiple_of(tl.load(tile), PER_VECTOR)
    there = tl.multiple_of(tl.load(tile + 1), PER_VECTOR)
    count = tl.multiple_of(tl.load(tile + 2).to(tl.int32), PER_VECTOR)
    source = memory + here if GATHER else flat + there
    target = flat + there if GATHER else memory + here
    lead = tl.multiple_of(((there if GATHER else here) % LINE).to(tl.int32), PER_VECTOR)
    for start in tl.static_range(0, WHOLE, STEP):
        words = start + tl.arange(0, STEP) - lead
        inside = (words >= 0) & (words < count)
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)
    if lead + count > WHOLE:
        words = WHOLE + tl.arange(0, STEP) - lead
        inside = words < count
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count", "shift"])
def spread(tiles, pages, places, page, count, shift, NUMBERS: tl.constexpr, STEP: tl.constexpr):
    """Write the tiles of pages with the same layout: program (p, s) writes a part of the `count` tiles of page p, in
    words of 1 << `shift` bytes.

    `page` holds the tiles of one page; `pages` and `places`, in pinned host memory, the addresses of each page and of
    its place.
    """
    number = tl.program_id(0).to(tl.int64)
    here, there = tl.load(pages + number), tl.load(places + number)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = at < count
    tile, own = tiles + (number * count + at) * NUMBERS, page + at * NUMBERS
    tl.store(tile, (tl.load(own, mask=inside) + here) >> shift, mask=inside)
    tl.store(tile + 1, (tl.load(own + 1, mask=inside) + there) >> shift, mask=inside)
    tl.store(tile + 2, tl.load(own + 2, mask=inside) >> shift, mask=inside)


@cache
def _compiled(device: int, vector_bytes: int, gather: bool) -> Kernel:  # noqa: ARG001  (kernels belong to a device)
    """The compiled kernel for a vector width and a direction, cached: looking it up in Triton takes longer."""
    word = min(8, vector_bytes)
    pointers = WORDS[word], WORDS[word], torch.int64
    constants = TILE, TILE_BYTES // word, STEP_BYTES // word, vector_bytes // word, WRITTEN_BYTES // word, gather
    return Kernel(move.warmup(*pointers, *constants, num_warps=WARPS, grid=(1,)))


@cache
def _spread(device: int) -> Kernel:  # noqa: ARG001
    numbers = TILE, SPREAD_TILES
    return Kernel(spread.warmup(*[torch.int64] * 4, 0, 0, *numbers, num_warps=WARPS, grid=(1,)))


class Kernel:
    """A compiled kernel, launched through the driver: Triton's own launcher takes 20 us of the host's time."""

    def __init__(self, compiled: Any) -> None:
        assert compiled.run is not None, "asking for its launcher is what loads it"
        self._function, self._shared = compiled.function, compiled.metadata.shared
        self._threads = 32 * compiled.metadata.num_warps

    def launch(self, commands: CommandBuffer, grid: tuple[int, int], stream: int, *arguments: int) -> None:
        commands.launch(self._function, grid, self._threads, self._shared, arguments, stream)


def launch(
    commands: CommandBuffer,
    table: int,
    num_tiles: int,
    vector_bytes: int,
    flat: int,
    stream: int,
    device: int,
    *,
    gather: bool,
) -> None:
    """Launch the copy kernel over a table on the device; places in the table are relative to `flat`."""
    _compiled(device, vector_bytes, gather).launch(commands, (num_tiles, 1), stream, 0, flat, table)


class Tabulator:
    """Writes tables on one device, where it caches the tiles of one page for each layout."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pages: dict[PageTiles, tuple[int, torch.Tensor]] = {}

    def tabulate(
        self, commands: CommandBuffer, table: int, address_table: int, bound: TabulatedCopy, stream: int
    ) -> None:
        """Record the commands that write the table of a copy, at an address on the device, from its address table in
        pinned memory."""
        shift = min(8, bound.vector_bytes).bit_length() - 1
        for batch in bound.batches:
            pages, tiles = batch.num_pages, batch.tiling.num_tiles
            grid = pages, -(-tiles // SPREAD_TILES)
            where = table, address_table, address_table + 8 * pages, self._page(batch.tiling)
            _spread(self._device).launch(commands, grid, stream, *where, tiles, shift)
            table, address_table = table + 8 * TILE * pages * tiles, address_table + 16 * pages

    def close(self) -> None:
        """Drop the cached tiles; nothing may be in flight."""
        self._pages = {}

    def _page(self, tiling: PageTiles) -> int:
        """The address of the tiles of one page, on the device."""
        if tiling not in self._pages:
            tiles = torch.from_numpy(tiling.tiles).to(f"cuda:{self._device}")
            self._pages.setdefault(tiling, (tiles.data_ptr(), tiles))  # the first stays: another thread may use it
        return self._pages[tiling][0]


def current_stream(device: int) -> int:
    """The caller's current stream, without torch's slower wrapper."""
    return int(torch._C._cuda_getCurrentRawStream(device))

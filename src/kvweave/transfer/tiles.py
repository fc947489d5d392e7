"""Tables for the copy kernel: a piece as tiles, each moved by one program.

A tile is its address in the page, its address in the chunk or in staging memory, and its length.

All three are in words: the widest, up to 8 bytes, that all addresses, strides and sizes are multiples of. Pages of a
batch have the same layout, so the device computes the table from the addresses of the pages and the tiles of one page.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.runs import Runs

TILE_BYTES = 8 << 10
"""Bytes that one program of the kernel moves, at most."""
LINE_BYTES = 128
"""Tiles of a run start at multiples of this from the start of the run, so that no two share a cache line."""
WIDEST = 16
TILE = 3
"""Integers of a tile."""


class PageTiles(Protocol):
    """How a page is cut. Equal only if its tiles are."""

    def __hash__(self) -> int: ...

    @property
    def num_tiles(self) -> int: ...

    @property
    def bits(self) -> int:
        """The bitwise or of all strides and sizes: a power of two divides it only if it divides all of them."""
        ...

    @property
    def tiles(self) -> Numbers:
        """`[tiles, TILE]`: in bytes from the page's start in the pool and in the chunk."""
        ...


class Tiling(NamedTuple):
    """The layout of a page on both sides: `runs` in the pool; in the chunk, kernel blocks are `pitch` bytes apart,
    units `unit_pitch` (None: without gaps)."""

    runs: Runs
    pitch: int
    unit_pitch: int | None = None

    @property
    def num_tiles(self) -> int:
        """Tiles of one page."""
        return self.runs.blocks * self.runs.units * _per_run(self.runs.unit_bytes)

    @property
    def bits(self) -> int:
        runs = self.runs
        here = runs.start | runs.page_stride | runs.kernel_stride | runs.unit_stride
        return here | runs.unit_bytes | self.pitch | (self.unit_pitch or 0)

    @property
    def tiles(self) -> Numbers:
        return tiles_of(self)


@lru_cache(maxsize=1024)
def tiles_of(tiling: Tiling) -> Numbers:
    """The tiles of a page; those of a run are about equally long."""
    runs, pitch, unit_pitch = tiling
    apart = runs.unit_bytes if unit_pitch is None else unit_pitch
    parts = _per_run(runs.unit_bytes)
    length = min(runs.unit_bytes, -(-runs.unit_bytes // (parts * LINE_BYTES)) * LINE_BYTES)
    block, unit, skip = np.ogrid[: runs.blocks, : runs.units, : parts * length : length]
    tiles = np.empty((runs.blocks, runs.units, parts, TILE), np.int64)
    tiles[..., 0] = block * runs.kernel_stride + unit * runs.unit_stride + skip
    tiles[..., 1] = block * pitch + unit * apart + skip
    tiles[..., 2] = np.minimum(length, runs.unit_bytes - skip)
    return tiles.reshape(-1, TILE)


def widest(bits: int) -> int:
    """The largest power of two, up to 16, that divides every number whose bits are in `bits`."""
    return (bits | WIDEST) & -(bits | WIDEST)


def _per_run(num_bytes: int) -> int:
    return -(-num_bytes // TILE_BYTES)

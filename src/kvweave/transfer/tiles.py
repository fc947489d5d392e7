"""Tables for the copy kernel: a piece of a job as tiles, each of which one program of the kernel moves.

    tile     where it is among the pages, where it is in the chunk or in staging memory, and how long it is

All three are counted in words: the widest that all addresses, strides and sizes allow, up to 8 bytes. Pages of a kind
are cut alike, so the device makes the table itself, of where pages are and of what one looks like.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.runs import Runs

TILE_BYTES = 8 << 10
"""What one program of the kernel moves, at most."""
LINE_BYTES = 128
"""Tiles of a run start at multiples of this from its start, so that none shares a cache line with the next."""
WIDEST = 16
TILE = 3
"""Numbers that a tile takes."""


class Tiling(NamedTuple):
    """How pages are cut: `runs` says how they lie here; there, their kernel blocks are `pitch` bytes apart, and units
    `unit_pitch` (None: they lie side by side)."""

    runs: Runs
    pitch: int
    unit_pitch: int | None = None

    @property
    def num_tiles(self) -> int:
        """Of a page."""
        return self.runs.blocks * self.runs.units * _per_run(self.runs.unit_bytes)

    @property
    def bits(self) -> int:
        """All strides and sizes, as one number that is a multiple of no more than they all are."""
        runs = self.runs
        here = runs.start | runs.page_stride | runs.kernel_stride | runs.unit_stride
        return here | runs.unit_bytes | self.pitch | (self.unit_pitch or 0)


@lru_cache(maxsize=1024)
def tiles_of(tiling: Tiling) -> Numbers:
    """`[tiles, TILE]`: the tiles of a page, in bytes from where it starts, here and there; those of a run are about
    as long."""
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
    """The largest power of two, up to 16, that divides every number of which `bits` has the bits."""
    return (bits | WIDEST) & -(bits | WIDEST)


def _per_run(num_bytes: int) -> int:
    return -(-num_bytes // TILE_BYTES)

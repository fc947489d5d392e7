"""Tables for the copy kernel: a piece of a job as tiles, each of which one program of the kernel moves.

    tile     where it is among the pages, where it is in the chunk or in staging memory, and how long it is

All three are counted in words of `word_bytes`: the widest that all addresses, strides and sizes allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvweave.transfer.copies import Numbers
from kvweave.transfer.runs import Runs

TILE_BYTES = 8 << 10
"""What one program of the kernel moves, at most."""
LINE_BYTES = 128
"""Tiles of a run start at multiples of this from its start, so that none shares a cache line with the next."""
WIDEST = 16
TILE = 3
"""Numbers that a tile takes."""


class Lines(NamedTuple):
    """Pages of one shape: `pages[i]` starts at that address, and goes to (or comes from) `places[i]`.

    A page's kernel blocks are `pitch` bytes apart there; `runs` says how they lie here. Places are addresses too, or
    count from the start of staging memory.
    """

    pages: Numbers
    places: Numbers
    runs: Runs
    pitch: int


class Table(NamedTuple):
    """`[tiles, TILE]` numbers for the kernel, which moves them in any order."""

    tiles: Numbers
    vector_bytes: int
    """The widest vector that starts at a multiple of itself everywhere: 16, 8, 4, 2 or 1."""


def tabulate(lines: Iterable[Lines]) -> Table:
    """The table of some lines; they are moved in any order, so none may write where another reads."""
    lines = [line for line in lines if len(line.pages)]
    vector = _vector(lines)
    shapes = [_in_page(line.runs, line.pitch) for line in lines]
    counts = [len(line.pages) * len(shape) for line, shape in zip(lines, shapes, strict=True)]
    tiles, start = np.empty((sum(counts), TILE), np.int64), 0
    for (pages, places, _, _), shape, count in zip(lines, shapes, counts, strict=True):
        mine = tiles[start : start + count].reshape(len(pages), len(shape), TILE)
        start += count
        np.add(pages[:, None], shape[:, 0], out=mine[..., 0])
        np.add(places[:, None], shape[:, 1], out=mine[..., 1])
        mine[..., 2] = shape[:, 2]
    tiles >>= min(8, vector).bit_length() - 1
    return Table(tiles, vector)


@lru_cache(maxsize=1024)
def _in_page(runs: Runs, pitch: int) -> Numbers:
    """The tiles of a page, in bytes from where it starts, here and there; those of a run are about as long."""
    parts = -(-runs.unit_bytes // TILE_BYTES)
    length = min(runs.unit_bytes, -(-runs.unit_bytes // (parts * LINE_BYTES)) * LINE_BYTES)
    block, unit, skip = np.ogrid[: runs.blocks, : runs.units, : parts * length : length]
    tiles = np.empty((runs.blocks, runs.units, parts, TILE), np.int64)
    tiles[..., 0] = block * runs.kernel_stride + unit * runs.unit_stride + skip
    tiles[..., 1] = block * pitch + unit * runs.unit_bytes + skip
    tiles[..., 2] = np.minimum(length, runs.unit_bytes - skip)
    return tiles.reshape(-1, TILE)


def _vector(lines: list[Lines]) -> int:
    """The largest power of two, up to 16, that divides every address, stride and size."""
    bits = WIDEST
    for pages, places, runs, pitch in lines:
        bits |= int(np.bitwise_or.reduce(pages)) | int(np.bitwise_or.reduce(places)) | pitch
        bits |= runs.kernel_stride | runs.unit_stride | runs.unit_bytes
    return bits & -bits

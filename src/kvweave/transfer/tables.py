"""Tables for the copy kernel: a piece of a job as numbers that every program of the kernel finds its bytes by.

    tiles    one int32 a tile: the row it belongs to
    rows     where a page is, where it goes, its first tile, its shape
    shapes   how the pages of a group are cut: see `Runs`

Addresses, strides and sizes are counted in words of `word_bytes`: the widest that all of them allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.transfer.copies import Numbers
from kvweave.transfer.runs import Runs

TILE_BYTES = 8 << 10
"""What one program of the kernel moves."""
WIDEST = 16
ROW, SHAPE = 4, 6


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
    """The three tables in one run of int32, so that one copy brings them to the device. Offsets are in bytes."""

    words: NDArray[np.int32]
    num_tiles: int
    rows_at: int
    shapes_at: int
    vector_bytes: int
    """The widest vector that starts at a multiple of itself everywhere: 16, 8, 4, 2 or 1."""

    @property
    def word_bytes(self) -> int:
        return min(8, self.vector_bytes)


def tabulate(lines: Iterable[Lines]) -> Table:
    """The table of some lines; they are moved in any order, so none may write where another reads."""
    lines = [line for line in lines if len(line.pages)]
    vector = _vector(lines)
    word = min(8, vector)
    rows, shapes, counts, first = [], [], [], 0
    for number, (pages, places, runs, pitch) in enumerate(lines):
        parts = -(-runs.unit_bytes // TILE_BYTES)
        count = runs.blocks * runs.units * parts
        row = np.empty((len(pages), ROW), np.int64)
        row[:, 0], row[:, 1], row[:, 3] = pages // word, places // word, number
        row[:, 2] = first + np.arange(len(pages)) * count
        strides = (runs.kernel_stride, runs.unit_stride, runs.unit_bytes, pitch)
        shapes.append([runs.units, parts, *(stride // word for stride in strides)])
        rows.append(row)
        counts.append(np.full(len(pages), count))
        first += len(pages) * count
    return _table(rows, shapes, counts, first, vector)


def _table(
    rows: list[NDArray[np.int64]], shapes: list[list[int]], counts: list[NDArray[np.int64]], total: int, vector: int
) -> Table:
    flat = np.concatenate(rows) if rows else np.empty((0, ROW), np.int64)
    tiles = np.repeat(np.arange(len(flat), dtype=np.int32), np.concatenate(counts) if counts else 0)
    odd = np.zeros(-total % 4, np.int32)  # so that rows start at a multiple of 16 bytes
    shape_words = np.array(shapes, np.int64).ravel().view(np.int32)
    words = np.concatenate([tiles, odd, flat.ravel().view(np.int32), shape_words])
    rows_at = 4 * (total + len(odd))
    return Table(words, total, rows_at, rows_at + 8 * ROW * len(flat), vector)


def _vector(lines: list[Lines]) -> int:
    """The largest power of two, up to 16, that divides every address, stride and size."""
    bits = WIDEST
    for pages, places, runs, pitch in lines:
        bits |= int(np.bitwise_or.reduce(pages)) | int(np.bitwise_or.reduce(places)) | pitch
        bits |= runs.kernel_stride | runs.unit_stride | runs.unit_bytes
    return bits & -bits

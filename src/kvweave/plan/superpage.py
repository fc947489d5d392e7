"""The super-page search: one size that every group can slice into its own pages with little left over.

Groups that share a pool take and give back whole super-pages. Group g slices one into k pages of equal stride, so that
page i of the whole arena starts at i * stride and a layer's view is a single strided tensor. Hence the size S must be a
multiple of k * (kernel blocks a page) * (alignment) for each group, and k pages should nearly fill it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GOOD = 0.01
"""Padding of the worst group below which a smaller super-page beats a tighter one."""
SPANS = (2, 8, 32, 128)
"""How far to search, in pages of the largest group; further only where the nearer sizes are not good."""
MOST_CANDIDATES = 1_500


@dataclass(frozen=True, slots=True)
class Slice:
    """What one group puts into a lane: kernel blocks of `kernel_bytes`, `kernel_blocks` a page, aligned to `align`."""

    kernel_bytes: int
    kernel_blocks: int
    align: int

    @property
    def page_bytes(self) -> int:
        return self.kernel_bytes * self.kernel_blocks

    @property
    def unit(self) -> int:
        return self.kernel_blocks * self.align


def search(slices: Sequence[Slice]) -> tuple[int, tuple[int, ...]]:
    """Super-page bytes, and the pages of each group in one: the smallest good size, else the tightest found."""
    largest = max(piece.page_bytes for piece in slices)
    found: tuple[float, int, tuple[int, ...]] = (math.inf, 0, ())
    for span in SPANS:
        worst, size, pages = _best(slices, _candidates(slices, largest, largest * span))
        if worst < found[0]:
            found = (worst, size, pages)
        if worst <= GOOD:
            break
    return found[1], found[2]


def _best(slices: Sequence[Slice], sizes: NDArray[np.int64]) -> tuple[float, int, tuple[int, ...]]:
    counts = [_pages(piece, sizes) for piece in slices]
    padding = [1 - count * piece.page_bytes / sizes for piece, count in zip(slices, counts, strict=True)]
    worst = np.max(padding, axis=0)
    best = int(np.flatnonzero(worst <= max(GOOD, float(worst.min())))[0])
    return float(worst[best]), int(sizes[best]), tuple(int(count[best]) for count in counts)


def _candidates(slices: Sequence[Slice], low: int, high: int) -> NDArray[np.int64]:
    """Sizes worth trying, ascending: an even grid, the multiples of each group's page, and of all of them at once."""
    step = math.lcm(*(piece.unit for piece in slices))
    grids = {step * max(1, (high - low) // (step * MOST_CANDIDATES))}
    grids |= {math.lcm(piece.page_bytes, step) for piece in slices}
    sizes = [np.arange(-(-low // grid), max(-(-low // grid), high // grid) + 1) * grid for grid in grids]
    return np.unique(np.concatenate([size[:MOST_CANDIDATES] for size in sizes]))


def _pages(piece: Slice, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each size, the most pages of equal, aligned stride that fit, or 1 where none is near.

    Tried from the tightest on: ever fewer pages, or ever wider strides, whichever run out first.
    """
    most, units, tightest = sizes // piece.page_bytes, sizes // piece.unit, piece.page_bytes // piece.unit
    by_stride = tightest < int(most.max())
    pages = np.ones_like(sizes)
    unsolved = np.arange(len(sizes))
    for more in range(int(0.06 * min(tightest, int(most.max()))) + 3):
        if by_stride:
            count = units[unsolved] // (tightest + more)
            fits = count * (tightest + more) == units[unsolved]
        else:
            count = most[unsolved] - more
            fits = units[unsolved] % np.maximum(count, 1) == 0
        pages[unsolved[fits]] = np.maximum(count[fits], 1)
        unsolved = unsolved[~fits & (count > 1)]
        if not len(unsolved):
            break
    return pages

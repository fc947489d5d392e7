"""The super-page search: one size that every group can slice into its own pages with little left over.

Groups that share a pool take and give back whole super-pages. Group g slices one into k pages of equal stride, so that
page i of the whole arena starts at i * stride and a layer's view is a single strided tensor. Hence the size S must be a
multiple of k * (kernel blocks a page) * (alignment) for each group, and k pages should nearly fill it.

A large super-page is divided with less padding, and wastes memory in another way: some of each group are not full, the
first one is NULL, and all pages of one have to be evicted before another group gets it. So the size is chosen that
wastes the least of the memory there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

GOOD = 0.01
"""Padding of the worst group that counts as none: below it, a smaller super-page is better than a tighter one."""
NOT_FULL = 8
"""Super-pages that each group lacks because others are not full, about (docs/measurements/reuse.md)."""
SCATTERED = 8
"""Super-pages over which windows scatter, beyond those that their pages would fill. More than was ever seen: random
prompts needed up to 6, whatever the window's length and the sizes of pages (tests/plan/test_context.py)."""
SPANS = (2, 8, 32, 128)
"""How far to search, in pages of the largest group; further only where a larger super-page could waste less."""
MOST_CANDIDATES = 1_500
MOST_PADDING = 0.25
"""Pages that leave more of a super-page over are not looked for."""
NO_FIT = 2.0 + NOT_FULL
"""More than any size wastes with which the sequence fits: then there are more super-pages than groups."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Slice:
    """What one group puts into a lane: kernel blocks of `kernel_bytes`, `kernel_blocks` a page, aligned to `align`.

    The one sequence that must fit holds `held_pages`; `scatters`: its window frees pages while it runs, so that those
    that stay lie scattered over super-pages.
    """

    kernel_bytes: int
    kernel_blocks: int
    align: int
    held_pages: int = 1
    scatters: bool = False

    @property
    def page_bytes(self) -> int:
        return self.kernel_bytes * self.kernel_blocks

    @property
    def unit(self) -> int:
        return self.kernel_blocks * self.align


def search(slices: Sequence[Slice], memory: int) -> tuple[int, tuple[int, ...]]:
    """Bytes of the super-page, and the pages of each group in one: of those sizes with which the one sequence fits
    `memory` bytes the one that wastes the least of them; else the one with which it takes the fewest."""
    largest, memory = max(piece.page_bytes for piece in slices), max(1, memory)
    not_full, fewest = (NOT_FULL * len(slices) + 1) / memory, (len(slices) + 1) / memory
    least, size, pages = math.inf, 0, [0]
    for nearer, span in pairwise((1, *SPANS)):
        further = largest * nearer  # no larger size wastes less than this one at best; or, where none fits, takes fewer
        if least <= (GOOD + not_full * further if least < NO_FIT else NO_FIT + fewest * further):
            break
        sizes = _candidates(slices, largest, largest * span)
        counts = [_pages(piece, sizes) for piece in slices]
        padding = np.max([1 - count * piece.page_bytes / sizes for piece, count in zip(slices, counts, strict=True)], 0)
        waste = np.maximum(padding, GOOD) + not_full * sizes
        needed = superpages_needed(slices, counts) * sizes.astype(np.float64)  # may be more bytes than an int64 counts
        waste = np.where(needed <= memory, waste, NO_FIT + needed / memory)
        best = int(waste.argmin())
        if waste[best] < least:
            least, size, pages = float(waste[best]), int(sizes[best]), [int(count[best]) for count in counts]
    return size, tuple(pages)


def superpages_needed(slices: Sequence[Slice], counts: Sequence[Counts]) -> Counts:
    """Super-pages that the one sequence and NULL take, if one has so many pages of each group; for several sizes."""
    full = np.sum([-(-piece.held_pages // count) for piece, count in zip(slices, counts, strict=True)], 0)
    scattered = np.any([piece.scatters & (count > 1) for piece, count in zip(slices, counts, strict=True)], 0)
    needed: Counts = full + SCATTERED * scattered + 1
    return needed


def _candidates(slices: Sequence[Slice], low: int, high: int) -> NDArray[np.int64]:
    """Sizes worth trying, ascending: an even grid, the multiples of each group's page, and of all of them at once."""
    step = math.lcm(*(piece.unit for piece in slices))
    grids = {step * max(1, (high - low) // (step * MOST_CANDIDATES))}
    grids |= {math.lcm(piece.page_bytes, step) for piece in slices}
    sizes = []
    for grid in grids:
        first = -(-low // grid)
        sizes.append(np.arange(first, min(max(first, high // grid) + 1, first + MOST_CANDIDATES)) * grid)
    return np.unique(np.concatenate(sizes))


def _pages(piece: Slice, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each size, the most pages of equal, aligned stride that fit, or 1 where none is near.

    Tried from the tightest on: ever fewer pages, or ever wider strides, whichever run out first.
    """
    most, units, tightest = sizes // piece.page_bytes, sizes // piece.unit, piece.page_bytes // piece.unit
    by_stride = tightest < int(most.max())
    pages = np.ones_like(sizes)
    unsolved = np.arange(len(sizes))
    for more in range(int(MOST_PADDING * min(tightest, int(most.max()))) + 3):
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

"""Who holds each page of a window, counted for many pages in one call: in C, or in numpy where it was not compiled.

A page's count is one number for two kinds of holders, since they are always asked together: the block tables and pins
that reference it, and, times `TREE`, the points of the prefix tree that need it. Pages in the tree without a reference
are evictable; `evictable_in` counts them by super-page (it is empty where a page is a whole super-page). A free page
has the count of the table that will get it: 1. NULL pages are skipped, and a page may be there several times.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvweave.pool.group import Counts, Ids

__all__ = ["REFERENCES", "TREE", "NumpyHolders", "enter", "leave", "prune", "release", "share"]

TREE: Final = 1 << 32
REFERENCES: Final = TREE - 1


class NumpyHolders:
    """The functions of `_native`, for machines without a C compiler, and for tests to compare with."""

    @staticmethod
    def share(holders: Counts, pages: Ids, evictable_in: Counts, per_superpage: int) -> int:
        """One more table references each of `pages`; returns how many of them had no reference before."""
        pages = pages[pages > 0]
        unnamed = np.unique(pages[holders[pages] & REFERENCES == 0])
        np.add.at(holders, pages, 1)
        _count(evictable_in, unnamed, per_superpage, -1)
        return len(unnamed)

    @staticmethod
    def enter(holders: Counts, pages: Ids) -> int:
        """A point of the tree needs `pages`; returns how many of them the tree did not hold before."""
        pages = pages[pages > 0]
        entered = np.unique(pages[holders[pages] < TREE])
        np.add.at(holders, pages, TREE)
        return len(entered)

    @staticmethod
    def release(holders: Counts, pages: Ids, evictable_in: Counts, per_superpage: int, out: Ids) -> tuple[int, int]:
        """A table releases each of `pages`; `out` gets those that nobody holds now. Returns how many these are, and
        how many the tree alone holds now."""
        pages = pages[pages > 0]
        np.subtract.at(holders, pages, 1)
        last = _last_mentions(pages)
        left = holders[last]
        unnamed = last[(left & REFERENCES == 0) & (left > 0)]
        _count(evictable_in, unnamed, per_superpage, 1)
        return _free(holders, last[left == 0], out), len(unnamed)

    @staticmethod
    def leave(holders: Counts, pages: Ids, evictable_in: Counts, per_superpage: int, out: Ids) -> tuple[int, int]:
        """A point of the tree needs `pages` no more, each there once; NULL takes the place of those that leave the
        tree, and `out` gets those that nobody holds now. Returns how many these are, and how many leave the tree."""
        own = pages[pages > 0]
        holders[own] -= TREE
        left = own[holders[own] < TREE]
        gone = left[holders[left] == 0]
        _count(evictable_in, gone, per_superpage, -1)
        NumpyHolders.prune(holders, pages)
        return _free(holders, gone, out), len(left)

    @staticmethod
    def prune(holders: Counts, pages: Ids) -> None:
        """NULL takes the place of those of `pages` that are not in the tree."""
        pages[holders[pages] < TREE] = 0


def _last_mentions(pages: Ids) -> Ids:
    """Each page once, in the order in which they are mentioned for the last time."""
    _, at = np.unique(pages[::-1], return_index=True)
    last: Ids = pages[np.sort(len(pages) - 1 - at)]
    return last


def _count(evictable_in: Counts, pages: Ids, per_superpage: int, sign: int) -> None:
    if len(evictable_in):
        np.add.at(evictable_in, pages // per_superpage, sign)


def _free(holders: Counts, pages: Ids, out: Ids) -> int:
    holders[pages] = 1
    out[: len(pages)] = pages
    return len(pages)


try:
    from kvweave.pool._native import enter, leave, prune, release, share
except ImportError:  # no C compiler was there
    share, enter = NumpyHolders.share, NumpyHolders.enter
    release, leave, prune = NumpyHolders.release, NumpyHolders.leave, NumpyHolders.prune

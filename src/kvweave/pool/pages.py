"""The pages of one group: which are free, who holds the others, and which only the prefix cache holds.

Page 0 of every group is NULL: never handed out, safe to read and to write.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.plan import Group
from kvweave.pool import holders
from kvweave.pool.holders import NAMES, Ids

NULL = 0


class PageStack:
    """Free numbers, LIFO: numbers are popped in the order in which they were pushed together.

    It grows from the end of its array to the front, so that a push and a pop are one slice each.
    """

    def __init__(self, capacity: int) -> None:
        self.numbers: Ids = np.empty(capacity, np.int32)
        self.top = capacity
        self.size = 0

    def push(self, numbers: Ids) -> None:
        count = len(numbers)
        self.numbers[self.top - count : self.top] = numbers
        self.top -= count
        self.size += count

    def pop(self, count: int) -> Ids:
        numbers: Ids = self.numbers[self.top : self.top + count].copy()
        self.top += count
        self.size -= count
        return numbers

    def push_one(self, number: int) -> None:
        self.top -= 1
        self.size += 1
        self.numbers[self.top] = number

    def pop_one(self) -> int:
        number = int(self.numbers[self.top])
        self.top += 1
        self.size -= 1
        return number

    def take_out(self, index: int) -> int:
        """The number at `index` of `all`; the one at the top takes its place."""
        number, at = int(self.numbers[self.top + index]), self.top + index
        self.numbers[at] = self.numbers[self.top]
        self.pop_one()
        return number

    def replace(self, numbers: Ids) -> None:
        """Only these, from now on."""
        self.top, self.size = len(self.numbers), 0
        self.push(numbers)

    @property
    def all(self) -> Ids:
        return self.numbers[self.top :]


class GroupPages:
    """The pages of one group in its pool.

    Where pages are shared one by one (windows), `holders` counts who holds each (see `holders.py`).
    Other pages have one owner. Pages of the tree that nobody else names or needs are `num_evictable`.

    Where a page is a whole super-page (`is_whole`), its free ones are the pool's.
    """

    def __init__(self, group: Group, num_superpages: int) -> None:
        self.tag = group.tag
        self.per_superpage = group.pages_per_superpage
        self.is_whole = self.per_superpage == 1
        capacity = num_superpages * self.per_superpage
        self.free = PageStack(0 if self.is_whole else capacity)
        self.num_superpages = 0
        is_window = group.cache.reach.per_token and group.cache.reach.span is not None
        self.holders: NDArray[np.int64] = np.ones(capacity if is_window else 0, np.int64)
        self.holders[:1] = 0  # NULL
        self.num_evictable = 0
        self.evictable_in: NDArray[np.int64] = np.zeros(0 if self.is_whole else num_superpages, np.int64)
        """Evictable pages of each super-page."""

    def superpages_for(self, count: int) -> int:
        """Super-pages it lacks to have `count` free pages."""
        return max(0, -(-(count - self.free.size) // self.per_superpage))

    # ---- shared page by page: windows. NULLs are passed over

    def share(self, pages: Ids) -> None:
        """One more table names each of `pages`."""
        self.num_evictable -= holders.share(self.holders, pages, self.evictable_in, self.per_superpage)

    def enter_cache(self, pages: Ids) -> int:
        """A point of the tree needs `pages`; returns how many of them the tree did not hold before."""
        return holders.enter(self.holders, pages)

    def release(self, pages: Ids) -> Ids:
        """Tables let go of `pages`, of each as often as it is in there; returns those that nobody holds now."""
        out = np.empty(len(pages), np.int32)
        num_gone, num_unnamed = holders.release(self.holders, pages, self.evictable_in, self.per_superpage, out)
        self.num_evictable += num_unnamed
        return out[:num_gone]

    def leave_cache(self, pages: Ids) -> tuple[Ids, int]:
        """A point of the tree needs `pages` no more: those that nobody holds now, and how many leave the tree, whose
        places are NULL then."""
        out = np.empty(len(pages), np.int32)
        num_gone, num_left = holders.leave(self.holders, pages, self.evictable_in, self.per_superpage, out)
        self.num_evictable -= num_gone
        return out[:num_gone], num_left

    def prune(self, pages: Ids) -> None:
        """NULL takes the place of those of `pages` that are not in the tree."""
        holders.prune(self.holders, pages)

    def num_names(self, pages: Ids) -> NDArray[np.int64]:
        """How many tables and pins name each of `pages`."""
        return self.holders[pages] & NAMES

    def count_evictable(self, pages: Ids, sign: int) -> None:
        """These pages of the prefix cache are needed by nobody else from now on (1), or are again (-1)."""
        self.num_evictable += sign * len(pages)
        if not self.is_whole:
            np.add.at(self.evictable_in, pages // self.per_superpage, sign)

    def count_evictable_one(self, page: int, sign: int) -> None:
        """`count_evictable`, for a single page."""
        self.num_evictable += sign
        if not self.is_whole:
            self.evictable_in[page // self.per_superpage] += sign

    # ---- super-pages

    def free_in(self) -> NDArray[np.int64]:
        """Free pages of each super-page."""
        counts: NDArray[np.int64] = np.bincount(
            self.free.all // self.per_superpage, minlength=len(self.evictable_in)
        ).astype(np.int64)
        return counts

    def empty_superpages(self) -> Ids:
        """Super-pages of this group none of whose pages is in use."""
        if self.free.size < self.per_superpage:
            return np.empty(0, np.int32)
        return np.flatnonzero(self.free_in() == self.per_superpage).astype(np.int32)

    def add_superpages(self, superpages: Ids) -> None:
        pages = superpages[:, None] * self.per_superpage + np.arange(self.per_superpage)
        self.free.push(pages.ravel().astype(np.int32))
        self.num_superpages += len(superpages)

    def drop_superpages(self, superpages: Ids) -> None:
        """Forget the free pages of these super-pages."""
        gone = np.zeros(len(self.evictable_in), bool)
        gone[superpages] = True
        free = self.free.all
        self.free.replace(free[~gone[free // self.per_superpage]])
        self.num_superpages -= len(superpages)

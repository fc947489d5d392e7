"""The pages of one group: which are free, who holds the others, and which only the prefix cache holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.pool import holders
from kvweave.pool.group import NO_PAGES, NULL, Counts, Ids, PagedGroup
from kvweave.pool.holders import REFERENCES


class PageStack:
    """Free numbers, LIFO: numbers are popped in the order in which they were pushed together.

    It grows from the end of its array to the front, so that a push and a pop are one slice each.
    """

    def __init__(self, capacity: int) -> None:
        self.numbers: Ids = np.empty(capacity, np.int32)
        self._number_of = self.numbers.data
        self.top = capacity
        self.size = 0
        self.num_changes = 0

    def push(self, numbers: Ids) -> None:
        count = len(numbers)
        self.numbers[self.top - count : self.top] = numbers
        self.top -= count
        self.size += count
        self.num_changes += 1

    def pop(self, count: int) -> Ids:
        numbers: Ids = self.numbers[self.top : self.top + count].copy()
        self.top += count
        self.size -= count
        self.num_changes += 1
        return numbers

    def push_one(self, number: int) -> None:
        self.top -= 1
        self.size += 1
        self.num_changes += 1
        self._number_of[self.top] = number

    def take_out(self, index: int) -> int:
        """The number at `index` of `all`; the one at the top takes its place."""
        number: int = self._number_of[self.top + index]
        if index:
            self._number_of[self.top + index] = self._number_of[self.top]
        self.top += 1
        self.size -= 1
        self.num_changes += 1
        return number

    def replace(self, numbers: Ids) -> None:
        """Only these, from now on."""
        self.top, self.size = len(self.numbers), 0
        self.push(numbers)

    @property
    def all(self) -> Ids:
        return self.numbers[self.top :]


class GroupPages:
    """The pages of one group in its pool: those that are free, and counts of the others.

    Where pages are shared one by one (windows), `holders` counts who holds each (see `holders.py`). Other pages have
    one owner. `num_cached` pages are in the prefix tree, of which `num_evictable` nobody else references or needs.
    Where a page is a whole super-page (`is_whole`), its free ones are the pool's.
    """

    def __init__(self, group: PagedGroup, num_superpages: int, free_superpages: PageStack) -> None:
        self.group = group
        self.per_superpage = group.pages_per_superpage
        self.is_whole = self.per_superpage == 1
        capacity = num_superpages * self.per_superpage
        self.free_pages = PageStack(0 if self.is_whole else capacity)
        """Of its own super-pages."""
        self._stack = free_superpages if self.is_whole else self.free_pages
        self.holders: Counts = np.ones(capacity if group.is_window else 0, np.int64)
        self.holders[:1] = 0  # NULL
        self._holders_of = self.holders.data
        self.num_allocated = self.num_cached = self.num_evictable = self.num_evicted = 0
        self.num_unreferenced = 0
        """Pages of the tree that lost their last reference, so far."""
        self._free_in: Counts = np.zeros(0, np.int64)
        self._counted = -1
        """`PageStack.num_changes` when that was counted."""
        self.evictable_in: Counts = np.zeros(0 if self.is_whole else num_superpages, np.int64)
        """Evictable pages of each super-page."""
        self._is_snapshot: NDArray[np.bool_] = np.zeros(max(1, capacity) if group.is_state else 0, np.bool_)
        self._is_snapshot_of = self._is_snapshot.data

    # ---- allocate and free

    def allocate(self, count: int) -> Ids:
        """`count` pages, for which the pool has made room."""
        assert count <= self._stack.size, f"{count} pages of {self.group.tag} were promised"
        self.num_allocated += count
        return self._stack.pop(count)

    def allocate_apart(self, is_needed: bool) -> int:
        """A page that is needed as long as its sequence runs, or one that may be evicted: such pages are kept apart, so
        that whole super-pages can be emptied when pages are evicted."""
        assert self._stack.size, f"a page of {self.group.tag} was promised"
        self.num_allocated += 1
        if self.is_whole or self.free_pages.size < 2:
            return self._stack.take_out(0)
        num_needed = self._needed_beside(self.free_pages.all)
        return self.free_pages.take_out(int(num_needed.argmax() if is_needed else num_needed.argmin()))

    def allocate_run(self, count: int, num_passing: int) -> Ids:
        """`count` pages of a window for one sequence, of which it will soon release the first `num_passing`. The others
        are kept apart as those of `allocate_apart` are."""
        if self.is_whole or num_passing >= count or count == self.free_pages.size:
            return self.allocate(count)
        num_lasting, free = count - max(num_passing, 0), self.free_pages.all
        order = np.argpartition(-self._needed_beside(free), num_lasting)
        lasting: Ids = free[order[:num_lasting]]
        self.free_pages.replace(free[np.sort(order[num_lasting:])])
        self.num_allocated += num_lasting
        return np.concatenate([self.allocate(count - num_lasting), lasting])

    @property
    def is_mostly_needed(self) -> bool:
        """Whether more of its pages are needed than could be evicted: a sequence takes most of the pool."""
        return self.num_allocated > 2 * self.num_evictable

    def _needed_beside(self, pages: Ids) -> Counts:
        """For each page: pages of its super-page that are in use, and not evictable."""
        needed = self.per_superpage - self.free_in() - self.evictable_in
        return needed[pages // self.per_superpage]

    def allocate_snapshot(self) -> int:
        """A page for a state that is not in the tree yet, and may be given up again."""
        page = self.allocate_apart(is_needed=False)
        self._is_snapshot_of[page] = True
        return page

    def snapshots_but(self, pages: Ids) -> Ids:
        """The pages of all snapshots but these."""
        others = self._is_snapshot.copy()
        others[pages] = False
        return others.nonzero()[0].astype(np.int32)

    def free(self, pages: Ids) -> None:
        """Pages that nobody holds any more."""
        if len(pages):
            self.num_allocated -= len(pages)
            self._stack.push(pages)

    def free_one(self, page: int) -> None:
        """`free`, for the page of a state."""
        self._is_snapshot_of[page] = False
        self.num_allocated -= 1
        self._stack.push_one(page)

    # ---- block tables reference pages. NULLs of windows are skipped

    def share(self, pages: Ids) -> None:
        """One more table references each of `pages`, of a window."""
        if len(pages):
            self.num_evictable -= holders.share(self.holders, pages, self.evictable_in, self.per_superpage)

    def release(self, pages: Ids) -> None:
        """Tables release `pages`, each as often as it is in there; those that nobody holds now are free."""
        if not self.group.is_window:
            self.free(pages)
        elif len(pages):
            out = np.empty(len(pages), np.int32)
            num_gone, num_left = holders.release(self.holders, pages, self.evictable_in, self.per_superpage, out)
            self.num_evictable += num_left
            self.num_unreferenced += num_left
            self.free(out[:num_gone])

    def is_referenced(self, page: int) -> bool:
        return bool(self._holders_of[page] & REFERENCES)

    def are_referenced(self, pages: Ids) -> NDArray[np.bool_]:
        referenced: NDArray[np.bool_] = self.holders[pages] & REFERENCES != 0
        return referenced

    def referenced_only_by(self, pages: Ids) -> Ids:
        """Those of `pages`, of a window, that have no more references than they are times in there."""
        if not len(pages):
            return pages
        times = np.bincount(pages)
        found = times.nonzero()[0]
        only: Ids = found[times[found] == self.holders[found] & REFERENCES].astype(np.int32)
        return only

    # ---- the tree has pages: of windows those that its points need, of others those that were given to it

    def enter_cache(self, pages: Ids) -> None:
        """A point of the tree needs `pages` of a window."""
        self.num_cached += holders.enter(self.holders, pages)

    def leave_cache(self, pages: Ids) -> int:
        """A point needs `pages` of a window no more. NULL replaces those that leave the tree; how many these are."""
        out = np.empty(len(pages), np.int32)
        num_gone, num_left = holders.leave(self.holders, pages, self.evictable_in, self.per_superpage, out)
        self.num_evictable -= num_gone
        self.num_evicted += num_gone
        self.num_cached -= num_left
        self.free(out[:num_gone])
        return num_left

    def prune(self, pages: Ids) -> None:
        """NULL takes the place of those of `pages`, of a window, that are not in the tree."""
        holders.prune(self.holders, pages)

    def evict(self, pages: Ids) -> None:
        """Evictable pages of the tree are free."""
        self.count_evictable([pages], -1)
        self.num_cached -= len(pages)
        self.num_evicted += len(pages)
        self.free(pages)

    def cache_one(self, page: int) -> None:
        """The page of a state, which nobody else needs, is the tree's from now on."""
        self._is_snapshot_of[page] = False
        self.num_cached += 1
        self.count_evictable_one(page, 1)

    def evict_one(self, page: int) -> None:
        self.count_evictable_one(page, -1)
        self.num_cached -= 1
        self.num_evicted += 1
        self.free_one(page)

    def count_evictable(self, runs: list[Ids], sign: int) -> None:
        """These pages of the prefix cache are needed by nobody else from now on (1), or are again (-1)."""
        for run in runs:
            self.num_evictable += sign * len(run)
        if not self.is_whole:
            pages = runs[0] if len(runs) == 1 else np.concatenate(runs)
            np.add.at(self.evictable_in, pages // self.per_superpage, sign)

    def count_evictable_one(self, page: int, sign: int) -> None:
        self.num_evictable += sign
        if not self.is_whole:
            self.evictable_in[page // self.per_superpage] += sign

    # ---- super-pages

    def superpages_for(self, count: int) -> int:
        """Super-pages it lacks to have `count` free pages."""
        return max(0, -(-(count - self.free_pages.size) // self.per_superpage))

    def free_in(self) -> Counts:
        """Free pages of each super-page; counted again only after a change, for it is asked several times between."""
        if self._counted != self.free_pages.num_changes:
            superpages = self.free_pages.all // self.per_superpage
            self._free_in = np.bincount(superpages, minlength=len(self.evictable_in))
            self._counted = self.free_pages.num_changes
        return self._free_in

    def empty_superpages(self) -> Ids:
        """Super-pages of this group none of whose pages is in use."""
        if self.free_pages.size < self.per_superpage:
            return NO_PAGES
        return np.flatnonzero(self.free_in() == self.per_superpage).astype(np.int32)

    def could_be_empty(self, reclaimable: Ids) -> int:
        """How many super-pages there are in which nothing is needed."""
        if self.is_whole:
            return self.num_evictable + len(reclaimable)
        counts = self.free_in() + self.evictable_in
        counts += np.bincount(reclaimable // self.per_superpage, minlength=len(counts))
        return int(np.count_nonzero(counts == self.per_superpage))

    def add_superpages(self, superpages: Ids) -> None:
        pages = superpages[:, None] * self.per_superpage + np.arange(self.per_superpage)
        self.free_pages.push(pages.ravel().astype(np.int32))

    def drop_superpages(self, superpages: Ids) -> None:
        """Forget the free pages of these super-pages."""
        gone = np.zeros(len(self.evictable_in), bool)
        gone[superpages] = True
        free = self.free_pages.all
        self.free_pages.replace(free[~gone[free // self.per_superpage]])


class NoPages(GroupPages):
    """Of a group of which this rank has no layers: all its pages are NULL, and nothing is counted."""

    def __init__(self, group: PagedGroup) -> None:
        super().__init__(group, 0, PageStack(0))
        self.per_superpage, self.is_whole = 1, True
        self.holders = np.zeros(1, np.int64)  # of NULL

    def allocate(self, count: int) -> Ids:
        return np.zeros(count, np.int32)

    def allocate_apart(self, is_needed: bool) -> int:  # noqa: ARG002
        return NULL

    def free(self, pages: Ids) -> None:
        pass

    def free_one(self, page: int) -> None:
        pass

    def cache_one(self, page: int) -> None:
        pass

    def evict_one(self, page: int) -> None:
        pass

    def count_evictable_one(self, page: int, sign: int) -> None:
        pass

"""Free pages: int32 stacks, one a group, over super-pages that groups of one pool take and give back.

Page 0 of every group, and so super-page 0 of every pool, is NULL: never handed out, safe to read and to write.

    pool        super-pages   | 0 NULL | 1 full | 2 state | 3 full | 4 free | ...
    group full  pages           0..196   197..393           591..787          (stack of those that are free)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.plan import Group, Pool

Ids = NDArray[np.int32]
NULL = 0


class Stack:
    """Free numbers; the last that came are the first to go, and what came in a row goes in that row.

    It grows from the end of its array to the front, so that such a row lies there as it came.
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

    def keep(self, numbers: Ids) -> None:
        """Only these, from now on."""
        self.top, self.size = len(self.numbers), 0
        self.push(numbers)

    @property
    def all(self) -> Ids:
        return self.numbers[self.top :]


class GroupPages:
    """The free pages of one group. `refs` counts the owners beyond the first of pages shared by forks.

    Where a page is `whole`, a super-page of its own, there is nothing to collect: its free ones are the pool's.
    """

    def __init__(self, group: Group, num_supers: int) -> None:
        self.tag = group.tag
        self.has_gaps = group.cache.reach.span is not None
        """Whether there may be NULLs among the pages that it is given back."""
        self.per_super = group.pages_per_super
        self.whole = self.per_super == 1
        self.free = Stack(0 if self.whole else num_supers * self.per_super)
        self.num_supers = 0
        self.refs: Ids = np.zeros(num_supers * self.per_super, np.int32)
        self.num_refs = 0

    @property
    def num_free(self) -> int:
        return self.free.size

    def supers_for(self, count: int) -> int:
        """Super-pages it lacks to have `count` free pages."""
        return max(0, -(-(count - self.free.size) // self.per_super))

    def empty_supers(self) -> Ids:
        """Super-pages of this group none of whose pages is in use."""
        if self.free.size < self.per_super:
            return np.empty(0, np.int32)
        counts = np.bincount(self.free.all // self.per_super)
        return np.flatnonzero(counts == self.per_super).astype(np.int32)

    def add(self, supers: Ids) -> None:
        pages = supers[:, None] * self.per_super + np.arange(self.per_super)
        self.free.push(pages.ravel().astype(np.int32))
        self.num_supers += len(supers)

    def drop(self, supers: Ids) -> None:
        """Forget the free pages of these super-pages."""
        gone = np.zeros(len(self.refs) // self.per_super, bool)
        gone[supers] = True
        free = self.free.all
        self.free.keep(free[~gone[free // self.per_super]])
        self.num_supers -= len(supers)


def _without_nulls(pages: Ids) -> Ids:
    count = int(np.count_nonzero(pages))
    if count == len(pages):
        return pages
    last = pages[len(pages) - count :]  # windows keep the end of a run, mostly
    if np.count_nonzero(last) == count:
        return last
    kept: Ids = pages[pages != NULL]
    return kept


class PoolPages:
    """The super-pages of one pool, and the groups among which they move."""

    def __init__(self, pool: Pool, groups: list[Group]) -> None:
        self.name = pool.name
        self.num_supers = pool.num_usable
        self.groups = {group.tag: GroupPages(group, pool.num_supers) for group in groups}
        self.free_supers = Stack(self.num_supers)
        self.free_supers.push(np.arange(1, self.num_supers + 1, dtype=np.int32))

    def available(self, tag: str) -> int:
        """Pages a group could take without anything being evicted, empty super-pages of others included."""
        group = self.groups[tag]
        supers = self.free_supers.size + sum(len(g.empty_supers()) for g in self.groups.values() if g is not group)
        return group.num_free + supers * group.per_super

    def prepare(self, wanted: dict[str, int]) -> int:
        """Move super-pages so that every group can `take` what it wants; returns how many lack (0: all is ready)."""
        lack = -self.free_supers.size
        for tag, count in wanted.items():
            lack += self.groups[tag].supers_for(count)
        if lack > 0 and len(self.groups) > 1:
            for tag, group in self.groups.items():
                lack -= self._reclaim(group, min(lack, (group.num_free - wanted.get(tag, 0)) // group.per_super))
        if lack > 0:
            return lack
        for tag, count in wanted.items():
            group = self.groups[tag]
            if not group.whole and (supers := group.supers_for(count)):
                group.add(self.free_supers.pop(supers))
        return 0

    def _reclaim(self, group: GroupPages, most: int) -> int:
        """Take back up to `most` empty super-pages of a group."""
        if most <= 0:
            return 0
        supers = group.empty_supers()[:most]
        if len(supers):
            group.drop(supers)
            self.free_supers.push(supers)
        return len(supers)

    def take(self, tag: str, count: int) -> Ids:
        """`count` pages, for which `prepare` made room before."""
        group = self.groups[tag]
        free = self.free_supers if group.whole else group.free
        assert count <= free.size, f"pool {self.name}: {count} pages of {tag} were promised"
        if group.whole:
            group.num_supers += count
        return free.pop(count)

    def take_one(self, tag: str) -> int:
        """`take`, for a single page."""
        group = self.groups[tag]
        free = self.free_supers if group.whole else group.free
        assert free.size, f"pool {self.name}: a page of {tag} was promised"
        if group.whole:
            group.num_supers += 1
        return free.pop_one()

    def share(self, tag: str, pages: Ids) -> None:
        """One more owner for each of `pages`."""
        group = self.groups[tag]
        group.refs[pages] += 1
        group.num_refs += len(pages)

    def release(self, tag: str, pages: Ids, gaps: bool) -> int:
        """Give up one ownership of each page; among `gaps`, NULLs are ignored. Returns how many became free."""
        group = self.groups[tag]
        if gaps and group.has_gaps:
            pages = _without_nulls(pages)
        if group.num_refs:
            shared = group.refs[pages] > 0
            group.refs[pages[shared]] -= 1
            group.num_refs -= int(np.count_nonzero(shared))
            pages = pages[~shared]
        if group.whole:
            self.free_supers.push(pages)
            group.num_supers -= len(pages)
        else:
            group.free.push(pages)
        return len(pages)

    def release_one(self, tag: str, page: int) -> None:
        """`release`, for a single page that nobody shares."""
        group = self.groups[tag]
        if group.whole:
            self.free_supers.push_one(page)
            group.num_supers -= 1
        else:
            group.free.push_one(page)

    def num_held(self, tag: str) -> int:
        """Pages of a group that somebody owns."""
        group = self.groups[tag]
        return group.num_supers * group.per_super - group.num_free

"""A pool: super-pages that its groups take and give back as demand moves.

pool        super-pages   | 0 NULL | 1 full | 2 state | 3 full | 4 free | ...
group full  pages           0..196   197..393           591..787          (a stack of those that are free)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvweave.plan import Group, Pool
from kvweave.pool.holders import Ids
from kvweave.pool.pages import GroupPages, PageStack

Wanted = Mapping[str, int]
"""Pages by tag."""


class PagePool:
    """Who holds which page of a pool. `num_superpages` counts those that can be had: all but the NULL one."""

    def __init__(self, pool: Pool, groups: Sequence[Group]) -> None:
        self.name = pool.name
        self.num_superpages = pool.num_usable
        self.groups = {group.tag: GroupPages(group, self.num_superpages + 1) for group in groups}
        self.free_superpages = PageStack(self.num_superpages)
        self.free_superpages.push(np.arange(1, self.num_superpages + 1, dtype=np.int32))

    # ---- what can be had

    def is_ready(self, wanted: Wanted) -> bool:
        """Whether every group can allocate what it wants as things are, empty super-pages of others included."""
        lack = -self.free_superpages.size
        for tag, count in wanted.items():
            lack += self.groups[tag].superpages_for(count)
        if lack > 0:
            for tag, group in self.groups.items():
                spare = (group.free.size - wanted.get(tag, 0)) // group.per_superpage
                if spare > 0:
                    lack -= min(spare, len(group.empty_superpages()))
        return lack <= 0

    def could_be_ready(self, wanted: Wanted, reclaimable: Mapping[str, Ids]) -> bool:
        """Whether it would be after all evictable and all `reclaimable` pages were freed. Exact; changes nothing."""
        lack = -self.free_superpages.size
        for tag, group in self.groups.items():
            more = reclaimable.get(tag)
            usable = group.free.size + group.num_evictable + (0 if more is None else len(more))
            left = usable - wanted.get(tag, 0)
            if left < 0:
                lack += -(left // group.per_superpage)
            elif left >= group.per_superpage:
                lack -= min(left // group.per_superpage, self._could_be_empty(group, more))
        return lack <= 0

    def _could_be_empty(self, group: GroupPages, more: Ids | None) -> int:
        """Super-pages of a group in which nothing is needed."""
        if group.is_whole:
            return group.num_evictable + (0 if more is None else len(more))
        counts = group.free_in() + group.evictable_in
        if more is not None and len(more):
            counts += np.bincount(more // group.per_superpage, minlength=len(counts))
        return int(np.count_nonzero(counts == group.per_superpage))

    def available(self, tag: str) -> int:
        """Pages a group could allocate without anything being evicted, empty super-pages of others included."""
        group = self.groups[tag]
        superpages = self.free_superpages.size
        superpages += sum(len(g.empty_superpages()) for g in self.groups.values() if g is not group)
        return group.free.size + superpages * group.per_superpage

    def prepare(self, wanted: Wanted) -> bool:
        """Move super-pages so that every group can allocate what it wants; False, and nothing moved, if it cannot."""
        lack = -self.free_superpages.size
        for tag, count in wanted.items():
            lack += self.groups[tag].superpages_for(count)
        if lack > 0:
            if not self.is_ready(wanted):
                return False
            for tag, group in self.groups.items():
                lack -= self._take_back(group, min(lack, (group.free.size - wanted.get(tag, 0)) // group.per_superpage))
        for tag, count in wanted.items():
            group = self.groups[tag]
            if not group.is_whole and (superpages := group.superpages_for(count)):
                group.add_superpages(self.free_superpages.pop(superpages))
        return True

    def _take_back(self, group: GroupPages, most: int) -> int:
        """Take back up to `most` empty super-pages of a group."""
        if most <= 0:
            return 0
        superpages = group.empty_superpages()[:most]
        if len(superpages):
            group.drop_superpages(superpages)
            self.free_superpages.push(superpages)
        return len(superpages)

    # ---- allocate and free

    def allocate(self, tag: str, count: int) -> Ids:
        """`count` pages for a table, for which `prepare` made room before."""
        group = self.groups[tag]
        free = self.free_superpages if group.is_whole else group.free
        assert count <= free.size, f"pool {self.name}: {count} pages of {tag} were promised"
        if group.is_whole:
            group.num_superpages += count
        return free.pop(count)

    def allocate_one(self, tag: str) -> int:
        """`allocate`, for a single page."""
        group = self.groups[tag]
        free = self.free_superpages if group.is_whole else group.free
        assert free.size, f"pool {self.name}: a page of {tag} was promised"
        if group.is_whole:
            group.num_superpages += 1
        return free.pop_one()

    def allocate_apart(self, tag: str, is_needed: bool) -> int:
        """`allocate_one` for a page that is needed as long as its sequence runs, or one that may be evicted: such pages
        are kept apart, so that whole super-pages can be emptied when pages are evicted."""
        group = self.groups[tag]
        if group.is_whole or group.free.size < 2:
            return self.allocate_one(tag)
        free, needed = group.free.all, group.per_superpage - group.free_in() - group.evictable_in
        crowd = needed[free // group.per_superpage]
        return group.free.take_out(int(crowd.argmax() if is_needed else crowd.argmin()))

    def free(self, tag: str, pages: Ids) -> None:
        """Pages that nobody holds any more."""
        group = self.groups[tag]
        if not len(pages):
            return
        if group.is_whole:
            self.free_superpages.push(pages)
            group.num_superpages -= len(pages)
        else:
            group.free.push(pages)

    def free_one(self, tag: str, page: int) -> None:
        """`free`, for a single page."""
        group = self.groups[tag]
        if group.is_whole:
            self.free_superpages.push_one(page)
            group.num_superpages -= 1
        else:
            group.free.push_one(page)

    def num_allocated(self, tag: str) -> int:
        """Pages of a group that somebody holds."""
        group = self.groups[tag]
        return group.num_superpages * group.per_superpage - group.free.size

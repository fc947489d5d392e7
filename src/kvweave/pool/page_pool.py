"""A pool: super-pages that its groups take and give back as demand moves.

pool        super-pages   | 0 NULL | 1 full | 2 state | 3 full | 4 free | ...
group full  pages           0..196   197..393           591..787          (a stack of those that are free)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvweave.plan import Pool
from kvweave.pool.group import NO_PAGES, Ids, PagedGroup
from kvweave.pool.pages import GroupPages, PageStack

Demand = list[int]
"""Pages by group number, those of groups in other pools among them."""
UNKNOWN = -1


class PagePool:
    """Who holds which page of a pool. `num_superpages` counts those that can be had: all but the NULL one."""

    def __init__(self, pool: Pool, groups: Sequence[PagedGroup]) -> None:
        self.name = pool.name
        self.num_superpages = pool.num_usable
        self.free_superpages = PageStack(self.num_superpages)
        self.free_superpages.push(np.arange(1, self.num_superpages + 1, dtype=np.int32))
        self.groups = [GroupPages(group, self.num_superpages + 1, self.free_superpages) for group in groups]
        self.is_whole = all(pages.is_whole for pages in self.groups)
        """Whether every page is a whole super-page, so that any page helps any group."""
        self.is_full = all(group.is_full for group in groups)
        spans = [group.slot_tokens * group.pages_per_superpage for group in groups if not group.is_state]
        self.tokens_per_superpage = max(1, int(1 / math.fsum(1 / span for span in spans))) if spans else 1
        """A run of so many tokens has about a super-page of pages."""

    def _lack_apart(self, demand: Demand) -> int:
        """Super-pages that lack, if no group gives back empty ones."""
        lack = -self.free_superpages.size
        for pages in self.groups:
            lack += pages.superpages_for(demand[pages.group.number])
        return lack

    def lack(self, demand: Demand) -> int:
        """Super-pages that lack so that every group can allocate what it wants as things are, empty super-pages of
        others included; 0 or less if none does."""
        lack = self._lack_apart(demand)
        if lack > 0:
            for pages in self.groups:
                spare = (pages.free_pages.size - demand[pages.group.number]) // pages.per_superpage
                if spare > 0:
                    lack -= min(spare, len(pages.empty_superpages()))
        return lack

    def available(self, pages: GroupPages) -> int:
        """Pages a group could allocate without anything being evicted, empty super-pages of others included."""
        superpages = self.free_superpages.size
        superpages += sum(len(other.empty_superpages()) for other in self.groups if other is not pages)
        return pages.free_pages.size + superpages * pages.per_superpage

    def prepare(self, demand: Demand) -> bool:
        """Move super-pages so that every group can allocate what it wants; False, and nothing moved, if it cannot."""
        lack = self._lack_apart(demand)
        if lack > 0:
            if self.lack(demand) > 0:
                return False
            for pages in self.groups:
                spare = (pages.free_pages.size - demand[pages.group.number]) // pages.per_superpage
                superpages = pages.empty_superpages()[: max(0, min(lack, spare))]
                if len(superpages):
                    pages.drop_superpages(superpages)
                    self.free_superpages.push(superpages)
                    lack -= len(superpages)
        for pages in self.groups:
            if not pages.is_whole and (wanted := pages.superpages_for(demand[pages.group.number])):
                pages.add_superpages(self.free_superpages.pop(wanted))
        return True


class Obtainable:
    """What a pool could give at this moment, after all evictable and all `reclaimable` pages (by group number) were
    freed. Exact, and worked out once for any number of demands; changes nothing."""

    def __init__(self, pool: PagePool, reclaimable: Mapping[int, Ids]) -> None:
        self._pool = pool
        self._more = [reclaimable.get(pages.group.number, NO_PAGES) for pages in pool.groups]
        self._could_be_empty = [UNKNOWN] * len(pool.groups)

    def covers(self, demand: Demand) -> bool:
        """Whether every group could allocate what it wants."""
        lack = -self._pool.free_superpages.size
        for i, pages in enumerate(self._pool.groups):
            left = pages.free_pages.size + pages.num_evictable + len(self._more[i]) - demand[pages.group.number]
            if left < 0:
                lack += -(left // pages.per_superpage)
            elif left >= pages.per_superpage:
                if self._could_be_empty[i] == UNKNOWN:
                    self._could_be_empty[i] = pages.could_be_empty(self._more[i])
                lack -= min(left // pages.per_superpage, self._could_be_empty[i])
        return lack <= 0

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


class GroupPages:
    """The free pages of one group. `refs` counts the owners beyond the first of pages shared by forks."""

    def __init__(self, group: Group, num_supers: int) -> None:
        self.tag = group.tag
        self.per_super = group.pages_per_super
        self.stack: Ids = np.empty(num_supers * self.per_super, np.int32)
        self.num_free = 0
        self.num_supers = 0
        self.refs: Ids = np.zeros(num_supers * self.per_super, np.int32)
        self.has_refs = False

    def push(self, pages: Ids) -> None:
        self.stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def pop(self, count: int) -> Ids:
        self.num_free -= count
        return self.stack[self.num_free : self.num_free + count].copy()

    def empty_supers(self) -> Ids:
        """Super-pages of this group none of whose pages is in use."""
        if self.num_free < self.per_super:
            return np.empty(0, np.int32)
        counts = np.bincount(self.stack[: self.num_free] // self.per_super)
        return np.flatnonzero(counts == self.per_super).astype(np.int32)

    def drop(self, supers: Ids) -> None:
        """Forget the free pages of these super-pages."""
        free = self.stack[: self.num_free]
        gone = np.zeros(len(self.stack) // self.per_super, bool)
        gone[supers] = True
        kept = free[~gone[free // self.per_super]]
        self.stack[: len(kept)] = kept
        self.num_free = len(kept)
        self.num_supers -= len(supers)


class PoolPages:
    """The super-pages of one pool, and the groups among which they move."""

    def __init__(self, pool: Pool, groups: list[Group]) -> None:
        self.name = pool.name
        self.num_supers = max(0, pool.num_supers - 1)
        self.groups = {group.tag: GroupPages(group, pool.num_supers) for group in groups}
        self.free_supers: list[int] = list(range(pool.num_supers - 1, 0, -1))

    def available(self, tag: str) -> int:
        """Pages a group could take without anything being evicted, empty super-pages of others included."""
        group = self.groups[tag]
        supers = len(self.free_supers) + sum(len(g.empty_supers()) for g in self.groups.values() if g is not group)
        return group.num_free + supers * group.per_super

    def prepare(self, wanted: dict[str, int]) -> int:
        """Move super-pages so that every group can `take` what it wants; returns how many lack (0: all is ready)."""
        need = {tag: self._supers_for(tag, count) for tag, count in wanted.items()}
        lack = sum(need.values()) - len(self.free_supers)
        for tag, group in self.groups.items() if lack > 0 else ():
            lack -= self._reclaim(group, min(lack, (group.num_free - wanted.get(tag, 0)) // group.per_super))
        if lack > 0:
            return lack
        for tag, supers in need.items():
            if supers:
                self._acquire(self.groups[tag], supers)
        return 0

    def _supers_for(self, tag: str, count: int) -> int:
        group = self.groups[tag]
        return max(0, -(-(count - group.num_free) // group.per_super))

    def take(self, tag: str, count: int) -> Ids:
        """`count` pages, for which `prepare` made room before."""
        group = self.groups[tag]
        assert count <= group.num_free, f"pool {self.name}: {count} pages of {tag} were promised"
        return group.pop(count)

    def _acquire(self, group: GroupPages, count: int) -> None:
        taken = np.array(self.free_supers[-count:][::-1], np.int32)
        del self.free_supers[-count:]
        each = np.arange(group.per_super, dtype=np.int32)
        pages = (taken[:, None] * np.int32(group.per_super) + each).astype(np.int32).ravel()
        group.push(pages[::-1])
        group.num_supers += count

    def _reclaim(self, group: GroupPages, most: int) -> int:
        """Take back up to `most` empty super-pages of a group."""
        supers = group.empty_supers()[: max(0, most)] if most > 0 else np.empty(0, np.int32)
        if len(supers):
            group.drop(supers)
            self.free_supers.extend(supers[::-1].tolist())
        return len(supers)

    def share(self, tag: str, pages: Ids) -> None:
        """One more owner for each of `pages`."""
        group = self.groups[tag]
        group.refs[pages] += 1
        group.has_refs = True

    def release(self, tag: str, pages: Ids) -> int:
        """Give up one ownership of each page; NULLs are ignored. Returns how many became free."""
        pages = pages[pages != NULL]
        group = self.groups[tag]
        if group.has_refs:
            shared = group.refs[pages] > 0
            if shared.any():
                group.refs[pages[shared]] -= 1
                pages = pages[~shared]
                group.has_refs = bool(group.refs.any())
        group.push(pages)
        return len(pages)

    def num_held(self, tag: str) -> int:
        """Pages of a group that somebody owns."""
        group = self.groups[tag]
        return group.num_supers * group.per_super - group.num_free

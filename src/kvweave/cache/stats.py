"""Statistics: frozen records of what a cache holds. free + held + cached = all, whenever anyone looks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.cache.state import CacheState

Sums = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Pages of one group. `held` by running sequences alone, `cached` in the tree, of which `evictable` could go."""

    tag: str
    free: int
    held: int
    cached: int
    evictable: int
    padding_bytes: int
    """Bytes of padding in its pages that are held or cached."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Super-pages of one pool, the NULL one apart."""

    name: str
    superpages: int
    free_superpages: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A moment of a cache. Tokens are counted at `open`; `infinite_tokens` is what an infinite cache would have hit."""

    groups: tuple[GroupStats, ...]
    pools: tuple[PoolStats, ...]
    sequences: int
    nodes: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    infinite_tokens: int | None
    evicted_pages: int

    def group(self, tag: str) -> GroupStats:
        return next(group for group in self.groups if group.tag == tag)


def group_stats(state: CacheState) -> tuple[GroupStats, ...]:
    found = []
    for pages in state.pages:
        tag, cached, padding = pages.group.tag, pages.num_cached, state.plan.padding_bytes(pages.group.tag)
        held, padding = pages.num_allocated - cached, padding * pages.num_allocated
        found.append(GroupStats(tag, pages.free_pages.size, held, cached, pages.num_evictable, padding))
    return tuple(found)


def pool_stats(state: CacheState) -> tuple[PoolStats, ...]:
    return tuple(PoolStats(pool.name, pool.num_superpages, pool.free_superpages.size) for pool in state.pools)


class InfiniteCache:
    """How much of each prompt was ever seen before, on the grid: 64-bit sums of tokens, never forgotten.

    Sorted arrays, each at least twice as long as the next, are merged as they grow: 8 bytes a block, and as much again
    for a moment while two of them are merged.
    """

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self.hit_tokens = 0
        self._sorted: list[Sums] = []

    def see(self, sums: Sums, limit: int) -> None:
        """`sums[i]` identifies the first (i + 1) x grid tokens. What is seen is closed under prefixes."""
        seen = np.zeros(len(sums), np.bool_)
        for array in self._sorted:
            seen |= array[np.minimum(np.searchsorted(array, sums), len(array) - 1)] == sums
        low = int(np.count_nonzero(seen))
        self.hit_tokens += min(low * self.grid, limit // self.grid * self.grid)
        if low < len(sums):
            self._add(np.sort(sums[low:]))

    def _add(self, new: Sums) -> None:
        while self._sorted and len(self._sorted[-1]) < 2 * len(new):
            new = np.concatenate([self._sorted.pop(), new])
            new.sort(kind="stable")
        self._sorted.append(new)

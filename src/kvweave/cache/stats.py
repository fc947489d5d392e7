"""Statistics: frozen records of what a cache holds. free + held + cached = all, whenever anyone looks."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.cache.state import CacheState


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
    """A moment of a cache. Tokens are counted at `open`."""

    groups: tuple[GroupStats, ...]
    pools: tuple[PoolStats, ...]
    sequences: int
    nodes: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
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

"""Statistics: frozen records of the books. free + held + cached = all, whenever anyone looks."""

from __future__ import annotations

from dataclasses import dataclass


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
    supers: int
    free_supers: int


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


class InfiniteCache:
    """How much of each prompt was ever seen before, on the grid: sums of tokens, never forgotten, 8 bytes a block."""

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self.hit_tokens = 0
        self._seen: set[tuple[int, int]] = set()

    def see(self, salt: int, sums: list[int], limit: int) -> None:
        """`sums[i]` identifies the first (i + 1) x grid tokens. What is seen is closed under prefixes."""
        low, high = 0, len(sums)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if (salt, sums[middle]) in self._seen else (low, middle)
        self.hit_tokens += min(low * self.grid, limit // self.grid * self.grid)
        self._seen.update((salt, value) for value in sums[low:])

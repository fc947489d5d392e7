"""What a cache holds at one moment, page by page and run by run: for reports and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvweave.cache.state import CacheState
from kvweave.cache.stats import Stats
from kvweave.pool import NULL, GroupPages, PagedGroup, PagePool
from kvweave.prefix import Node


class Owner(StrEnum):
    """Whose a page is: nobody's, a running sequence's, one branch's of the tree, or several branches'."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class SuperPage:
    """A super-page, the group it belongs to (None: nobody's), and the owner of each page that the group cut it into."""

    number: int
    tag: str | None
    pages: tuple[Owner, ...]

    def count(self, *owners: Owner) -> int:
        return sum(page in owners for page in self.pages)


@dataclass(frozen=True, slots=True)
class PoolMap:
    """The super-pages of a pool, in order, the NULL one apart."""

    name: str
    superpages: tuple[SuperPage, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of tokens in the tree, from `start` to the resume point `end`.

    `found` is how many requests went on from its end or from further down, `branches` how many ends lie at or below
    it, `pages` how many pages of each group it keeps.
    """

    id: int
    parent: int | None
    start: int
    end: int
    found: int
    branches: int
    pages: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class CacheContents:
    """All pools, the tree (parents before children), and the statistics of the same moment."""

    pools: tuple[PoolMap, ...]
    tree: tuple[Branch, ...]
    stats: Stats


def contents(state: CacheState, stats: Stats) -> CacheContents:
    ends = _below(state, lambda node: int(not node.children))
    pools = tuple(_pool(state, pool, ends) for pool in state.pools)
    return CacheContents(pools, tuple(_tree(state, ends)), stats)


# ---- the tree


def _below(state: CacheState, count: Callable[[Node], int]) -> dict[int, int]:
    """By node: the sum of a number over it and all nodes below it."""
    sums: Counter[int] = Counter()
    for node in state.prefix.tree.nodes():
        for above in node.path():
            sums[above.id] += count(node)
    return sums


def _tree(state: CacheState, ends: dict[int, int]) -> Iterator[Branch]:
    found = _below(state, lambda node: sum(point.hits for point in node.points))
    for node in state.prefix.tree.nodes():
        above = node.parent.id if node.parent is not None and node.parent.parent is not None else None
        pages = tuple((group.tag, len(_pages(state, node, group))) for group in state.groups)
        yield Branch(node.id, above, node.start, node.end, found[node.id], ends[node.id], pages)


# ---- pools


def _pool(state: CacheState, pool: PagePool, ends: dict[int, int]) -> PoolMap:
    found: dict[int, SuperPage] = {}
    for pages in pool.groups:
        for superpage in _group(state, pages, ends):
            found[superpage.number] = superpage
    numbers = range(1, pool.num_superpages + 1)
    return PoolMap(pool.name, tuple(found.get(number, SuperPage(number, None, ())) for number in numbers))


def _group(state: CacheState, pages: GroupPages, ends: dict[int, int]) -> Iterator[SuperPage]:
    """The super-pages of one group: those in which it has a page, in use or free."""
    group, owners = pages.group, dict.fromkeys(_held(state, pages.group), Owner.HELD)
    owners |= dict.fromkeys(pages.free_pages.all.tolist(), Owner.FREE)
    for node in state.prefix.tree.nodes():
        owner = Owner.SHARED if ends[node.id] > 1 else Owner.CACHED
        owners |= dict.fromkeys(_pages(state, node, group), owner)
    size = pages.per_superpage
    for number in sorted({page // size for page in owners}):
        of_number = range(number * size, (number + 1) * size)
        yield SuperPage(number, group.tag, tuple(owners.get(page, Owner.HELD) for page in of_number))


def _pages(state: CacheState, node: Node, group: PagedGroup) -> list[int]:
    if group.is_state:
        nth = state.states.index(group)
        return [point.states[nth] for point in node.points if point.states]
    kept: list[int] = node.pages[group.number][node.pages[group.number] != NULL].tolist()
    return kept


def _held(state: CacheState, group: PagedGroup) -> Iterable[int]:
    """Pages that running sequences hold."""
    table = state.tables[group.number]
    return [page for row, s in state.by_row.items() for page in table.held(row, s.node.end).tolist() if page != NULL]

"""What a cache holds at one moment, page by page and run by run: for reports and pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvweave.cache.state import CacheState
from kvweave.cache.stats import Stats
from kvweave.pool import NULL, GroupPages, PagedGroup, PagePool
from kvweave.prefix import Node


class Owner(StrEnum):
    """The owner of a page: none (free), a running sequence, one branch of the tree, or several branches."""

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
    nodes = list(state.prefix.tree.nodes())
    ends, found = Counter[int](), Counter[int]()
    for node in reversed(nodes):  # children before their parents
        ends[node.id] += int(not node.children)
        found[node.id] += sum(point.hits for point in node.points)
        if node.parent is not None:
            ends[node.parent.id] += ends[node.id]
            found[node.parent.id] += found[node.id]
    tree = tuple(_branch(state, node, found[node.id], ends[node.id]) for node in nodes)
    return CacheContents(tuple(_pool(state, pool, nodes, ends) for pool in state.pools), tree, stats)


def _branch(state: CacheState, node: Node, found: int, ends: int) -> Branch:
    above = node.parent.id if node.parent is not None and node.parent.parent is not None else None
    pages = tuple((group.tag, len(_pages(state, node, group))) for group in state.groups)
    return Branch(node.id, above, node.start, node.end, found, ends, pages)


def _pool(state: CacheState, pool: PagePool, nodes: list[Node], ends: Counter[int]) -> PoolMap:
    found = [SuperPage(number, None, ()) for number in range(pool.num_superpages + 1)]
    for pages in pool.groups:
        size, owners = pages.per_superpage, _owners(state, pages, nodes, ends)
        for number in {page // size for page in owners}:
            of_number = range(number * size, (number + 1) * size)
            found[number] = SuperPage(number, pages.group.tag, tuple(owners.get(p, Owner.HELD) for p in of_number))
    return PoolMap(pool.name, tuple(found[1:]))


def _owners(state: CacheState, pages: GroupPages, nodes: list[Node], ends: Counter[int]) -> dict[int, Owner]:
    """The owners of a group's pages: of all that are free, in a table or in the tree."""
    group, table, owners = pages.group, state.tables[pages.group.number], dict[int, Owner]()
    for row, sequence in state.by_row.items():
        owners |= dict.fromkeys(table.held(row, sequence.node.end).tolist(), Owner.HELD)
    owners.pop(NULL, None)
    owners |= dict.fromkeys(pages.free_pages.all.tolist(), Owner.FREE)
    for node in nodes:
        owner = Owner.SHARED if ends[node.id] > 1 else Owner.CACHED
        owners |= dict.fromkeys(_pages(state, node, group), owner)
    return owners


def _pages(state: CacheState, node: Node, group: PagedGroup) -> list[int]:
    if group.is_state:
        nth = state.states.index(group)
        return [point.states[nth] for point in node.points if point.states]
    kept: list[int] = node.pages[group.number][node.pages[group.number] != NULL].tolist()
    return kept

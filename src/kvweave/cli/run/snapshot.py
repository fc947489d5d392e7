"""Who has which page, at one moment. The one place that reads the books of a core; all else draws what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from kvweave.cache import Cache
from kvweave.cache.stats import Stats
from kvweave.pool import PoolPages
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
    supers: tuple[SuperPage, ...]


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
class Snapshot:
    """All pools, the tree (parents before children), and the statistics of the same moment."""

    pools: tuple[PoolMap, ...]
    tree: tuple[Branch, ...]
    stats: Stats

    @classmethod
    def of(cls, core: Cache) -> Snapshot:
        core.publish()
        ends = _below(core, lambda node: int(not node.children))
        return cls(tuple(_pool(core, pool, ends) for pool in core.books.pools), tuple(_tree(core, ends)), core.stats())


# ---- the tree


def _below(core: Cache, count: Callable[[Node], int]) -> dict[int, int]:
    """By node: the sum of a number over it and all nodes below it."""
    sums: Counter[int] = Counter()
    for node in core.books.prefix.tree.nodes():
        for above in node.path():
            sums[above.id] += count(node)
    return sums


def _tree(core: Cache, ends: dict[int, int]) -> Iterator[Branch]:
    tags, found = [table.tag for table in core.books.tables], _below(core, lambda node: node.hits)
    for node in core.books.prefix.tree.nodes():
        above = node.parent.id if node.parent is not None and node.parent.parent is not None else None
        pages = tuple(zip(tags, node.counts, strict=True))
        yield Branch(node.id, above, node.start, node.end, found[node.id], ends[node.id], pages)


# ---- pools


def _pool(core: Cache, pool: PoolPages, ends: dict[int, int]) -> PoolMap:
    found: dict[int, SuperPage] = {}
    for tag in pool.groups:
        for super_page in _group(core, pool, tag, ends):
            found[super_page.number] = super_page
    numbers = range(1, pool.num_superpages + 1)
    return PoolMap(pool.name, tuple(found.get(number, SuperPage(number, None, ())) for number in numbers))


def _group(core: Cache, pool: PoolPages, tag: str, ends: dict[int, int]) -> Iterator[SuperPage]:
    """The super-pages of one group: those in which it has a page, in use or free."""
    group, owners = pool.groups[tag], dict.fromkeys(_held(core, tag), Owner.HELD)
    owners |= dict.fromkeys(group.free.all.tolist(), Owner.FREE)
    for node in core.books.prefix.tree.nodes():
        owner = Owner.SHARED if ends[node.id] > 1 else Owner.CACHED
        owners |= dict.fromkeys(_pages(core, node, tag), owner)
    for number in sorted({page // group.per_super for page in owners}):
        pages = range(number * group.per_super, (number + 1) * group.per_super)
        yield SuperPage(number, tag, tuple(owners.get(page, Owner.HELD) for page in pages))


def _pages(core: Cache, node: Node, tag: str) -> Iterable[int]:
    number, states = core.books.numbers[tag], core.books.states
    if number in states:
        return [pages[states.index(number)] for pages in node.snapshots.values()]
    pages = node.pages[number]
    kept: list[int] = pages[pages != 0].tolist()
    return kept


def _held(core: Cache, tag: str) -> Iterable[int]:
    """Pages that only running sequences have."""
    table = core.books.tables[core.books.numbers[tag]]
    owned = chain.from_iterable(table.owned(row).tolist() for row in core.books.by_row)
    return [page for page in owned if page]

"""The prefix tree: what was computed before, found again by comparing tokens.

Runs are multiples of the grid, the common multiple of all groups' blocks, so every cut falls between blocks. The tree
only knows which pages are where; who needs them, and which are evicted, is `PrefixCache`'s. Full groups have every page
of every node; a page is in the tree once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count

import numpy as np

from kvweave.pool import NO_PAGES, NULL, Ids, PagedGroup
from kvweave.prefix.events import Cleared, Event, Joined, Kept, Lost, Removed, Split, Stored, Trimmed
from kvweave.prefix.joint import Present, joint_hit
from kvweave.prefix.node import Node, Point, Tokens
from kvweave.prefix.prompt import num_equal

PublishRunning = Callable[[Node, bytes], None]
"""Publishes running sequences attached to a node that continue with these tokens."""


class Match:
    """How many tokens of a prompt (on the grid) the tree holds, the node in which they end, and how many lead there."""

    def __init__(self, node: Node | None, length: int, num_nodes: int) -> None:
        self.node = node
        self.length = length
        self.num_nodes = num_nodes


class PageRun:
    """A view of a node's pages of a group, from block `first` on, counted from the start of the sequence."""

    def __init__(self, node: Node, group: PagedGroup, first: int, pages: Ids) -> None:
        self.node = node
        self.group = group
        self.first = first
        self.pages = pages


class Tree:
    """All namespaces' roots. `emit`, where given, is called for every change, in order."""

    def __init__(self, groups: Sequence[PagedGroup], emit: Callable[[Event], None] | None = None) -> None:
        self.groups = list(groups)
        self.grid = math.lcm(*(group.slot_tokens for group in groups))
        self.rows = [group for group in self.groups if not group.is_state]
        self.full = [group for group in self.groups if group.is_full]
        self.windows = [group for group in self.groups if group.is_window]
        self.states = [group for group in self.groups if group.is_state]
        self._windows = [group for group in self.windows if group.has_pages]
        self.roots: dict[Hashable, Node] = {}
        self.num_nodes = 0
        self._ids = count(1)
        self.emit = emit

    # ---- looking

    def root(self, namespace: Hashable) -> Node:
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(next(self._ids), None, 0, NO_PAGES, self.empty_pages(0))
            node.namespace = namespace
            if self.emit:
                self.emit(Stored(node.id, None, namespace, 0, ()))
        return node

    def match(self, namespace: Hashable, tokens: Tokens, publish: PublishRunning | None = None) -> Match:
        """The longest run of tokens in the tree, on the grid."""
        node, last, length, num_nodes, grid = self.roots.get(namespace), None, 0, 0, self.grid
        ids, last_start = tokens.data, len(tokens) - grid  # of `data` a part is had in half the time
        while node is not None and length <= last_start:
            key = ids[length : length + grid].tobytes()
            if publish is not None and node.running:
                publish(node, key)
            child = node.children.get(key)
            if child is None:
                break
            size, same = child.end - length, grid  # by the key
            if size > grid:
                same = self.common(child.tokens, tokens[length : child.end])
            last, num_nodes = child, num_nodes + 1
            length += same
            node = child if same == size else None
        return Match(last, length, num_nodes)

    def common(self, run: Tokens, tokens: Tokens) -> int:
        """How many tokens two runs have in common at their start, on the grid."""
        return num_equal(run, tokens) // self.grid * self.grid

    def hit(self, match: Match, limit: int) -> int:
        """The longest position up to `limit` from which every group can go on, by what the matched nodes hold."""
        return 0 if match.node is None else self.last_resumable(match.node, min(match.length, limit), 0)

    def last_resumable(self, node: Node, limit: int, low: int) -> int:
        """The last position in (low, limit], on the grid and on the path down to a node, from which every group can go
        on; `low` if none.

        Full attention can go on from anywhere, and so can windows without pages here, states only from points. Windows
        can from points, and from wherever behind the last one the pages kept for its neighbours happen to suffice.
        """
        limit = limit // self.grid * self.grid
        if limit <= low or not (self.states or self._windows):
            return max(low, limit)
        point = node.last_point(limit, low)
        low = low if point is None else max(low, point.position)
        if self.states or low == limit:
            return low
        positions = np.arange(low // self.grid + 1, limit // self.grid + 1) * self.grid
        present = [self._present(group, node, int(positions[0]), limit) for group in self._windows]
        return joint_hit(present, self.grid, limit, positions) or low

    def runs(self, group: PagedGroup, node: Node, low: int, high: int) -> list[PageRun]:
        """The pages of the blocks [low, high) on the path down to `node`, from the lowest node up."""
        runs: list[PageRun] = []
        at: Node | None = node
        while high > low and at is not None:
            start, pages = at.start // group.slot_tokens, at.pages[group.number]
            if high > start:
                first = max(low, start)
                is_whole = first == start and high - start == len(pages)
                runs.append(PageRun(at, group, first, pages if is_whole else pages[first - start : high - start]))
                high = start
            at = at.parent
        return runs

    def pages(self, group: PagedGroup, node: Node, low: int, high: int) -> Ids:
        """The same as one array; a view where one node has them all."""
        runs = [run.pages for run in self.runs(group, node, low, high)]
        return runs[0] if len(runs) == 1 else np.concatenate([NO_PAGES, *runs[::-1]])

    def _present(self, group: PagedGroup, node: Node, low: int, limit: int) -> Present:
        """Which blocks of a window are there, of those that going on from the positions [low, limit] needs."""
        first = 0 if group.head_blocks else group.first_block(low)
        pages = self.pages(group, node, first, limit // group.slot_tokens)
        return Present(group.reach, group.slot_tokens, pages != NULL, first)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # ---- growing

    def split(self, node: Node, position: int) -> Node:
        """Cut a run in two; the upper part is new and is returned. Holders at the node are at its lower part."""
        parent, size = node.parent, position - node.start
        assert parent is not None, "a root has no run to split"
        assert 0 < size < len(node.tokens), f"{position} is not inside the run {node.start} to {node.end}"
        pages = list(node.pages)
        for group in self.rows:
            array, cut = node.pages[group.number], size // group.slot_tokens
            pages[group.number], node.pages[group.number] = _own(array[:cut]), _own(array[cut:])
        upper = Node(next(self._ids), parent, node.start, _own(node.tokens[:size]), pages)
        upper.pins = node.pins
        parent.children[node.key] = upper
        node.parent, node.start, node.tokens = upper, position, _own(node.tokens[size:])
        upper.key, node.key = node.key, node.tokens[: self.grid].tobytes()
        upper.points = [point for point in node.points if point.position <= position]
        node.points = node.points[len(upper.points) :]
        for point in upper.points:
            point.node = upper
        upper.children[node.key] = node
        self.num_nodes += 1
        if self.emit:
            self.emit(Split(node.id, upper.id, position))
        return upper

    def join(self, nodes: list[Node]) -> None:
        """Make one run of nodes that follow one another: the last one has all of it, the others are gone."""
        first, last = nodes[0], nodes[-1]
        assert first.parent is not None, "a root is not joined"
        for group in self.rows:
            last.pages[group.number] = np.concatenate([node.pages[group.number] for node in nodes])
        last.tokens = np.concatenate([node.tokens for node in nodes])
        last.points = [point for node in nodes for point in node.points]
        for point in last.points:
            point.node = last
        last.start, last.parent, last.key = first.start, first.parent, first.key
        first.parent.children[last.key] = last
        self.num_nodes -= len(nodes) - 1
        for node in reversed(nodes[:-1]):
            if self.emit:
                self.emit(Joined(last.id, node.id))

    def insert(self, parent: Node, tokens: Tokens, pages: list[Ids]) -> Node:
        """A new run below `parent`, whose first grid of tokens is not among its children.

        The tokens are the tree's from now on: nobody may write to them.
        """
        node = Node(next(self._ids), parent, parent.end, _own(tokens), pages)
        node.key = tokens[: self.grid].tobytes()
        assert node.key not in parent.children, "a run is in the tree once"
        parent.children[node.key] = node
        self.num_nodes += 1
        if self.emit:
            self.emit(Stored(node.id, parent.id, None, node.start, tuple(tokens.tolist())))
        self.emit_kept(node, self.full)
        return node

    def add_point(self, point: Point) -> None:
        """Points of a run are in order; most come at its end."""
        node, at = point.node, len(point.node.points)
        while at and node.points[at - 1].position > point.position:
            at -= 1
        node.points.insert(at, point)
        self.emit_kept(node, self.states)

    # ---- shrinking

    def remove_point(self, point: Point) -> None:
        points = point.node.points  # most that go are the first one or the last one
        if points[-1] is point:
            points.pop()
        elif points[0] is point:
            del points[0]
        else:
            del points[bisect_left(points, point.position, key=lambda other: other.position)]
        point.alive = False
        if self.emit:
            for group in self.states:
                self.emit(Lost(point.node.id, group.tag, (point.position // group.slot_tokens - 1,)))

    def emit_lost(self, run: PageRun, before: Ids) -> None:
        """Emit what a run of a window has lost of what it was `before`."""
        if self.emit:
            blocks = np.flatnonzero(run.pages != before) + run.first
            self.emit(Lost(run.node.id, run.group.tag, tuple(blocks.tolist())))

    def trim(self, node: Node, end: int) -> list[Ids]:
        """Cut a leaf's run to `end`, beyond which it has no point; returns the pages that left."""
        assert not node.children, "only the end of a leaf can be cut off"
        assert node.start < end < node.end, f"{end} is not inside the run {node.start} to {node.end}"
        gone = [NO_PAGES] * len(self.groups)
        for group in self.rows:
            pages, cut = node.pages[group.number], (end - node.start) // group.slot_tokens
            gone[group.number], node.pages[group.number] = pages[cut:], _own(pages[:cut])
        node.tokens, node.end = _own(node.tokens[: end - node.start]), end
        if self.emit:
            self.emit(Trimmed(node.id, end))
        return gone

    def remove(self, node: Node) -> None:
        """Take a leaf, or the root of a namespace of which nothing is left, out of the tree."""
        assert not node.children, "only leaves are removed"
        if node.parent is None:
            del self.roots[node.namespace]
        else:
            del node.parent.children[node.key]
            self.num_nodes -= 1
        if self.emit:
            self.emit(Removed(node.id))

    def clear(self) -> None:
        self.roots.clear()
        self.num_nodes = 0
        if self.emit:
            self.emit(Cleared())

    # ---- small things

    def empty_pages(self, tokens: int) -> list[Ids]:
        return [NO_PAGES if g.is_state else np.zeros(tokens // g.slot_tokens, np.int32) for g in self.groups]

    def emit_kept(self, node: Node, groups: Sequence[PagedGroup]) -> None:
        """Emit what a node holds of some groups now."""
        if self.emit is None:
            return
        for group in groups:
            if group.is_state:
                blocks = [point.position // group.slot_tokens - 1 for point in node.points]
            else:
                blocks = (np.flatnonzero(node.pages[group.number]) + node.start // group.slot_tokens).tolist()
            self.emit(Kept(node.id, group.tag, tuple(blocks)))


def _own(array: Ids) -> Ids:
    """The array itself, or a copy where it would keep a much larger one alive."""
    base = array.base
    return array if base is None or 4 * len(array) >= len(base) else array.copy()

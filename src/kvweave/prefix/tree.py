"""The prefix tree: what was computed before, found again by comparing tokens.

Runs are multiples of the grid, the common multiple of all groups' blocks, so every cut falls between blocks. The tree
decides which pages are kept and which go; it never touches memory. Invariants: groups that see everything have every
page of every node; snapshots are there for all groups of states or for none; a page is in the tree once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from kvweave.pool import NULL, Ids
from kvweave.prefix.events import Cleared, Event, Kept, Lost, Removed, Split, Stored, Trimmed
from kvweave.prefix.joint import Present, joint_hit
from kvweave.prefix.node import Node, Snapshots, Tokens
from kvweave.prefix.tails import Tails
from kvweave.spec import Reach

Range = tuple[int, int]
"""Blocks [first, last) of a run."""
NO_PAGES: Ids = np.empty(0, np.int32)


class TreeGroup:
    """What the tree knows of a group: its reach, and the tokens of one of its pages."""

    def __init__(self, tag: str, reach: Reach, block_tokens: int) -> None:
        self.tag = tag
        self.reach = reach
        self.block_tokens = block_tokens
        self.head_blocks = -(-reach.head // block_tokens)
        self.sees_all = reach.span is None
        self.per_token: bool = reach.per_token
        self.tails = Tails(reach, block_tokens)


class Match:
    """The nodes along which a prompt ran, and how many of its tokens (on the grid) they hold."""

    def __init__(self, nodes: list[Node], length: int) -> None:
        self.nodes = nodes
        self.length = length


class Tree:
    """All namespaces' roots. `emit`, where given, is told of every change, in order."""

    def __init__(self, groups: Sequence[TreeGroup], emit: Callable[[Event], None] | None = None) -> None:
        self.groups = list(groups)
        self.grid = math.lcm(*(group.block_tokens for group in groups))
        self.rows = [number for number, group in enumerate(self.groups) if group.per_token]
        self.windows = [number for number in self.rows if not self.groups[number].sees_all]
        self.states = [number for number, group in enumerate(self.groups) if not group.per_token]
        self.trailing = self.windows + self.states
        self.roots: dict[Hashable, Node] = {}
        self.num_nodes = 0
        self._next_id = 0
        self._emit = emit

    # ---- looking

    def root(self, namespace: Hashable) -> Node:
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(self._take_id(), None, 0, NO_PAGES, self.empty_pages(0), {})
            if self._emit:
                self._emit(Stored(node.id, None, namespace, 0, ()))
        return node

    def match(self, namespace: Hashable, tokens: Tokens) -> Match:
        """The longest run of tokens in the tree, on the grid. Changes nothing."""
        node, nodes, length, grid = self.roots.get(namespace), [], 0, self.grid
        while node is not None and len(tokens) - length >= grid:
            child = node.children.get(tokens[length : length + grid].tobytes())
            if child is None:
                break
            same = self.common(child.tokens, tokens[length : length + len(child.tokens)])
            nodes.append(child)
            length += same
            node = child if same == len(child.tokens) else None
        return Match(nodes, length)

    def common(self, run: Tokens, tokens: Tokens) -> int:
        """How many tokens two runs have in common at their start, on the grid."""
        size = min(len(run), len(tokens)) // self.grid * self.grid
        if not size:
            return 0
        different = run[:size] != tokens[:size]
        first = int(different.argmax())
        return first // self.grid * self.grid if different[first] else size

    def hit(self, match: Match, limit: int) -> int:
        """The longest position up to `limit` from which every group can go on, by what the matched nodes hold."""
        limit = min(match.length, limit) // self.grid * self.grid
        if limit <= 0 or not self.trailing:
            return max(0, limit)
        if any(node.end == limit and self.is_point(node) for node in match.nodes[-2:]):
            return limit
        positions = None
        if self.states:
            found = sorted([at for node in match.nodes for at in node.snapshots if at <= limit])
            positions = np.array(found, np.int64)
        return joint_hit([self._present(number, match.nodes) for number in self.windows], self.grid, limit, positions)

    def _present(self, number: int, nodes: list[Node]) -> Present:
        group = self.groups[number]
        arrays = [node.pages[number] for node in nodes]
        pages = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return Present(group.reach, group.block_tokens, pages != NULL)

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
        """Cut a run in two; the upper part is new and is returned. Whoever pinned the node keeps its lower part."""
        parent, size = node.parent, position - node.start
        assert parent is not None, "a root has no run to split"
        assert 0 < size < len(node.tokens), f"{position} is not inside the run {node.start} to {node.end}"
        pages = list(node.pages)
        for number in self.rows:
            cut = size // self.groups[number].block_tokens
            pages[number], node.pages[number] = pages[number][:cut], pages[number][cut:]
        snapshots = {at: node.snapshots.pop(at) for at in list(node.snapshots) if at <= position}
        upper = Node(self._take_id(), parent, node.start, node.tokens[:size], pages, snapshots)
        self._count(upper)
        upper.pins, upper.last_used, upper.priority = node.pins, node.last_used, node.priority
        upper.extras = node.extras
        parent.children[self._key(upper.tokens)] = upper
        node.parent, node.start, node.tokens = upper, position, node.tokens[size:]
        for number, count in enumerate(upper.counts):
            node.counts[number] -= count
        upper.children[self._key(node.tokens)] = node
        self.num_nodes += 1
        if self._emit:
            self._emit(Split(node.id, upper.id, position))
        return upper

    def insert(self, parent: Node, tokens: Tokens, pages: list[Ids], snapshots: Snapshots) -> Node:
        """A new run below `parent`, whose first grid of tokens is not among its children.

        The tokens are the tree's from now on: nobody may write to them.
        """
        base = tokens.base
        tokens = tokens if base is not None and len(base) <= 2 * len(tokens) else tokens.copy()
        node = Node(self._take_id(), parent, parent.end, tokens, pages, snapshots)
        self._count(node)
        key = self._key(tokens)
        assert key not in parent.children, "a run is in the tree once"
        parent.children[key] = node
        self.num_nodes += 1
        if self._emit:
            self._emit(Stored(node.id, parent.id, None, node.start, tuple(tokens.tolist())))
            self._emit_kept(node, range(len(self.groups)))
        return node

    def grow(self, node: Node, tokens: Tokens, pages: list[Ids], snapshots: Snapshots) -> None:
        """Make a leaf's run longer; its resume point moves to the new end."""
        node.tokens = np.concatenate([node.tokens, tokens])
        node.end += len(tokens)
        for number in self.rows:
            self._put(node, number, np.concatenate([node.pages[number], pages[number]]))
        node.snapshots.update(snapshots)
        self._count_states(node)
        if self._emit:
            self._emit(Stored(node.id, None, None, node.end - len(tokens), tuple(tokens.tolist())))
            self._emit_kept(node, range(len(self.groups)))

    def keep(self, node: Node, number: int, first: int, pages: Ids) -> Ids:
        """Fill the gaps of a group from block `first` of the run on; returns the pages that were not needed."""
        own = node.pages[number][first : first + len(pages)]
        gaps = (own == NULL) & (pages != NULL)
        count = int(np.count_nonzero(gaps))
        if not count:
            return pages
        own[gaps] = pages[gaps]
        node.counts[number] += count
        if self._emit:
            self._emit_kept(node, [number])
        rest: Ids = pages[~gaps]
        return rest

    def keep_snapshots(self, node: Node, snapshots: Snapshots) -> list[tuple[int, ...]]:
        """Fill gaps; returns those that were not needed."""
        rest = [snapshots.pop(at) for at in list(snapshots) if at in node.snapshots]
        if snapshots:
            node.snapshots.update(snapshots)
            self._count_states(node)
            if self._emit:
                self._emit_kept(node, self.states)
        return rest

    # ---- shrinking: all return the pages that left

    def drop(self, node: Node, number: int, blocks: Range) -> Ids:
        """Lose some pages of one group."""
        first, last = blocks
        pages = node.pages[number][first:last]
        count = int(np.count_nonzero(pages))
        if not count:
            return pages[:0]
        gone: Ids = pages[pages != NULL]
        pages[:] = NULL
        node.counts[number] -= count
        if self._emit:
            start = node.start // self.groups[number].block_tokens
            self._emit(Lost(node.id, self.groups[number].tag, tuple(range(start + first, start + last))))
        return gone

    def drop_snapshots(self, node: Node, but_end: bool) -> list[tuple[int, ...]]:
        """Lose the states of a run, but those at its end if they are to stay."""
        end = node.end if but_end else -1
        gone = [at for at in node.snapshots if at != end]
        if not gone:
            return []
        if self._emit:
            for number in self.states:
                group = self.groups[number]
                self._emit(Lost(node.id, group.tag, tuple([at // group.block_tokens - 1 for at in gone])))
        left = [node.snapshots.pop(at) for at in gone]
        self._count_states(node)
        return left

    def trim(self, node: Node, end: int) -> list[Ids]:
        """Cut a leaf's run to `end`."""
        assert not node.children, "only the end of a leaf can be cut off"
        assert node.start < end < node.end, f"{end} is not inside the run {node.start} to {node.end}"
        cuts = [(end - node.start) // group.block_tokens for group in self.groups]
        gone = [p[c:] for p, c in zip(node.pages, cuts, strict=True)]
        for number, cut in enumerate(cuts):
            self._put(node, number, node.pages[number][:cut])
        node.tokens, node.end = node.tokens[: end - node.start], end
        if self._emit:
            self._emit(Trimmed(node.id, end))
        return gone

    def remove(self, node: Node) -> None:
        """Take a leaf out of the tree; its pages are whoever's wants them."""
        parent = node.parent
        assert parent is not None, "a root is never removed"
        assert not node.children, "only leaves are removed"
        del parent.children[self._key(node.tokens)]
        node.parent = None
        self.num_nodes -= 1
        if self._emit:
            self._emit(Removed(node.id))

    def clear(self) -> None:
        self.roots.clear()
        self.num_nodes = 0
        if self._emit:
            self._emit(Cleared())

    # ---- what a point needs

    def is_point(self, node: Node) -> bool:
        """Whether a sequence can go on from the node's end, as far as its trailing groups tell."""
        if self.states and node.end not in node.snapshots:
            return False
        return all(self._reaches_back(node, number) for number in self.windows)

    def _reaches_back(self, node: Node, number: int) -> bool:
        group, end = self.groups[number], node.end // self.groups[number].block_tokens
        low, head = group.tails.first_block(node.end), group.head_blocks
        at, high = node, end
        while True:
            first = at.start // group.block_tokens
            pages = at.pages[number][max(0, low - first) : high - first]
            if np.count_nonzero(pages) < len(pages):
                return False
            if head > first and np.count_nonzero(at.pages[number][: head - first]) < min(head, high) - first:
                return False
            parent = at.parent
            if parent is None or parent.parent is None or (low >= first and not head):
                return True
            at, high = parent, first

    def needed_below(self, node: Node, number: int) -> int:
        """The first block of a group that resume points below `node` need; that behind its run when they need none."""
        group = self.groups[number]
        end = first = node.end // group.block_tokens
        for child in node.children.values():
            tail = group.tails.first_block(child.end)
            if tail < end:
                first = min(first, tail if child.counts[number] else end, self.needed_below(child, number))
        return first

    def unneeded(self, node: Node, number: int) -> Range:
        """Which blocks of a dead point's run nobody below needs. Heads are kept while anything is below."""
        if not node.children:
            return 0, len(node.pages[number])
        return self.before(node, number, self.needed_below(node, number))

    def passed(self, node: Node, number: int) -> Range:
        """Which blocks of a run its own end does not need."""
        return self.before(node, number, self.groups[number].tails.first_block(node.end))

    def extra(self, node: Node, number: int) -> Range:
        """Which blocks of a run neither its own end nor points below need."""
        needed = self.groups[number].tails.first_block(node.end)
        return self.before(node, number, min(needed, self.needed_below(node, number)))

    def before(self, node: Node, number: int, block: int) -> Range:
        """Which blocks of a run come before `block`, counted from the start of all, heads apart."""
        group = self.groups[number]
        start = node.start // group.block_tokens
        first = max(0, group.head_blocks - start)
        return first, max(first, min(block - start, len(node.pages[number])))

    # ---- small things

    def _key(self, tokens: Tokens) -> bytes:
        return tokens[: self.grid].tobytes()

    def empty_pages(self, tokens: int) -> list[Ids]:
        return [np.zeros(tokens // g.block_tokens, np.int32) if g.per_token else NO_PAGES for g in self.groups]

    def _put(self, node: Node, number: int, pages: Ids) -> None:
        """Replace a group's pages."""
        node.pages[number] = pages
        node.counts[number] = int(np.count_nonzero(pages))

    def _count(self, node: Node) -> None:
        """Count what a new node keeps; groups that see everything keep all, or none where a rank has no such layers."""
        for number in self.rows:
            pages = node.pages[number]
            whole = self.groups[number].sees_all and bool(pages[0] != NULL)
            node.counts[number] = len(pages) if whole else int(np.count_nonzero(pages))
        self._count_states(node)

    def _count_states(self, node: Node) -> None:
        for number in self.states:
            node.counts[number] = len(node.snapshots)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _emit_kept(self, node: Node, numbers: Sequence[int]) -> None:
        assert self._emit is not None
        for number in numbers:
            group = self.groups[number]
            if group.per_token:
                there = np.flatnonzero(node.pages[number] != NULL) + node.start // group.block_tokens
                blocks = there.tolist()
            else:
                blocks = [at // group.block_tokens - 1 for at in sorted(node.snapshots)]
            self._emit(Kept(node.id, group.tag, tuple(blocks)))

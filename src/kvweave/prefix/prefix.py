"""The prefix cache: the tree, the books of who uses which node, and eviction in the order of a policy."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvweave.pool import Ids
from kvweave.prefix.events import Event
from kvweave.prefix.node import Node, Snapshots, Tokens
from kvweave.prefix.policy import Policy, Record
from kvweave.prefix.tree import Match, Range, Tree, TreeGroup

GiveBack = Callable[[int, Ids], int]
"""Hands pages of a group (by number) back to their pool; returns how many became free."""
GiveBackStates = Callable[[tuple[int, ...]], None]
"""Hands a snapshot back: a page of each group of states."""

LEAF, POINT, EXTRAS = 1, 2, 4
"""What of a node a queue's entry means: the end of its run, its resume point, or only its extras."""
Entry = tuple[Any, int, Node, int]
"""The policy's key, the order of arrival, the node, and what of it is meant."""

MOST_GROWN = 2048
"""A growing sequence's last run is lengthened in place up to so many tokens; beyond, a new one is begun."""


class Prefix:
    """Decides what stays. `cached[g]` counts the pages of group g in the tree, `locked[g]` those that cannot go now:

    pages of groups that see everything are locked from a running sequence's node up to the root; pages of windows and
    states only at the node on which it stands.
    """

    def __init__(
        self,
        groups: Sequence[TreeGroup],
        page_bytes: Sequence[int],
        give_back: GiveBack,
        give_back_states: GiveBackStates,
        policy: Policy,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        self.tree = Tree(groups, emit)
        self.policy = policy
        self.cached = [0] * len(groups)
        self.locked = [0] * len(groups)
        self.clock = 0
        self._page_bytes = page_bytes
        self._give_back = give_back
        self._give_back_states = give_back_states
        self._leaves: list[Entry] = []
        self._points: list[Entry] = []
        self._order = itertools.count()
        self._is_full = [group.sees_all for group in groups]
        self._sees_all = [number for number, group in enumerate(groups) if group.sees_all]

    # ---- using

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def pin(self, node: Node) -> None:
        """A running sequence stands on `node`: neither it nor what is above it may go."""
        node.uses += 1
        if node.uses == 1:
            self._lock(node, self.tree.trailing, 1)
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.pins += 1
            if at.pins == 1:
                self._lock(at, self._sees_all, 1)
            at = at.parent

    def unpin(self, node: Node) -> None:
        node.uses -= 1
        if node.uses == 0:
            self._lock(node, self.tree.trailing, -1)
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.pins -= 1
            if at.pins == 0:
                self._lock(at, self._sees_all, -1)
            at = at.parent
        if node.parent is not None:
            self.offer(node)

    def touch(self, node: Node, priority: int) -> None:
        """A prompt resumed at `node`: everything above it was used too."""
        node.hits += 1
        node.rolling = False
        now = self.tick()
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.last_used = now
            at.priority = max(at.priority, priority)
            at = at.parent

    def evictable(self, number: int) -> int:
        return self.cached[number] - self.locked[number]

    def _lock(self, node: Node, numbers: Sequence[int], sign: int) -> None:
        for number in numbers:
            self.locked[number] += sign * node.counts[number]

    def _enter(self, node: Node, sign: int) -> None:
        """Enter a node's pages into the books, or take them out."""
        for number, count in enumerate(node.counts):
            self._add(node, number, sign * count)

    def _add(self, node: Node, number: int, count: int) -> None:
        """So many more pages of a group are in a node."""
        self.cached[number] += count
        if node.pins if self._is_full[number] else node.uses:
            self.locked[number] += count

    # ---- growing

    def node_at(self, match: Match, position: int, root: Node) -> Node:
        """The node that ends at `position` on a matched path; a run that goes beyond is split there."""
        if position == 0:
            return root
        node = next(node for node in match.nodes if node.end >= position)
        return node if node.end == position else self.split(node, position)

    def split(self, node: Node, position: int) -> Node:
        upper = self.tree.split(node, position)
        if node.uses:  # whoever stands on it stands on its lower part
            self._lock(upper, self.tree.trailing, -1)
        self.offer(upper)
        return upper

    def insert(
        self, parent: Node, tokens: Tokens, pages: list[Ids], snapshots: Snapshots, *, extras: bool, priority: int
    ) -> Node:
        node = self.tree.insert(parent, tokens, pages, snapshots)
        node.extras, node.priority, node.last_used = extras, priority, self.tick()
        self._enter(node, 1)
        self.offer(node)
        return node

    def can_grow(self, node: Node) -> bool:
        """Whether a run may be lengthened in place: a sequence's own end that nobody else has touched."""
        return node.rolling and node.uses == 1 and not node.children and len(node.tokens) < MOST_GROWN

    def grow(self, node: Node, tokens: Tokens, pages: list[Ids], snapshots: Snapshots) -> None:
        """Lengthen a run; what windows and states have passed is dropped."""
        self._enter(node, -1)
        self.tree.grow(node, tokens, pages, snapshots)
        node.last_used = self.tick()
        self._enter(node, 1)
        self.drop_snapshots(node, but_end=True)
        for number in self.tree.windows:
            self.drop(node, number, self.tree.passed(node, number))

    def keep(self, node: Node, number: int, first: int, pages: Ids) -> Ids:
        """Fill gaps of a group; returns the pages that were not needed."""
        before = node.counts[number]
        rest = self.tree.keep(node, number, first, pages)
        self._add(node, number, node.counts[number] - before)
        return rest

    def keep_snapshots(self, node: Node, snapshots: Snapshots) -> None:
        """Fill gaps of states; what was not needed goes back."""
        before = len(node.snapshots)
        for pages in self.tree.keep_snapshots(node, snapshots):
            self._give_back_states(pages)
        for number in self.tree.states:
            self._add(node, number, len(node.snapshots) - before)

    def drop_snapshots(self, node: Node, but_end: bool) -> int:
        """Lose states of a run, but those at its end if they are to stay; returns how many snapshots went."""
        gone = self.tree.drop_snapshots(node, but_end)
        for pages in gone:
            self._give_back_states(pages)
        for number in self.tree.states:
            self._add(node, number, -len(gone))
        return len(gone)

    def drop(self, node: Node, number: int, blocks: Range) -> int:
        """Lose pages of one group of rows; returns how many became free."""
        gone = self.tree.drop(node, number, blocks)
        if not len(gone):
            return 0
        self._add(node, number, -len(gone))
        return self._give_back(number, gone)

    # ---- evicting

    def offer(self, node: Node) -> None:
        """A node that may be evictable now enters the queues in which it is not yet."""
        if not node.children and not node.pins and not node.queued & LEAF:
            self._push(self._leaves, node, LEAF)
        if self.tree.trailing and not node.uses:
            if not node.queued & POINT:
                self._push(self._points, node, POINT)
            if node.extras and not node.queued & EXTRAS:
                self._push(self._points, node, EXTRAS)

    def _push(self, queue: list[Entry], node: Node, what: int) -> None:
        if len(queue) > 2 * self.tree.num_nodes + 64:  # most of it is nodes that are gone
            queue[:] = [entry for entry in queue if entry[2].parent is not None]
            heapq.heapify(queue)
        node.queued |= what
        heapq.heappush(queue, (self._key(node, what), next(self._order), node, what))

    def _key(self, node: Node, what: int) -> Any:
        return self.policy(Record(node, self._page_bytes, what != EXTRAS))

    def evict(self, number: int, count: int) -> int:
        """Free at least `count` pages of a group, exactly as many where runs can be cut; returns how many became free.

        Groups that see everything lose the ends of leaves; windows and states lose resume points anywhere.
        """
        freed = 0
        heap = self._leaves if self.tree.groups[number].sees_all else self._points
        while freed < count and (entry := self._pop(heap)):
            node, what = entry
            if what == EXTRAS:
                freed += self._evict_extras(node, number)
            elif what == LEAF:
                freed += self._evict_leaf(node, number, count - freed)
            else:
                freed += self._evict_point(node, number)
        return freed

    def _pop(self, queue: list[Entry]) -> tuple[Node, int] | None:
        """The first entry of a queue that can go and whose key still holds."""
        while queue:
            key, _, node, what = heapq.heappop(queue)
            node.queued &= ~what
            if node.parent is None or (node.children or node.pins if what == LEAF else node.uses):
                continue
            if what == EXTRAS and not node.extras:
                continue
            if self._key(node, what) == key:
                return node, what
            self._push(queue, node, what)
        return None

    def _evict_extras(self, node: Node, number: int) -> int:
        """Drop what a run kept for positions on the way that nobody asked for."""
        node.extras = False
        freed = [0] * len(self.cached)
        self._note_states(freed, self.drop_snapshots(node, but_end=True))
        for window in self.tree.windows:
            freed[window] = self.drop(node, window, self.tree.extra(node, window))
        return freed[number]

    def _evict_leaf(self, node: Node, number: int, count: int) -> int:
        """Cut off the end of a leaf: just enough of it, where any block is a resume point, else all of it."""
        size = self.tree.groups[number].block_tokens
        tokens = -(-count * size // self.tree.grid) * self.tree.grid
        if self.tree.trailing or tokens >= len(node.tokens):
            return self._remove(node)[number]
        self._enter(node, -1)
        gone = self.tree.trim(node, node.end - tokens)
        self._enter(node, 1)
        self.offer(node)
        return [self._give_back(n, pages) for n, pages in enumerate(gone)][number]

    def _remove(self, node: Node) -> list[int]:
        """Take out a leaf, and the points above it that were kept for it alone."""
        freed = [0] * len(self.cached)
        parent: Node | None = node
        while parent is not None:
            node, parent = parent, parent.parent
            assert parent is not None, "a root is never removed"
            self._enter(node, -1)
            self.tree.remove(node)
            self._release(node, freed)
            if parent.parent is None or parent.pins or parent.children:
                break
            if self.tree.is_point(parent):
                self.offer(parent)
                break
        for number, more in enumerate(self._sweep(parent) if parent else ()):
            freed[number] += more
        return freed

    def _evict_point(self, node: Node, number: int) -> int:
        """Give up a resume point: its snapshots and its windows, but for what points below it need."""
        if not node.children and not node.pins:
            return self._remove(node)[number]
        freed = [0] * len(self.cached)
        self._drop_point(node, freed)
        parent = node.parent
        return freed[number] + (self._sweep(parent)[number] if parent is not None else 0)

    def _drop_point(self, node: Node, freed: list[int]) -> None:
        """Drop what nothing below a node needs; `freed` counts it."""
        self._note_states(freed, self.drop_snapshots(node, but_end=False))
        for window in self.tree.windows:
            freed[window] += self.drop(node, window, self.tree.unneeded(node, window))

    def _note_states(self, freed: list[int], count: int) -> None:
        for number in self.tree.states:
            freed[number] += count

    def _release(self, node: Node, freed: list[int]) -> None:
        """Give back all that a node has; `freed` counts it."""
        for number in self.tree.rows:
            freed[number] += self._give_back(number, node.pages[number])
        for pages in node.snapshots.values():
            self._give_back_states(pages)
        self._note_states(freed, len(node.snapshots))

    def _sweep(self, node: Node | None) -> list[int]:
        """Drop what dead points above kept only for a point that is gone now."""
        freed = [0] * len(self.cached)
        while node is not None and node.parent is not None and not node.uses and not self.tree.is_point(node):
            self._drop_point(node, freed)
            node = node.parent
        return freed

    def clear(self) -> None:
        """Forget everything; nothing may be pinned."""
        freed = [0] * len(self.cached)
        for node in self.tree.nodes():
            self._release(node, freed)
            node.parent = None
        self.tree.clear()
        self.cached = [0] * len(self.cached)
        self.locked = [0] * len(self.locked)
        self._leaves.clear()
        self._points.clear()

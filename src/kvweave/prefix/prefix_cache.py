"""The prefix cache: the tree of what was computed, who uses it, and what of it is evicted first.

What is kept are resume points. The pages of full groups between two points are needed by the lower one, the pages of a
window by the points whose [tail, position) they lie in, a state by its own point. So eviction gives up points: the last
point of a leaf with the run that leads to it (`_tips`), any other point with its states and the window pages that
only it needs (`_inner`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import numpy as np

from kvweave.pool import GroupPages, Ids, PagedGroup, PagePool
from kvweave.prefix.events import Event
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import Kind, Node, Point, StatePages, Tokens
from kvweave.prefix.orders import order_of
from kvweave.prefix.policy import Policy
from kvweave.prefix.tree import Match, PublishStanding, Tree

LONGEST_PATH = 32
"""A prompt that matched more nodes than so many has them joined where nothing keeps them apart."""
MOST_GROWN = 2048
"""A running sequence's last run is lengthened in place up to so many tokens; beyond, a new one is begun."""
NO_LIMIT = 2**62


class PrefixCache:
    """`num_cached[g]` counts the pages of group g in the tree; how many of them are evictable, their pool knows.

    A holder (a running sequence, a pin) stands on a node: the pages of full groups from there up to the root cannot
    be evicted. Window pages that its table names are its own as well; states are pinned until they were copied.
    """

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        pools: Sequence[PagePool | None],
        policy: str | Policy,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        self.tree = Tree(groups, emit)
        self.grid = self.tree.grid
        self.order = order_of(policy, self.tree.groups, self.grid)
        self.num_cached = [0] * len(groups)
        self.num_evicted = [0] * len(groups)
        """Pages that became free by eviction, by group."""
        self._clock = 0
        self._pools = list(pools)
        self._has_inner = bool(self.tree.windows or self.tree.states)
        self._full = [group for group in self.tree.full if group.has_pages]
        self._tips = [EvictionQueue(is_tips=True) for _ in range(self.order.num_queues)]
        self._inner = [EvictionQueue(is_tips=False) for _ in range(self.order.num_queues)]
        self._queues = [*self._tips, *self._inner]

    # ---- looking

    def match(self, namespace: Hashable, tokens: Tokens, publish: PublishStanding) -> Match:
        """The longest run of tokens in the tree; sequences that have more of them are published on the way."""
        match = self.tree.match(namespace, tokens, publish)
        if len(match.nodes) > LONGEST_PATH and self._join(match.nodes):
            match = self.tree.match(namespace, tokens)
        return match

    def _join(self, nodes: list[Node]) -> bool:
        """Join the runs of a path that neither a branch nor a holder keeps apart."""
        runs = [[nodes[0]]]
        for upper, node in pairwise(nodes):
            apart = len(upper.children) > 1 or upper.uses or upper.pins != node.pins
            if apart:
                runs.append([node])
            else:
                runs[-1].append(node)
        for run in runs:
            if len(run) > 1:
                self.tree.join(run)
                for point in run[-1].points:
                    self._requeue(point)
        return len(runs) < len(nodes)

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    # ---- holders

    def pin_at(self, match: Match, position: int, priority: int, *, with_states: bool) -> Point:
        """A holder stands at a position of a matched path, and may need the states there: the point at this position,
        the last one of its node. It is used now."""
        node = next(node for node in match.nodes if node.end >= position)
        point = node.point_at(position)
        if node.points:
            self.order.on_hit(point or node.points[-1], position, self._clock)
        if node.end > position:
            node = self.split(node, position)
        if point is None:
            point = self.add_point(node, position, Kind.BRANCH, (), priority)
        if not point.hits and not node.children:
            point.continued = True
        point.kind, point.cut = max(point.kind, Kind.BRANCH), False
        point.hits += 1
        self._use(point)
        point.priority = max(point.priority, priority)
        node.growing_tip = False
        node.uses += 1
        self._pin_path(node, None)
        if with_states:
            self._count_pin(point, 1)
        self._move(point, self._queues_of(point))
        self._requeue_spaced(node)
        return point

    def pin(self, node: Node) -> None:
        """A holder stands on `node`."""
        node.uses += 1
        self._pin_path(node, None)
        self._requeue_last(node)

    def move_pin(self, old: Node, new: Node) -> None:
        """A holder of `old` stands on `new` below it."""
        old.uses -= 1
        new.uses += 1
        self._pin_path(new, old)
        self._requeue_last(new)

    def _pin_path(self, node: Node, above: Node | None) -> None:
        at: Node | None = node
        newly = []
        while at is not above and at is not None:
            at.pins += 1
            if at.pins == 1 and at.parent is not None:
                newly.append(at)
            at = at.parent
        self._count_path(newly, -1)

    def unpin(self, node: Node) -> None:
        """A holder of `node` is gone."""
        node.uses -= 1
        at: Node | None = node
        free = []
        while at is not None:
            at.pins -= 1
            if at.pins == 0 and at.parent is not None:
                free.append(at)
            at = at.parent
        self._count_path(free, 1)
        self._requeue_last(node)
        self._settle(node, None)

    def _count_path(self, nodes: list[Node], sign: int) -> None:
        """The rows of some runs become evictable (1), or are needed (-1)."""
        if nodes:
            for group in self._full:
                pages = [node.pages[group.number] for node in nodes]
                self._pages(group).count_evictable(pages[0] if len(pages) == 1 else np.concatenate(pages), sign)

    def pin_states(self, point: Point, sign: int) -> None:
        """Somebody must find the states of a point unharmed (1), or needs them no more (-1)."""
        self._count_pin(point, sign)
        self._requeue(point)

    def _count_pin(self, point: Point, sign: int) -> None:
        point.pins += sign
        if point.pins == (1 if sign > 0 else 0):
            for group, page in zip(self.tree.states, point.states):
                if group.has_pages:
                    self._pages(group).count_evictable_one(page, -sign)

    # ---- growing

    def split(self, node: Node, position: int) -> Node:
        upper = self.tree.split(node, position)
        self._requeue_last(upper)
        self._requeue_spaced(node)
        return upper

    def insert(self, parent: Node, tokens: Tokens, pages: list[Ids]) -> Node:
        """A new run, which nobody holds yet."""
        node = self.tree.insert(parent, tokens, pages)
        self._count_rows(node, pages)
        self._requeue_last(parent)
        return node

    def can_grow(self, node: Node) -> bool:
        """Whether a run may be lengthened in place: a sequence's own end that nobody else has touched."""
        return node.growing_tip and node.uses == 1 and not node.children and len(node.tokens) < MOST_GROWN

    def grow(self, node: Node, tokens: Tokens, pages: list[Ids]) -> None:
        """Lengthen a run that its one holder stands on."""
        self.tree.grow(node, tokens, pages)
        self._count_rows(node, pages)

    def _count_rows(self, node: Node, pages: list[Ids]) -> None:
        """Pages that enter the tree with a run: those of full groups change their owner, windows' are held by both."""
        for group in self._full:
            self.num_cached[group.number] += len(pages[group.number])
            if not node.pins:
                self._pages(group).count_evictable(pages[group.number], 1)
        for group in self.tree.windows:
            self._enter_windows(group, pages[group.number])

    def fill(self, node: Node, group: PagedGroup, first: int, pages: Ids) -> None:
        """Put a window's pages into gaps of a run, from block `first` on; whose they were holds them too."""
        self._enter_windows(group, self.tree.fill(node, group, first, pages))

    def _enter_windows(self, group: PagedGroup, pages: Ids) -> None:
        if len(pages) and group.has_pages:
            self.num_cached[group.number] += self._pages(group).enter_cache(pages)

    def add_point(
        self, node: Node, position: int, kind: Kind, states: StatePages, priority: int, found: int = 0
    ) -> Point:
        """A resume point, whose window pages are in the tree already. Its states are the tree's from now on. `found`:
        tokens that the request which makes it had found."""
        point = self.tree.add_point(node, position, kind, states)
        self._use(point)
        point.priority, point.found = priority, found
        self._count_states(point, 1)
        self._requeue(point)
        if not node.pins and len(node.points) > 1:
            self._requeue(node.points[-2])
        return point

    def _use(self, point: Point) -> None:
        point.last_used, point.floor = self.tick(), self.order.floor

    def _count_states(self, point: Point, sign: int) -> None:
        if point.states:
            for group, page in zip(self.tree.states, point.states):
                if group.has_pages:
                    self.num_cached[group.number] += sign
                    self._pages(group).count_evictable_one(page, sign)

    # ---- queues

    def _requeue_last(self, node: Node) -> None:
        """A node's last point may be a leaf's now, or not any more."""
        if node.points:
            self._requeue(node.points[-1])

    def _requeue_spaced(self, node: Node) -> None:
        """The spaced points of a run go together: the first one stands for all of them."""
        first = node.first_spaced()
        if first is not None:
            self._requeue(first)

    def _requeue(self, point: Point) -> None:
        """Put a point among the others where it belongs now."""
        queues = self._queues_of(point)
        if point.queue is None or queues is None or point.queue.is_tips != queues[0].is_tips:
            self._move(point, queues)

    def _queues_of(self, point: Point) -> list[EvictionQueue] | None:
        node = point.node
        if point.pins:
            return None
        if not node.children and not node.pins and node.points[-1] is point:
            return self._tips
        is_inner = self._has_inner and (point.kind != Kind.SPACED or node.first_spaced() is point)
        return self._inner if is_inner else None

    def _is_tip(self, point: Point) -> bool:
        """Whether it waits as the end of a leaf."""
        return point.queue is not None and point.queue.is_tips

    def _move(self, point: Point, queues: list[EvictionQueue] | None) -> None:
        if point.queue is not None:
            point.queue.remove(point)
        if queues is not None:
            point.queued, point.weight = self._clock, 0.0
            number, key = self.order.place(point, queues is self._tips, self._clock)
            queues[number].add(point, key)

    # ---- evicting

    def evict(self, group: PagedGroup, count: int) -> None:
        """Free `count` pages of a group in the policy's order, or all that can be; no more where runs can be cut."""
        goal = self.num_evicted[group.number] + count
        while (lacking := goal - self.num_evicted[group.number]) > 0:
            point = self._next(only_tips=group.is_full)
            if point is None:
                return
            tokens = self.grid if group.is_state else -(-lacking * group.slot_tokens // self.grid) * self.grid
            self._evict(point, tokens)

    def evict_next(self, tokens: int) -> bool:
        """Evict the point that the policy values least, whatever its pages, and cut a run by so many tokens at least;
        False when there is none."""
        point = self._next(only_tips=False)
        if point is not None:
            self._evict(point, tokens)
        return point is not None

    def _next(self, only_tips: bool) -> Point | None:
        return self.order.choose(self._tips if only_tips else self._queues, self._clock)

    def _evict(self, point: Point, tokens: int) -> None:
        """Give up a point, and of a leaf at least its last `tokens` tokens."""
        self.order.on_evict(point, self._clock)
        if not point.queue.is_tips:
            if point.kind == Kind.SPACED:
                self._drop_spaced(point.node)
            else:
                self.drop_point(point)
            return
        node = point.node
        parent = node.parent
        if not self._shorten(node, self._last_before(point, max(node.start, point.position - tokens)), point):
            assert parent is not None, "a root has no points"
            self._settle(parent, point)

    def _last_before(self, point: Point, limit: int) -> int:
        """The last position up to `limit` in the run of its last point from which every group could go on; its start if
        there is none.

        A window has the pages of [tail(point), point) of its points, no others. So there is none between the last two
        points, unless these ranges meet, or the tail does not move.
        """
        node = point.node
        above = node.points[-2].position if len(node.points) > 1 else node.start
        for group in self.tree.windows:
            first = group.first_block(point.position)
            moves = group.needs_last_block and group.has_pages and group.first_block(limit) < first
            if moves and above <= limit and above // group.slot_tokens < first:
                return above
        return self.tree.last_resumable(self.tree.path_of(node), limit, node.start)

    def _drop_spaced(self, node: Node) -> None:
        """Give up the points of a run that nobody has asked for, and the window pages that only they need."""
        spaced = [point for point in node.points if point.kind == Kind.SPACED and not self._is_tip(point)]
        for point in spaced:
            self._forget(point)
        for group in self.tree.windows:
            if group.has_pages:
                at = group.head_blocks
                for point in node.points:
                    self._free_window(node, group, at, group.first_block(point.position))
                    at = max(at, point.position // group.slot_tokens)
                self._free_window(node, group, at, min(self._needed_below(node, group), node.end // group.slot_tokens))
        if self._reaches_above(spaced[0], node):
            self._free_windows(spaced[0])

    def drop_point(self, point: Point) -> None:
        """Give up a point that others lie behind, or that a holder stands at: its states, and what only it needs."""
        self._forget(point)
        self._free_windows(point)

    def _reaches_above(self, point: Point, node: Node) -> bool:
        """Whether a point of a run needs window pages of runs above it."""
        for group in self.tree.windows:
            if group.head_blocks or group.first_block(point.position) * group.slot_tokens < node.start:
                return True
        return False

    def _free_windows(self, point: Point) -> None:
        """Free the window pages that a point, gone from its node, needed and no other point does."""
        for group in self.tree.windows:
            if group.has_pages:
                self._free_exclusive(point, group)
                if group.head_blocks:
                    self._free_heads(point.node, group)

    def _forget(self, point: Point) -> None:
        """Take a point out of its node and free its states."""
        if point.queue is not None:
            point.queue.remove(point)
        if point.states:
            self._count_states(point, -1)
            for group, page in zip(self.tree.states, point.states):
                if group.has_pages:
                    self._pool(group).free_one(group.tag, page)
                    self.num_evicted[group.number] += 1
        self.tree.remove_point(point)

    def _free_exclusive(self, point: Point, group: PagedGroup) -> None:
        """Those of one group, the head apart.

        Tails never come back, so a point above needs every page from this one's tail up to itself, and the points
        below need every page from the lowest of their tails on.
        """
        first, last = group.first_block(point.position), point.position // group.slot_tokens
        node: Node | None = point.node
        while node is not None and node.parent is not None:
            above = below = None
            for other in node.points:
                if other.position < point.position:
                    above = other
                elif below is None:
                    below = other
            low = first if above is None else max(first, above.position // group.slot_tokens)
            needed = group.first_block(below.position) if below is not None else self._needed_below(node, group)
            self._free_window(node, group, max(low, node.start // group.slot_tokens), min(last, needed))
            if above is not None or first >= node.start // group.slot_tokens:
                return
            node, last = node.parent, node.start // group.slot_tokens

    def _needed_below(self, node: Node, group: PagedGroup) -> int:
        """The first block of a window that points below a node need."""
        first, end = NO_LIMIT, node.end // group.slot_tokens
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            if child.points:
                first = min(first, group.first_block(child.points[0].position))
            elif group.first_block(child.end) < end:
                stack.extend(child.children.values())
        return first

    def _free_heads(self, node: Node, group: PagedGroup) -> None:
        """Free the parts of a head that no point at or below a run, or above it, needs any more."""
        for at in reversed(node.path()):
            needed = self._head_needed(at, group)
            self._free_window(at, group, needed, group.head_blocks)
            if needed > at.start // group.slot_tokens:
                return

    def _head_needed(self, node: Node, group: PagedGroup) -> int:
        """How many blocks of a head the points at or below a node need."""
        needed, stack = 0, [node]
        while stack and needed < group.head_blocks:
            at = stack.pop()
            if at.points:
                needed = max(needed, min(group.head_blocks, at.points[-1].position // group.slot_tokens))
            stack.extend(at.children.values())
        return needed

    def _free_window(self, node: Node, group: PagedGroup, first: int, last: int) -> None:
        start = node.start // group.slot_tokens
        if last > max(first, start):
            self._leave_windows(group, self.tree.drop(node, group, max(0, first - start), last - start))

    def _leave_windows(self, group: PagedGroup, pages: Ids) -> None:
        if len(pages) and group.has_pages:
            gone, num_left = self._pages(group).leave_cache(pages)
            self.num_cached[group.number] -= num_left
            self._pool(group).free(group.tag, gone)
            self.num_evicted[group.number] += len(gone)

    # ---- leaves end at a point

    def _settle(self, node: Node, heir: Point | None) -> None:
        """A leaf that nobody holds ends at its last resumable position; one without any is gone, and so on upwards."""
        while not node.pins and not node.children:
            parent = node.parent
            if parent is None:
                if self.tree.roots.get(node.namespace) is node:
                    self.tree.remove(node)
                return
            if heir is None and node.points and node.points[-1].position == node.end:
                break
            bare = self._is_bare(node)
            end = node.start if bare else self.tree.last_resumable(self.tree.path_of(node), node.end, node.start)
            if self._shorten(node, end, heir):
                return
            node = parent
        self._requeue_last(node)

    def _is_bare(self, node: Node) -> bool:
        """Whether nothing in a run is resumable, since a window has no page there: chains of such runs go quickly."""
        return not node.points and any(
            group.needs_last_block and not np.count_nonzero(node.pages[group.number])
            for group in self.tree.windows
            if group.has_pages
        )

    def _shorten(self, node: Node, end: int, heir: Point | None) -> bool:
        """Cut a leaf to `end`, which is resumable, or take it out where that is its start; whether it is still there.

        Who evicts a point passes it on as `heir`: what is left was used as recently, and is as important.
        """
        lowest, is_evicted = None, heir is not None
        while node.points and node.points[-1].position > end:
            lowest = node.points[-1]
            heir = heir or lowest
            self._forget(lowest)
        if end == node.start:
            if lowest is not None and self._reaches_above(lowest, node):
                self._free_windows(lowest)
            self._free_rows(node.pages)
            self.tree.remove(node)
            node.parent = None
            return False
        if end < node.end:
            self._free_rows(self.tree.trim(node, end))
        point = node.point_at(end)
        if point is None:
            point = self.add_point(node, end, heir.kind if heir else Kind.ANSWER, (), 0)
            if heir is not None:
                point.last_used, point.floor = heir.last_used, heir.floor
                point.found, point.continued, point.cut = heir.found, heir.continued, is_evicted
        if heir is not None:
            point.last_used, point.floor = max(point.last_used, heir.last_used), max(point.floor, heir.floor)
            point.priority, point.hits = max(point.priority, heir.priority), max(point.hits, heir.hits)
        self._move(point, self._tips)
        return True

    def _free_rows(self, pages: list[Ids]) -> None:
        """Pages of a run that nobody holds leave the tree."""
        for group in self._full:
            gone = pages[group.number]
            self._pages(group).count_evictable(gone, -1)
            self.num_cached[group.number] -= len(gone)
            self._pool(group).free(group.tag, gone)
            self.num_evicted[group.number] += len(gone)
        for group in self.tree.windows:
            self._leave_windows(group, pages[group.number])

    def clear(self) -> None:
        """Forget everything; nobody may hold anything."""
        while self.evict_next(NO_LIMIT):
            pass
        assert not any(self.num_cached), f"{self.num_cached} pages are left in an empty tree"
        self.tree.clear()

    # ---- small things

    def _pool(self, group: PagedGroup) -> PagePool:
        pool = self._pools[group.number]
        assert pool is not None, f"group {group.tag} has no pages here"
        return pool

    def _pages(self, group: PagedGroup) -> GroupPages:
        return self._pool(group).groups[group.tag]

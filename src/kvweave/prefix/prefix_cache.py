"""The prefix cache: the tree of what was computed, who uses it, and what of it is evicted first.

What is kept are resume points. The pages of full groups between two points are needed by the lower one, the pages of a
window by the points whose [tail, position) they lie in, a state by its own point. So eviction gives up points: the last
point of a leaf with the run that leads to it, any other point with its states and the window pages that only it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np

from kvweave.pool import GroupPages, Ids, PagedGroup
from kvweave.prefix.events import Event
from kvweave.prefix.node import Kind, Node, Point, StatePages, Tokens
from kvweave.prefix.order import Order
from kvweave.prefix.point_queues import PointQueues
from kvweave.prefix.retention import NEVER
from kvweave.prefix.tree import Match, PublishRunning, Tree
from kvweave.prefix.window_pages import WindowPages

LONGEST_PATH: Final = 32
"""A prompt that matched more nodes than so many has them joined where nothing keeps them apart."""
FEW: Final = 64
"""More new points of a run than so many enter the tree together: their window pages are counted once."""


class PrefixCache:
    """How many pages are in the tree, and how many of them are evictable, their `GroupPages` know.

    A holder (a running sequence, a pin) is at a node: the pages of full groups from there up to the root cannot be
    evicted. Window pages that its table references cannot be either; states are pinned until they were copied.
    """

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        pages: Sequence[GroupPages],
        order: Order,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        self.tree = Tree(groups, emit)
        self.grid = self.tree.grid
        self.order = order
        self.has_evicted = False
        """Whether something had to go since it was last empty."""
        self.windows = WindowPages(self.tree, pages)
        self.queues = PointQueues(self.tree, pages, self.windows, order)
        self._pages = list(pages)
        self._full = [group for group in self.tree.full if group.has_pages]

    # ---- looking

    def match(self, namespace: Hashable, tokens: Tokens, publish: PublishRunning) -> Match:
        """The longest run of tokens in the tree; sequences that have more of them are published on the way."""
        match = self.tree.match(namespace, tokens, publish)
        if match.node is not None and match.num_nodes > LONGEST_PATH and self._join(match.node):
            match = self.tree.match(namespace, tokens)
        return match

    def _join(self, node: Node) -> bool:
        """Join runs on the path to a node that neither a branch nor a holder keeps apart; whether there are any."""
        run, joined = [node], False  # from the lowest node up
        while (upper := node.parent) is not None:
            if len(upper.children) > 1 or upper.uses or upper.pins != node.pins or upper.parent is None:
                if len(run) > 1:
                    self.tree.join(run[::-1])
                    run, joined = [upper], True
                run[0] = upper
            else:
                run.append(upper)
            node = upper
        return joined

    # ---- holders

    def pin_at(self, match: Match, position: int, priority: int, *, with_states: bool) -> Point:
        """A holder comes to a position of a matched path, and may need the states there: the point at this position,
        the last one of its node. It is used now; `requeue` it when the holder's tables reference what they need."""
        node = match.node
        while node is not None and node.start >= position:
            node = node.parent
        assert node is not None, "what is pinned was matched"
        point = node.point_at(position)
        if node.points:
            self.order.on_hit(point or node.points[-1], position, self.queues.clock)
        if node.end > position:
            node = self.split(node, position)
        if point is None:
            point = Point(node, position, Kind.BRANCH, ())
            self._add([point], is_queued=False)
        if not point.hits and not node.children:
            point.continued = True
        point.kind, point.cut = max(point.kind, Kind.BRANCH), False
        point.hits += 1
        self.queues.use(point)
        point.priority = max(point.priority, priority)
        node.uses += 1
        self._count_holder(node, None, 1)
        if with_states:
            self._count_pin(point, 1)
        self.queues.remove(point)
        return point

    def pin(self, node: Node, above: Node | None = None) -> None:
        """A holder comes to `node`, from `above` if that is given."""
        if above is not None:
            above.uses -= 1
        node.uses += 1
        self._count_holder(node, above, 1)
        self.queues.requeue_last(node)

    def unpin(self, node: Node) -> None:
        """A holder of `node` is gone."""
        node.uses -= 1
        self._count_holder(node, None, -1)
        self.queues.requeue_last(node)
        self.queues.requeue_held(node)
        self._settle(node, None)

    def _count_holder(self, node: Node, above: Node | None, sign: int) -> None:
        """From `node` up to below `above` there is one holder more (1) or less (-1): pages of full groups are needed
        from the first one on, and are evictable after the last."""
        at: Node | None = node
        changed = []
        while at is not above and at is not None:
            at.pins += sign
            if at.pins == (1 if sign > 0 else 0) and at.parent is not None:
                changed.append(at)
            at = at.parent
        for group in self._full if changed else ():
            self._pages[group.number].count_evictable([node.pages[group.number] for node in changed], -sign)

    def pin_states(self, point: Point, sign: int) -> None:
        """Somebody must find the states of a point unharmed (1), or needs them no more (-1)."""
        self._count_pin(point, sign)
        self.queues.requeue(point)

    def _count_pin(self, point: Point, sign: int) -> None:
        point.pins += sign
        if point.pins == (1 if sign > 0 else 0):
            for group, page in zip(self.tree.states, point.states):
                self._pages[group.number].count_evictable_one(page, -sign)

    # ---- growing

    def split(self, node: Node, position: int) -> Node:
        upper = self.tree.split(node, position)
        self.queues.requeue_spaced(node)
        return upper

    def add_run(self, above: Node, tokens: Tokens, pages: list[Ids]) -> Node:
        """A run behind the node of a holder, which moves to its end; its pages are the tree's from now on."""
        node = self.tree.insert(above, tokens, pages)
        above.uses -= 1
        node.uses = node.pins = 1
        for group in self._full:
            self._pages[group.number].num_cached += len(pages[group.number])
        return node

    def add_points(self, points: list[Point], held: Sequence[Ids]) -> list[Point]:
        """New resume points of one run, ascending. Their states are the tree's from now on, and so are window pages of
        `held` (by group and block) that the tree lacks. Returns those for which there are not all pages, left out."""
        if len(points) > FEW and self._add(points, held):
            return []
        return [point for point in points if not self._add([point], held)]

    def _add(self, points: list[Point], held: Sequence[Ids] = (), is_queued: bool = True) -> bool:
        """Add a point, or several ones between which there is no gap; False, and nothing done, where that cannot be."""
        if self.windows.groups and not self.windows.hold(points, held):
            return False
        for point in points:
            self.tree.add_point(point)
            self.queues.use(point)
            for group, page in zip(self.tree.states, point.states):
                self._pages[group.number].cache_one(page)
            if is_queued:
                self.queues.requeue(point)
        return True

    # ---- evicting

    def evict(self, group: PagedGroup, count: int, most: int = NEVER) -> None:
        """Free `count` pages of a group in the policy's order, by evicting no more than so many points; no more pages
        where runs can be cut."""
        pages = self._pages[group.number]
        goal = pages.num_evicted + count
        for _ in range(most):
            lacking = goal - pages.num_evicted
            tokens = self.grid if group.is_state else -(-lacking * group.slot_tokens // self.grid) * self.grid
            if lacking <= 0 or not self.evict_next(tokens, group.is_full):
                return

    def evict_next(self, tokens: int, from_leaf: bool = False) -> bool:
        """Evict the point that the policy values least, whatever its pages, or the least of those that end a leaf, and
        cut a run by so many tokens at least; False when there is none."""
        point = self.queues.choose(only_tips=from_leaf)
        if point is not None:
            self._evict(point, tokens)
        return point is not None

    def _evict(self, point: Point, tokens: int) -> None:
        """Give up a point, and of a leaf at least its last `tokens` tokens."""
        self.has_evicted = True
        self.order.on_evict(point, self.queues.clock)
        if not point.queue.is_tips:
            if point.kind == Kind.SPACED:
                self._drop_spaced(point)
            else:
                self.drop_point(point)
            return
        node = point.node
        parent = node.parent
        start = self._last_before(point, max(self._asked_above(point), point.position - tokens))
        self.order.on_cut(point, node, start, self.queues.clock)
        if not self._shorten(node, start, point):
            assert parent is not None, "a root has no points"
            self._settle(parent, point)

    def _asked_above(self, tip: Point) -> int:
        """The last point of a leaf above its tip that is not spaced, or the start of its run: the policy values this
        point by itself, so it does not go with the tip."""
        node = tip.node
        for point in reversed(node.points):
            if point is not tip and point.kind != Kind.SPACED:
                return point.position
        return node.start

    def _last_before(self, point: Point, limit: int) -> int:
        """The last position up to `limit` in the run of its last point from which every group could go on; its start if
        there is none.

        A window has the pages of [tail(point), point) of its points, no others. So there is none between the last two
        points, unless these ranges meet, or the tail does not move.
        """
        node = point.node
        above = node.points[-2].position if len(node.points) > 1 else node.start
        for group in self.windows.groups:
            first = group.first_block(point.position)
            moves = group.needs_last_block and group.first_block(limit) < first
            if moves and above <= limit and above // group.slot_tokens < first:
                return above
        return self.tree.last_resumable(node, limit, node.start)

    def _drop_spaced(self, first: Point) -> None:
        """Evict the spaced points of a run, but those whose pages tables reference."""
        node = first.node
        for point in list(node.points):
            if point.kind == Kind.SPACED and (point is first or not self.queues.is_kept(point)):
                self.drop_point(point)
        self.queues.requeue_spaced(node)

    def drop_point(self, point: Point) -> None:
        """Give up a point: its states, and the window pages that no other point needs."""
        self.queues.remove(point)
        for group, page in zip(self.tree.states, point.states):
            self._pages[group.number].evict_one(page)
        self.windows.release(point)
        self.tree.remove_point(point)

    def drop_replaced(self, point: Point) -> None:
        """Give up a point that a later one of the same sequence replaces: what it frees does not count as evicted."""
        before = [pages.num_evicted for pages in self._pages]
        self.drop_point(point)
        for pages, count in zip(self._pages, before):
            pages.num_evicted = count

    def take_states(self, point: Point) -> StatePages:
        """The only one who has pinned the states of a point takes them, and the point is given up."""
        assert point.pins == 1, f"{point.pins} need the states of the point"
        for group in self.tree.states:
            self._pages[group.number].num_cached -= int(group.has_pages)
        self.windows.release(point)
        self.tree.remove_point(point)
        return point.states

    # ---- leaves end at a point

    def _settle(self, node: Node, replaced: Point | None) -> None:
        """A leaf that nobody holds ends at its last resumable position; one without any is gone, and so on upwards."""
        while not node.pins and not node.children:
            parent = node.parent
            if parent is None:
                if self.tree.roots.get(node.namespace) is node:
                    self.tree.remove(node)
                return
            if replaced is None and node.points and node.points[-1].position == node.end:
                break
            # where a window has no page, nothing is resumable: chains of such runs go quickly
            moving = [node.pages[g.number] for g in self.windows.groups if g.needs_last_block and not node.points]
            is_bare = not all(map(np.count_nonzero, moving))
            end = node.start if is_bare else self.tree.last_resumable(node, node.end, node.start)
            if replaced is not None and end < node.end:
                self.order.on_cut(replaced, node, end, self.queues.clock)
            if self._shorten(node, end, replaced):
                return
            node = parent
        self.queues.requeue_last(node)

    def _shorten(self, node: Node, end: int, replaced: Point | None) -> bool:
        """Cut a leaf to `end`, which is resumable, or take it out where that is its start; whether it is still there.

        `replaced` is the point that is evicted, if one is: the new last point inherits its recency and priority.
        """
        is_evicted = replaced is not None
        beyond = [point for point in node.points if point.position > end]
        if replaced is None and beyond:
            replaced = beyond[-1]
        point = None
        if end > node.start:  # it needs window pages of those beyond, and comes before they go
            point = node.point_at(end) or self._successor(node, end, replaced, is_evicted)
        for gone in reversed(beyond):
            self.drop_point(gone)
        if point is None:
            self._free_rows(node.pages)
            self.tree.remove(node)
            node.parent = None
            return False
        if end < node.end:
            self._free_rows(self.tree.trim(node, end))
        if replaced is not None:
            point.last_used, point.floor = max(point.last_used, replaced.last_used), max(point.floor, replaced.floor)
            point.priority, point.hits = max(point.priority, replaced.priority), max(point.hits, replaced.hits)
        self.queues.move_to_tips(point)
        return True

    def _successor(self, node: Node, position: int, replaced: Point | None, is_evicted: bool) -> Point:
        """A new point for one that goes, or is evicted."""
        point = Point(node, position, Kind.ANSWER if replaced is None else replaced.kind, ())
        self._add([point], is_queued=False)
        if replaced is not None:
            point.last_used, point.floor = replaced.last_used, replaced.floor
            point.found, point.continued, point.cut = replaced.found, replaced.continued, is_evicted
        return point

    def _free_rows(self, pages: list[Ids]) -> None:
        """Pages of full groups, which nobody holds, leave the tree with a run."""
        for group in self._full:
            self._pages[group.number].evict(pages[group.number])

    def clear(self) -> None:
        """Forget everything; nobody may hold anything."""
        while self.evict_next(NEVER):
            pass
        left = {pages.group.tag: pages.num_cached for pages in self._pages if pages.num_cached}
        assert not left, f"pages are left in an empty tree: {left}"
        self.tree.clear()
        self.has_evicted = False

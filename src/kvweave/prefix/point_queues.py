"""Which resume points wait for eviction: the ends of leaves (`tips`) apart from all others (`inner`), in the policy's
order.

A point is in one queue at most. It is in none while somebody needs its states, and set aside (`held_points`) while
block tables reference the window pages that its eviction would free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvweave.pool import GroupPages
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.held_points import MOST_AT_ONCE, NOT_HELD, QUEUED_ANYWAY, HeldPoints
from kvweave.prefix.node import Kind, Node, Point
from kvweave.prefix.order import Order
from kvweave.prefix.tree import Tree
from kvweave.prefix.window_pages import WindowPages


class PointQueues:
    """`clock` counts the prompts that were opened and the uses of points."""

    def __init__(self, tree: Tree, pages: Sequence[GroupPages], windows: WindowPages, order: Order) -> None:
        self.clock = 0
        self._order = order
        self._pages = pages
        self._windows = windows
        self._has_inner = bool(tree.windows or tree.states)
        self._tips = [EvictionQueue(is_tips=True) for _ in range(order.num_queues)]
        self._inner = [EvictionQueue(is_tips=False) for _ in range(order.num_queues)]
        self._all = order.queues = [*self._tips, *self._inner]
        self._held = self._held_points(tree)

    def _held_points(self, tree: Tree) -> HeldPoints | None:
        """States can be evicted whatever tables reference: where they are most of a point, no point is held."""
        windows = self._windows.groups
        state_bytes = sum(group.page_bytes for group in tree.states if group.has_pages)
        window_bytes = sum(group.page_bytes * (group.reach.span or 0) // group.slot_tokens for group in windows)
        moving = [group for group in windows if group.needs_last_block]
        if not moving or state_bytes >= window_bytes:
            return None
        return HeldPoints(self._pages[min(moving, key=lambda group: group.reach.span or 0).number])

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def use(self, point: Point) -> None:
        """A point is used now."""
        point.last_used, point.floor = self.tick(), self._order.floor

    # ---- where a point waits

    def requeue(self, point: Point) -> None:
        """Move a point to the queue where it belongs now, if any."""
        queues = self._queues_of(point)
        if point.queue is None or queues is None or point.queue.is_tips != queues[0].is_tips:
            self._move(point, queues)

    def requeue_last(self, node: Node) -> None:
        """A node's last point may be a leaf's now, or not any more."""
        if node.points:
            self.requeue(node.points[-1])

    def requeue_spaced(self, node: Node) -> None:
        """The spaced points of a run go together: the first one stands for all of them."""
        first = node.first_spaced()
        if first is not None:
            self.requeue(first)

    def requeue_held(self, node: Node) -> None:
        """A node, and those above it, may have lost their last holder: their points are not held then."""
        at: Node | None = node
        while self._held is not None and at is not None and not at.pins:
            for point in at.points:
                if point.held >= 0:
                    self.requeue(point)
            at = at.parent

    def move_to_tips(self, point: Point) -> None:
        """A point ends a leaf now, and its key has changed."""
        self._move(point, self._tips)

    def remove(self, point: Point) -> None:
        """A point waits no more."""
        queue: EvictionQueue | None = point.queue
        if queue is not None:
            queue.remove(point)
            point.held = NOT_HELD
        elif self._held is not None and point.held >= 0:
            self._held.remove(point)

    def is_kept(self, point: Point) -> bool:
        """Whether a spaced point stays when the others of its run go: it ends a leaf, or is held."""
        if point.queue is not None:
            return bool(point.queue.is_tips)
        return self._held is not None and self._held.holds(point)

    def _queues_of(self, point: Point) -> list[EvictionQueue] | None:
        node = point.node
        if point.pins:
            return None
        if not node.children and not node.pins and node.points[-1] is point:
            return self._tips
        is_inner = self._has_inner and (point.kind != Kind.SPACED or node.first_spaced() is point)
        return self._inner if is_inner else None

    def _move(self, point: Point, queues: list[EvictionQueue] | None) -> None:
        self.remove(point)
        if self._held is not None and queues is self._inner and self._held.holds(point):
            self._held.add(point)
        elif queues is not None:
            self._enqueue(point, queues)

    def _enqueue(self, point: Point, queues: list[EvictionQueue]) -> None:
        point.queued, point.weight = self.clock, 0.0
        number, key = self._order.place(point, queues is self._tips, self.clock)
        queues[number].add(point, key)

    # ---- which point is evicted next

    def choose(self, only_tips: bool) -> Point | None:
        """The point that the policy values least, of all or of those that end a leaf; one whose pages tables reference
        is held instead."""
        held, queues = self._held, self._tips if only_tips else self._all
        if held is None or only_tips:
            return self._order.choose(queues, self.clock)
        self._queue_unheld(held.poll())
        while True:
            point = self._order.choose(queues, self.clock)
            if point is None:
                if not self._queue_unheld(held.unheld()) and not self._queue_held(held):
                    return None
            elif point.queue.is_tips or not held.holds(point):
                return point
            else:
                self._move(point, self._inner)

    def _queue_unheld(self, points: list[Point]) -> bool:
        """Points that are held no longer are queued; whether there are any."""
        for point in points:
            self._move(point, self._inner)
        return bool(points)

    def _queue_held(self, held: HeldPoints) -> bool:
        """Where no others are left, held points are queued that have anything to give; whether there are any."""
        if not any(pages.num_evictable for pages in self._pages if not pages.group.is_full):
            return False
        some = list(islice((p for p in held.points if p.states or self._windows.has_evictable(p)), MOST_AT_ONCE))
        for point in some:
            self.remove(point)
            self._enqueue(point, self._inner)
            point.held = QUEUED_ANYWAY
        return bool(some)

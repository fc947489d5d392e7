"""The prefix cache: the tree of what was computed, who uses it, and what of it is evicted first.

What is kept are resume points. The pages of full groups between two points are needed by the lower one, the pages of a
window by the points whose [tail, position) they lie in, a state by its own point. So eviction gives up points: the last
point of a leaf with the run that leads to it (`_tips`), any other point with its states and the window pages that
only it needs (`_inner`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice

import numpy as np

from kvweave.pool import NULL, GroupPages, Ids, PagedGroup
from kvweave.prefix.events import Event
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.held_points import MOST_AT_ONCE, NOT_HELD, QUEUED_ANYWAY, HeldPoints
from kvweave.prefix.node import Kind, Node, Point, StatePages, Tokens
from kvweave.prefix.order import Order
from kvweave.prefix.retention import NEVER
from kvweave.prefix.tree import Match, PageRun, PublishRunning, Tree

LONGEST_PATH = 32
"""A prompt that matched more nodes than so many has them joined where nothing keeps them apart."""
FEW = 64
"""More new points of a run than so many enter the tree together: their window pages are counted once."""
MOST_SHIELDED = 4
"""A point shields so many others at most: when it goes, each of them is looked at."""


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
        self._clock = 0
        self._pages = list(pages)
        self._has_inner = bool(self.tree.windows or self.tree.states)
        self._full = [group for group in self.tree.full if group.has_pages]
        self._windows = [group for group in self.tree.windows if group.has_pages]
        self._tips = [EvictionQueue(is_tips=True) for _ in range(self.order.num_queues)]
        self._inner = [EvictionQueue(is_tips=False) for _ in range(self.order.num_queues)]
        self._queues = [*self._tips, *self._inner]
        self._held = self._held_points()

    def _held_points(self) -> HeldPoints | None:
        """States can be evicted whatever tables reference: where they are most of a point, no point is held."""
        state_bytes = sum(group.page_bytes for group in self.tree.states if group.has_pages)
        window_bytes = sum(group.page_bytes * (group.reach.span or 0) // group.slot_tokens for group in self._windows)
        moving = [group for group in self._windows if group.needs_last_block]
        if not moving or state_bytes >= window_bytes:
            return None
        return HeldPoints(self._pages[min(moving, key=lambda group: group.reach.span or 0).number])

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

    def tick(self) -> int:
        self._clock += 1
        return self._clock

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
            self.order.on_hit(point or node.points[-1], position, self._clock)
        if node.end > position:
            node = self.split(node, position)
        if point is None:
            point = Point(node, position, Kind.BRANCH, ())
            self._add([point], is_queued=False)
        if not point.hits and not node.children:
            point.continued = True
        point.kind, point.cut = max(point.kind, Kind.BRANCH), False
        point.hits += 1
        point.last_used, point.floor = self.tick(), self.order.floor
        point.priority = max(point.priority, priority)
        node.uses += 1
        self._count_holder(node, None, 1)
        if with_states:
            self._count_pin(point, 1)
        self._dequeue(point)
        return point

    def pin(self, node: Node, above: Node | None = None) -> None:
        """A holder comes to `node`, from `above` if that is given."""
        if above is not None:
            above.uses -= 1
        node.uses += 1
        self._count_holder(node, above, 1)
        self._requeue_last(node)

    def unpin(self, node: Node) -> None:
        """A holder of `node` is gone."""
        node.uses -= 1
        self._count_holder(node, None, -1)
        self._requeue_last(node)
        self._requeue_held(node)
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
        self.requeue(point)

    def _count_pin(self, point: Point, sign: int) -> None:
        point.pins += sign
        if point.pins == (1 if sign > 0 else 0):
            for group, page in zip(self.tree.states, point.states):
                self._pages[group.number].count_evictable_one(page, -sign)

    # ---- growing

    def split(self, node: Node, position: int) -> Node:
        upper = self.tree.split(node, position)
        self._requeue_spaced(node)
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

    def window_runs(self, node: Node, position: int, start: int = 0, stop: int = NEVER) -> list[PageRun]:
        """The window pages, heads included, that going on from a position needs of the tokens [start, stop) on the path
        down to `node`."""
        runs = list[PageRun]()
        for group in self._windows:
            low, end = start // group.slot_tokens, min(position, stop) // group.slot_tokens
            first = min(group.first_block(position), end)
            runs += self.tree.runs(group, node, max(first, low), end)
            runs += self.tree.runs(group, node, low, min(group.head_blocks, first))
        return runs

    def _add(self, points: list[Point], held: Sequence[Ids] = (), is_queued: bool = True) -> bool:
        """Add a point, or several ones between which there is no gap; False, and nothing done, where that cannot be."""
        node, first, last = points[0].node, points[0].position, points[-1].position
        above, runs = node.last_point(last) if self._windows else None, list[PageRun]()
        if self._windows:
            for group in self._windows if last > first else ():
                at = np.array([point.position for point in points])
                has_gaps = (group.first_blocks(at[1:]) > at[:-1] // group.slot_tokens).any()
                if has_gaps or (above is not None and above.position > first):
                    return False
                runs += self.tree.runs(group, node, first // group.slot_tokens, last // group.slot_tokens)
            above = above if above is not None and len(above.shielded) < MOST_SHIELDED else None
            runs += self.window_runs(node, first, 0 if above is None else above.position)
            if held and not self._fill(runs, held):
                return False
        for run in runs:
            self._pages[run.group.number].enter_cache(run.pages)
        for point in points:
            self.tree.add_point(point)
            if self._windows:
                _shield(above, point)
                above = point
            point.last_used, point.floor = self.tick(), self.order.floor
            for group, page in zip(self.tree.states, point.states):
                self._pages[group.number].cache_one(page)
            if is_queued:
                self.requeue(point)
        return True

    def _fill(self, runs: list[PageRun], held: Sequence[Ids]) -> bool:
        """Fill the gaps of window runs with held pages; False, and nothing done, where some are nowhere."""
        gaps = list[tuple[PageRun, Ids]]()
        for run in runs:
            if np.count_nonzero(run.pages) < len(run.pages):
                ours = held[run.group.number][run.first : run.first + len(run.pages)]
                if np.count_nonzero(run.pages | ours) < len(ours):
                    return False
                gaps.append((run, ours))
        for run, ours in gaps:
            np.copyto(run.pages, ours, where=run.pages == NULL)
            self.tree.emit_kept(run.node, [run.group])
        return True

    def keep_needed(self, node: Node) -> None:
        """Of the window pages of a new run the tree keeps those that points need."""
        for group in self._windows:
            self._pages[group.number].prune(node.pages[group.number])
        self.tree.emit_kept(node, self._windows)

    # ---- queues

    def _requeue_last(self, node: Node) -> None:
        """A node's last point may be a leaf's now, or not any more."""
        if node.points:
            self.requeue(node.points[-1])

    def _requeue_spaced(self, node: Node) -> None:
        """The spaced points of a run go together: the first one stands for all of them."""
        first = node.first_spaced()
        if first is not None:
            self.requeue(first)

    def _requeue_held(self, node: Node) -> None:
        """A node, and those above it, may have lost their last holder: their points are not held then."""
        at: Node | None = node
        while self._held is not None and at is not None and not at.pins:
            for point in at.points:
                if point.held >= 0:
                    self.requeue(point)
            at = at.parent

    def requeue(self, point: Point) -> None:
        """Move a point to the queue where it belongs now, if any."""
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

    def _move(self, point: Point, queues: list[EvictionQueue] | None) -> None:
        self._dequeue(point)
        if self._held is not None and queues is self._inner and self._held.holds(point):
            self._held.add(point)
        elif queues is not None:
            self._enqueue(point, queues)

    def _enqueue(self, point: Point, queues: list[EvictionQueue]) -> None:
        point.queued, point.weight = self._clock, 0.0
        number, key = self.order.place(point, queues is self._tips, self._clock)
        queues[number].add(point, key)

    def _dequeue(self, point: Point) -> None:
        if point.queue is not None:
            point.queue.remove(point)
            point.held = NOT_HELD
        elif self._held is not None and point.held >= 0:
            self._held.remove(point)

    # ---- evicting

    def _choose(self, queues: list[EvictionQueue]) -> Point | None:
        """The point that is evicted next: one whose pages tables reference is held instead."""
        held = self._held
        if held is None or queues is self._tips:
            return self.order.choose(queues, self._clock)
        self._queue_unheld(held.poll())
        while True:
            point = self.order.choose(queues, self._clock)
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
        some = list(islice((point for point in held.points if self._has_evictable(point)), MOST_AT_ONCE))
        for point in some:
            self._dequeue(point)
            self._enqueue(point, self._inner)
            point.held = QUEUED_ANYWAY
        return bool(some)

    def _has_evictable(self, point: Point) -> bool:
        """Whether a point, or one that it stands for, has a state, or needs a window page that no table references."""
        if point.states:
            return True
        for other in point.node.points if point.kind == Kind.SPACED else (point,):
            for run in self.window_runs(other.node, other.position) if other.kind == point.kind else ():
                if not self._pages[run.group.number].are_referenced(run.pages).all():
                    return True
        return False

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
        point = self._choose(self._tips if from_leaf else self._queues)
        if point is not None:
            self._evict(point, tokens)
        return point is not None

    def _evict(self, point: Point, tokens: int) -> None:
        """Give up a point, and of a leaf at least its last `tokens` tokens."""
        self.has_evicted = True
        self.order.on_evict(point, self._clock)
        if not point.queue.is_tips:
            if point.kind == Kind.SPACED:
                self._drop_spaced(point)
            else:
                self.drop_point(point)
            return
        node = point.node
        parent = node.parent
        start = self._last_before(point, max(self._asked_above(point), point.position - tokens))
        self.order.on_cut(point, node, start, self._clock)
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
        for group in self._windows:
            first = group.first_block(point.position)
            moves = group.needs_last_block and group.first_block(limit) < first
            if moves and above <= limit and above // group.slot_tokens < first:
                return above
        return self.tree.last_resumable(node, limit, node.start)

    def _drop_spaced(self, first: Point) -> None:
        """Evict the spaced points of a run, but those whose pages tables reference."""
        node = first.node
        for point in list(node.points):
            is_kept = point.queue.is_tips if point.queue is not None else self._held and self._held.holds(point)
            if point.kind == Kind.SPACED and (point is first or not is_kept):
                self.drop_point(point)
        self._requeue_spaced(node)

    def drop_point(self, point: Point) -> None:
        """Give up a point: its states, and the window pages that no other point needs."""
        self._dequeue(point)
        for group, page in zip(self.tree.states, point.states):
            self._pages[group.number].evict_one(page)
        self._remove_point(point)

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
        self._remove_point(point)
        return point.states

    def _remove_point(self, point: Point) -> None:
        """Take a point out of the tree, with the window pages that no other point needs."""
        for run in self._hand_down(point) if self._windows else ():
            before = run.pages.copy() if self.tree.emit else run.pages
            if self._pages[run.group.number].leave_cache(run.pages):
                self.tree.emit_lost(run, before)
        self.tree.remove_point(point)

    def _hand_down(self, point: Point) -> list[PageRun]:
        """The points that one which goes shields hold what they need instead of it; returns what it holds no more."""
        start, above, others, runs = point.kept_from, point.shield, point.shielded, list[PageRun]()
        if above is not None:
            above.shielded.remove(point)
        if len(others) == 1:  # it takes over what both need as it is
            _shield(above, others[0])
            for group in self._windows:
                low = max(group.first_block(point.position), start // group.slot_tokens)
                end = min(group.first_block(others[0].position), point.position // group.slot_tokens)
                runs += self.tree.runs(group, point.node, low, end)
            return runs
        for other in others:
            _shield(above if above is not None and len(above.shielded) < MOST_SHIELDED else None, other)
            for run in self.window_runs(point.node, other.position, other.kept_from, point.position):
                self._pages[run.group.number].enter_cache(run.pages)
        return self.window_runs(point.node, point.position, start)

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
            moving = [node.pages[g.number] for g in self._windows if g.needs_last_block and not node.points]
            is_bare = not all(map(np.count_nonzero, moving))
            end = node.start if is_bare else self.tree.last_resumable(node, node.end, node.start)
            if replaced is not None and end < node.end:
                self.order.on_cut(replaced, node, end, self._clock)
            if self._shorten(node, end, replaced):
                return
            node = parent
        self._requeue_last(node)

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
        self._move(point, self._tips)
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


def _shield(above: Point | None, point: Point) -> None:
    point.shield = above
    if above is not None:
        above.shielded.append(point)

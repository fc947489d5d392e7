"""Publishing: committed KV of a sequence enters the prefix tree, with the resume points that it leaves.

Walk down from the node on which the sequence stands. Where the tree has the tokens already, our pages are duplicates:
the tables take over the tree's. Where it has not, a new run is made of ours. Pages of full groups change their owner;
window pages are held by the table and by the tree.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet

import numpy as np

from kvweave.cache.sequence import Sequence
from kvweave.cache.state import CacheState
from kvweave.pool import NULL, Ids, PagedGroup
from kvweave.prefix import Kind, Node
from kvweave.prefix.tree import NO_PAGES

Held = dict[int, Ids]
UNKNOWN = b""
MOST_PUBLISHED = 32
"""So many twins, sequences that computed the same tokens at the same time, are published when a prompt meets them."""


class Publisher:
    def __init__(self, state: CacheState) -> None:
        self.state = state

    # ---- sequences that may have committed more than others can find

    def stand(self, sequence: Sequence) -> None:
        """Prompts that go on from its node with its next tokens will have it published."""
        node, end = sequence.node, sequence.node.end + self.state.grid
        known = sequence.num_prompt >= end or self.state.num_shareable(sequence) >= end
        key = sequence.run(node.end, end).tobytes() if known else UNKNOWN
        sequence.standing_key = key
        if node.standing is None:
            node.standing = {}
        node.standing.setdefault(key, {})[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        standing, key = sequence.node.standing, sequence.standing_key
        assert standing is not None, "an open sequence stands on its node"
        del standing[key][sequence]
        if not standing[key]:
            del standing[key]

    def publish_standing(self, node: Node, key: bytes) -> None:
        """Publish sequences that stand on a node and go on with these tokens; of very many, some at a time."""
        standing, end = node.standing, node.end + self.state.grid
        assert standing is not None
        for sequence in list(standing.get(UNKNOWN, ())):
            if self.state.num_shareable(sequence) >= end:
                self.leave(sequence)
                self.stand(sequence)
        if key in standing:
            node.growing_tip = False  # whoever walks by here must find a child, not a longer node
            with_more = [s for s in standing[key] if self.state.num_shareable(s) >= end]
            for sequence in with_more[:MOST_PUBLISHED]:
                self.publish(sequence)
                self.state.set_next_event(sequence)

    # ---- while generating

    def keep_answer(self, sequence: Sequence, position: int) -> None:
        """Of the states taken while generating only the last is kept: with the window pages that resuming there needs,
        which the table will let go of. It enters the tree when somebody asks for it, or at the end."""
        state = self.state
        for old in [point for point in sequence.snapshots if point < position]:
            state.free_states(sequence.snapshots.pop(old))
        state.release_parked(sequence)
        sequence.answer = position
        for group in state.windows:
            if group.has_pages:
                table, end = state.tables[group.number], position // group.slot_tokens
                first = max(group.first_block(position), table.first_of[sequence.row])
                pages = table.pages[sequence.row, first:end].copy()
                if len(pages):
                    state.share(group, pages)
                    sequence.parked[group.number] = [(first, pages)]

    # ---- publish

    def publish_all(self) -> None:
        """Publish every sequence that has more than others can find."""
        state, counters = self.state, self.state.counters
        for row in (counters.committed - counters.findable >= state.grid).nonzero()[0].tolist():
            sequence = state.by_row.get(row)
            if sequence is not None and (sequence.snapshots or not state.states):
                self.publish(sequence)
                state.set_next_event(sequence)

    def publish(self, sequence: Sequence, *, without_point: bool = False) -> None:
        """Put what is committed into the tree, up to the last resume point; or all of it, `without_point` there."""
        state, start = self.state, sequence.node.end
        end = state.num_shareable(sequence) // state.grid * state.grid
        points = self._points(sequence, start, end)
        if state.states and not without_point:
            end = points[-1] if points else start
        if end <= start:
            return
        self.leave(sequence)
        self._lead_to(sequence, end, points, self._held_pages(sequence))
        state.counters.findable_of[sequence.row] = end
        self.stand(sequence)
        state.release_parked(sequence)
        for group in state.full:
            state.tables[group.number].published_of[sequence.row] = end // group.slot_tokens
        self._move_tip(sequence)
        sequence.answer = -1
        if end >= sequence.last_point:
            sequence.asked_points, sequence.prompt_points, sequence.last_point = [], [], 0

    def _held_pages(self, sequence: Sequence) -> Held:
        """By group number: the pages of a window by block, in the table and parked beside it."""
        held: Held = {}
        for group in self.state.windows:
            table = self.state.tables[group.number]
            pages = table.pages[sequence.row, : table.blocks_of[sequence.row]].copy()
            for first, run in sequence.parked.get(group.number, ()):
                pages[first : first + len(run)] = run
            held[group.number] = pages
        return held

    def _points(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Positions in (start, end] that become resume points, if their window pages are there."""
        if self.state.states:
            return sorted(point for point in sequence.snapshots if start < point <= end)
        wanted = sequence.points_in(start, end)
        return wanted if wanted and wanted[-1] == end else [*wanted, end]

    def _kind(self, sequence: Sequence, position: int) -> Kind:
        if position in sequence.asked_points:
            return Kind.BRANCH if position == sequence.branch else Kind.PROMPT
        return Kind.SPACED if position < sequence.last_point else Kind.ANSWER

    def _move_tip(self, sequence: Sequence) -> None:
        """Of the points left while generating only the last is kept, unless somebody asked for another."""
        node, tip = sequence.node, sequence.tip
        last = node.points[-1] if node.points else None
        if last is tip or last is None or last.kind != Kind.ANSWER or last.position != node.end:
            return
        sequence.tip = last
        if tip is not None and tip.alive and tip.kind == Kind.ANSWER and not tip.hits and not tip.pins:
            self.state.prefix.drop_point(tip)

    def _lead_to(self, sequence: Sequence, end: int, points: list[int], held: Held) -> None:
        """Walk and build from the sequence's node to one that ends at `end`, where it stands then."""
        prefix, grid = self.state.prefix, self.state.grid
        while sequence.node.end < end:
            node = sequence.node
            rest = sequence.run(node.end, end)
            child = node.children.get(rest[:grid].tobytes())
            if child is None:
                self._build(sequence, end, points, held)
                return
            same = prefix.tree.common(child.tokens, rest)
            if same < len(child.tokens):
                child = prefix.split(child, node.end + same)
            child.growing_tip = False
            self._stand_on(sequence, child)
            self._merge(sequence, child)
            self._leave_points(sequence, points, held)

    def _stand_on(self, sequence: Sequence, node: Node) -> None:
        self.state.prefix.move_pin(sequence.node, node)
        sequence.node = node

    # ---- a run that the tree has not

    def _build(self, sequence: Sequence, end: int, points: list[int], held: Held) -> None:
        """A new run from the sequence's node to `end`, or more of its own last run."""
        prefix, node, start = self.state.prefix, sequence.node, sequence.node.end
        tokens = sequence.run(start, end)
        pages: list[Ids] = [NO_PAGES] * len(self.state.groups)
        for group in self.state.full:
            table = self.state.tables[group.number].pages[sequence.row]
            pages[group.number] = table[start // group.slot_tokens : end // group.slot_tokens].copy()
        whole = [point for point in points if point > start]
        for group in self.state.windows:
            if group.has_pages:
                whole = _held_points(held[group.number], group, whole)
        for group in self.state.windows:
            pages[group.number] = _window_run(held[group.number], group, start, end, whole)
        if prefix.can_grow(node):
            prefix.grow(node, tokens, pages)
        else:
            node = prefix.insert(node, tokens, pages)
            self._stand_on(sequence, node)
            node.growing_tip = start >= sequence.num_prompt // self.state.grid * self.state.grid
        self._leave_points(sequence, points, held, {point for point in whole if self._first_needed(point) >= start})

    def _first_needed(self, point: int) -> int:
        """The first token whose window pages a point needs."""
        first = point
        for group in self.state.windows:
            first = min(first, 0 if group.head_blocks else group.first_block(point) * group.slot_tokens)
        return first

    # ---- a run that the tree has

    def _merge(self, sequence: Sequence, node: Node) -> None:
        """Our pages of a run are duplicates: the tables name the tree's from now on."""
        for group in self.state.rows:
            table, first = self.state.tables[group.number], node.start // group.slot_tokens
            ours, theirs = table.pages[sequence.row, first : node.end // group.slot_tokens], node.pages[group.number]
            if group.is_full:
                gone = ours.copy()
                table.write(sequence.row, first, theirs)
            else:
                swapped = (ours != theirs) & (ours != NULL) & (theirs != NULL)
                gone = ours[swapped]
                self.state.share(group, theirs[swapped])
                table.write(sequence.row, first, np.where(swapped, theirs, ours))
            if group.has_pages:
                self.state.release(group, gone)

    def _leave_points(
        self, sequence: Sequence, points: SequenceOf[int], held: Held, filled: AbstractSet[int] = frozenset()
    ) -> None:
        """Resume points in the run on which a sequence stands, wherever the window pages they need are there or ours;
        those of `filled` are there."""
        state, node = self.state, sequence.node
        for point in points:
            if not node.start < point <= node.end:
                continue
            states = sequence.snapshots.pop(point, ())
            if node.point_at(point) is None and (point in filled or self._fill_windows(held, node, point)):
                kind = self._kind(sequence, point)
                state.prefix.add_point(node, point, kind, states, sequence.priority, sequence.num_cached)
            elif states:
                state.free_states(states)

    def _fill_windows(self, held: Held, node: Node, point: int) -> bool:
        """Whether the window pages of a point are all there, after ours have filled the gaps."""
        gaps: list[tuple[Node, PagedGroup, int, Ids]] = []
        for group in self.state.windows:
            if not group.has_pages:
                continue
            end = point // group.slot_tokens
            first = min(group.first_block(point), end)
            for low, high in ((0, min(group.head_blocks, end)), (first, end)):
                found = _gaps(held[group.number], group, node, low, high)
                if found is None:
                    return False
                gaps += found
        for at, group, low, pages in gaps:
            self.state.prefix.fill(at, group, low, pages)
        return True


def _held_points(held: Ids, group: PagedGroup, points: list[int]) -> list[int]:
    """Those of some points, ascending, whose pages of a window are all held, the head apart."""
    if not points or _is_whole(held, group.first_block(points[0]), points[-1] // group.slot_tokens):
        return points
    return [point for point in points if _is_whole(held, group.first_block(point), point // group.slot_tokens)]


def _is_whole(held: Ids, low: int, high: int) -> bool:
    return bool(np.count_nonzero(held[low:high]) == max(0, high - low))


def _window_run(held: Ids, group: PagedGroup, start: int, end: int, points: list[int]) -> Ids:
    """The pages of a window for a new run: those that its points need."""
    size = group.slot_tokens
    first = start // size
    pages, low, high = np.zeros(end // size - first, np.int32), first, first
    for point in points:
        needed = group.first_block(point)
        if needed > high:
            pages[low - first : high - first] = held[low:high]
            low = needed
        high = point // size
    pages[low - first : high - first] = held[low:high]
    if points and first < group.head_blocks:
        head = min(group.head_blocks, points[-1] // size)
        pages[: head - first] = held[first:head]
    return pages


def _gaps(
    held: Ids, group: PagedGroup, node: Node, low: int, high: int
) -> list[tuple[Node, PagedGroup, int, Ids]] | None:
    """Held pages for runs at or above `node` that lack some in the blocks [low, high); None where they are not held."""
    found: list[tuple[Node, PagedGroup, int, Ids]] = []
    at = node
    while high > low and at.parent is not None:
        start = at.start // group.slot_tokens
        first = max(low, start)
        theirs = at.pages[group.number][first - start : max(0, high - start)]
        if np.count_nonzero(theirs) < len(theirs):
            ours = held[first:high]
            if not (ours[theirs == NULL] != NULL).all():
                return None
            found.append((at, group, first, ours))
        high, at = min(high, start), at.parent
    return found

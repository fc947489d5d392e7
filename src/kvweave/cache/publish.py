"""Publishing: committed KV of a sequence enters the prefix tree, with the resume points that it leaves.

Walk down from the sequence's node. Where the tree has the tokens already, the sequence's pages are duplicates: its
tables get the tree's. Where it has not, a new run is made of the sequence's pages. Pages of full groups change owner;
window pages are held by the table and by the tree.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np

from kvweave.cache.sequence import Sequence
from kvweave.cache.state import CacheState
from kvweave.pool import NO_PAGES, NULL, Ids
from kvweave.prefix import NEVER, Kind, Node, PastUse, Point

Held = list[Ids]
UNKNOWN: Final = b""
NEVER_USED: Final = PastUse(0)
MOST_PUBLISHED: Final = 32
"""Of sequences that computed the same tokens at the same time, so many are published for one prompt."""


class Publisher:
    def __init__(self, state: CacheState) -> None:
        self.state = state

    # ---- sequences that may have committed more than others can find

    def attach(self, sequence: Sequence) -> None:
        """Note a sequence at its node: a prompt that continues there with the same tokens publishes it first."""
        node, end = sequence.node, sequence.node.end + self.state.grid
        known = sequence.num_prompt >= end or self.state.num_shareable(sequence) >= end
        key = sequence.run(node.end, end).tobytes() if known else UNKNOWN
        sequence.next_key = key
        if node.running is None:
            node.running = {}
        node.running.setdefault(key, {})[sequence] = None

    def detach(self, sequence: Sequence) -> None:
        running, key = sequence.node.running, sequence.next_key
        assert running is not None, "an open sequence is attached to its node"
        del running[key][sequence]
        if not running[key]:
            del running[key]

    def publish_running(self, node: Node, key: bytes) -> None:
        """Publish sequences attached to a node that continue with these tokens; of very many, some at a time."""
        running, end = node.running, node.end + self.state.grid
        assert running is not None
        for sequence in self._with_shareable(running.get(UNKNOWN), end):
            self.detach(sequence)
            self.attach(sequence)
        if key in running:
            for sequence in self._with_shareable(running[key], end, MOST_PUBLISHED):
                self.publish(sequence)
                self.state.set_next_event(sequence)

    def _with_shareable(self, running: dict[Sequence, None] | None, end: int, most: int = NEVER) -> list[Sequence]:
        """Of some sequences, of which there may be thousands, those that have tokens up to `end` to share."""
        committed, found = self.state.counters.committed_of, list[Sequence]()
        for sequence in running or ():
            if committed[sequence.row] >= end and self.state.num_shareable(sequence) >= end:
                found.append(sequence)
                if len(found) == most:
                    break
        return found

    # ---- while generating

    def keep_answer(self, sequence: Sequence, position: int) -> None:
        """Of the states taken while generating only the last is kept: with the window pages that resuming there needs,
        which the table will release. It enters the tree when a prompt asks for it, or at the end."""
        state = self.state
        for old in [point for point in sequence.snapshots if point < position]:
            state.free_snapshot(sequence.snapshots.pop(old))
        state.release_retained(sequence)
        sequence.answer = position
        for group in state.windows:
            first, end = group.first_block(position), position // group.slot_tokens
            pages = state.tables[group.number].pages[sequence.row, first:end].copy()
            state.pages[group.number].share(pages)
            state.retain(sequence, group, first, pages)

    # ---- publish

    def publish_all(self) -> None:
        """Publish every sequence that has more than others can find."""
        state, counters = self.state, self.state.counters
        ends = counters.last_snapshot if state.states else counters.committed
        for row in (ends - counters.published >= state.grid).nonzero()[0].tolist():
            self.publish(state.by_row[row])
            state.set_next_event(state.by_row[row])

    def publish(self, sequence: Sequence, *, without_point: bool = False) -> None:
        """Put what is committed into the tree, up to the last resume point; or all of it, `without_point` there."""
        state, start = self.state, sequence.node.end
        end = state.num_shareable(sequence) // state.grid * state.grid
        points = self._points(sequence, start, end)
        if state.states and not without_point:
            end = points[-1] if points else start
        if end <= start:
            return
        self.detach(sequence)
        held = self._held_pages(sequence)
        for position in () if state.states or state.windows else sequence.remembered:
            if start < position < end:  # rows alone have points at the ends of runs only
                self._insert_until(sequence, position, [position], held)
        self._insert_until(sequence, end, points, held)
        state.counters.published_of[sequence.row] = end
        if not sequence.snapshots:
            state.counters.last_snapshot_of[sequence.row] = 0
        self.attach(sequence)
        state.release_retained(sequence)
        self._move_tip(sequence)
        sequence.answer = -1
        if end >= sequence.last_point:
            sequence.asked_points, sequence.prompt_points, sequence.last_point = [], [], 0

    def publish_end(self, sequence: Sequence) -> None:
        """`publish` what a sequence leaves at its end. Where all of it is in the tree already, a resume point may be
        lacking there: it was evicted, or a fork left none."""
        self.publish(sequence)
        state, node = self.state, sequence.node
        if not node.end or node.point_at(node.end) is not None:
            return
        is_last = node.end == state.num_shareable(sequence) // state.grid * state.grid
        if is_last and (node.end in sequence.snapshots or not state.states):
            self._add_points(sequence, [node.end], self._held_pages(sequence))

    def _held_pages(self, sequence: Sequence) -> Held:
        """By group: the pages of a sequence by block, those among them that are retained beside a window's table."""
        held: Held = [NO_PAGES] * len(self.state.groups)
        for group in self.state.rows:
            table = self.state.tables[group.number]
            pages = table.pages[sequence.row, : table.blocks_of[sequence.row]]
            if group.number in sequence.retained:
                pages = pages.copy()
                for first, run in sequence.retained[group.number]:
                    pages[first : first + len(run)] = run
            held[group.number] = pages
        return held

    def _points(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Positions in (start, end] that become resume points, if their window pages are there."""
        if self.state.states:
            return [point for point in sequence.snapshots if start < point <= end]
        wanted = sequence.points_in(start, end)
        return wanted if wanted and wanted[-1] == end else [*wanted, end]

    def _kind(self, sequence: Sequence, position: int) -> Kind:
        if position in sequence.asked_points:
            is_branch = position == sequence.branch or position in sequence.expected_branches
            return Kind.BRANCH if is_branch or position in sequence.remembered else Kind.PROMPT
        return Kind.SPACED if position < sequence.last_point else Kind.ANSWER

    def _move_tip(self, sequence: Sequence) -> None:
        """Of the points left while generating only the last is kept, unless a prompt asked for another."""
        node, tip = sequence.node, sequence.tip
        last = node.points[-1] if node.points else None
        if last is tip or last is None or last.kind != Kind.ANSWER or last.position != node.end:
            return
        sequence.tip = last
        if tip is not None and tip.alive and tip.kind == Kind.ANSWER and not tip.pins:
            self.state.prefix.drop_replaced(tip)

    def _insert_until(self, sequence: Sequence, end: int, points: list[int], held: Held) -> None:
        """Walk down and insert until the sequence's node ends at `end`."""
        prefix, grid = self.state.prefix, self.state.grid
        while sequence.node.end < end:
            node = sequence.node
            rest = sequence.run(node.end, end)
            child = node.children.get(rest[:grid].tobytes())
            if child is None:
                self._insert_run(sequence, end, points, held)
                return
            same = prefix.tree.common(child.tokens, rest)
            if same < len(child.tokens):
                child = prefix.split(child, node.end + same)
            prefix.pin(child, above=node)
            sequence.node = child
            self._merge(sequence, child)
            self._add_points(sequence, points, held)

    # ---- a run that the tree has not

    def _insert_run(self, sequence: Sequence, end: int, points: list[int], held: Held) -> None:
        """A new run from the sequence's node to `end`."""
        prefix, start = self.state.prefix, sequence.node.end
        tokens, pages = sequence.run(start, end), [NO_PAGES] * len(held)
        for group in self.state.rows:
            size = group.slot_tokens
            pages[group.number] = held[group.number][start // size : end // size].copy()
        sequence.node = prefix.add_run(sequence.node, tokens, pages)
        self._add_points(sequence, points, held)
        prefix.windows.keep_needed(sequence.node)

    # ---- a run that the tree has

    def _merge(self, sequence: Sequence, node: Node) -> None:
        """The sequence's pages of a run are duplicates: its tables get the tree's."""
        for group in self.state.rows:
            table, first = self.state.tables[group.number], node.start // group.slot_tokens
            ours, theirs = table.pages[sequence.row, first : node.end // group.slot_tokens], node.pages[group.number]
            swapped = (ours != theirs) & (ours != NULL) & (theirs != NULL)
            if group.is_window:
                self.state.pages[group.number].share(theirs[swapped])
            self.state.pages[group.number].release(ours[swapped])
            table.write(sequence.row, first, np.where(swapped, theirs, ours))

    def _add_points(self, sequence: Sequence, points: list[int], held: Held) -> None:
        """Resume points in the sequence's node, where the window pages they need are there or the sequence's."""
        state, node, new = self.state, sequence.node, list[Point]()
        taken = {point.position for point in node.points}
        for position in points[bisect_right(points, node.start) : bisect_right(points, node.end)]:
            states = sequence.snapshots.pop(position, ())
            if position in taken:
                state.free_snapshot(states)
                continue
            point = Point(node, position, self._kind(sequence, position), states)
            point.priority, point.found = sequence.priority, sequence.num_cached
            past = sequence.remembered.get(position, NEVER_USED)
            point.hits, point.continued = past.hits, past.continued
            new.append(point)
        for point in state.prefix.add_points(new, held):
            state.free_snapshot(point.states)

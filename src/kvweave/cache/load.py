"""The first pages of a sequence: those of a hit, or new pages for KV that is loaded from elsewhere."""

from __future__ import annotations

import numpy as np

from kvweave.cache.allocator import PageAllocator
from kvweave.cache.sequence import Sequence
from kvweave.cache.snapshots import Snapshots
from kvweave.cache.state import CacheState
from kvweave.pool import PagedGroup
from kvweave.prefix import Point, Tokens
from kvweave.prefix.tree import Match


class Loader:
    def __init__(self, state: CacheState, allocator: PageAllocator, snapshots: Snapshots) -> None:
        self.state = state
        self.allocator = allocator
        self.snapshots = snapshots

    # ---- hits

    def hit(self, match: Match, num_tokens: int, drop_last_blocks: int) -> int:
        """The longest joint hit of a prompt; at least one token stays to be computed."""
        grid = self.state.grid
        limit = min(match.length, num_tokens - 1) // grid * grid - drop_last_blocks * grid
        return self.state.prefix.tree.hit(match, limit) if limit > 0 else 0

    def open(self, sequence: Sequence, prompt: Tokens, match: Match | None) -> None:
        """Put a new sequence into a row, with the pages of its hit."""
        state = self.state
        sequence.row = sequence.rows[0] = state.take_row()
        state.by_row[sequence.row] = sequence
        state.counters.opened_of[sequence.row] = state.prefix.queues.tick()
        state.tokens.enter(sequence.row, len(prompt))
        self._enter(sequence, prompt, match)

    def reopen(self, sequence: Sequence, prompt: Tokens, match: Match) -> None:
        """Give a sequence that has computed nothing a longer hit."""
        old = sequence.node
        self.leave_row(sequence)
        self._enter(sequence, prompt, match)
        self.state.prefix.unpin(old)

    def _enter(self, sequence: Sequence, prompt: Tokens, match: Match | None) -> None:
        state = self.state
        position = 0 if match is None else self.hit(match, len(prompt), sequence.drop_last_blocks)
        if match is not None and position:
            point = state.prefix.pin_at(match, position, sequence.priority, with_states=bool(state.states))
            sequence.node, sequence.restore = point.node, point if state.states else None
            for group in state.rows:
                self._enter_run(group, sequence, position)
            state.prefix.queues.requeue(point)
        else:
            sequence.node = state.prefix.tree.root(sequence.namespace)
            state.prefix.pin(sequence.node)
        sequence.num_cached = position
        sequence.private_from = max(sequence.private_from, position)  # what it finds is not its own
        sequence.start_at(position, prompt)
        sequence.branch = match.length if match is not None and match.length > position else 0
        past = state.prefix.order.on_open(sequence.namespace, prompt, position, max(position, sequence.branch))
        back = sequence.drop_last_blocks * state.grid  # a hit stops so many tokens before what matches
        sequence.remembered = {**sequence.remembered, **{point - back: use for point, use in past.items()}}
        state.plan_points(sequence)
        row, counters = sequence.row, state.counters
        counters.length_of[row] = counters.committed_of[row] = position
        counters.published_of[row] = counters.step_start_of[row] = position
        counters.drafts_of[row], counters.prompt_of[row] = 0, sequence.num_prompt
        counters.priority_of[row] = sequence.priority
        state.set_next_lengths(sequence)

    def _enter_run(self, group: PagedGroup, sequence: Sequence, position: int) -> None:
        """The pages of a hit that the next token can see; what lies between head and tail stays NULL."""
        table, row, blocks = self.state.tables[group.number], sequence.row, position // group.slot_tokens
        first = min(group.first_block(position), blocks)
        self._reference(group, sequence, first, blocks)
        self._reference(group, sequence, 0, min(group.head_blocks, first))
        table.first_of[row] = max(first, group.head_blocks)
        table.blocks_of[row] = blocks

    def _reference(self, group: PagedGroup, sequence: Sequence, low: int, high: int) -> None:
        """Enter the tree's pages of the blocks [low, high) into a sequence's table."""
        if low < high:
            pages = self.state.prefix.tree.pages(group, sequence.node, low, high)
            self.state.tables[group.number].write(sequence.row, low, pages)
            if group.is_window:
                self.state.pages[group.number].share(pages)

    def leave_row(self, sequence: Sequence) -> None:
        """Release all pages that a row holds, and the states of its hit."""
        state = self.state
        for table, pages in zip(state.tables, state.pages):
            pages.release(table.held(sequence.row, sequence.node.end))
            table.clear(sequence.row)
        state.release_retained(sequence)
        state.drop_restore(sequence)

    # ---- pins

    def pin(self, match: Match, position: int) -> Point:
        """Keep what resuming at a position of a matched path needs."""
        state = self.state
        point = state.prefix.pin_at(match, position, 0, with_states=True)
        for run in self.state.prefix.windows.runs(point.node, point.position):
            state.pages[run.group.number].share(run.pages)
        return point

    def unpin(self, point: Point) -> None:
        for run in self.state.prefix.windows.runs(point.node, point.position):
            self.state.pages[run.group.number].release(run.pages)
        self.state.prefix.pin_states(point, -1)
        self.state.prefix.unpin(point.node)

    # ---- loading

    def load_to(self, sequence: Sequence, position: int) -> None:
        """Pages for what the token at `position` can see, and a live state: all that is not in the tables yet."""
        state, end = self.state, np.array([position])
        never = self.allocator.never_fits(end, end)
        if never is not None:
            raise never
        lacking = {group.number: self._lacking(group, sequence.row, position) for group in state.groups}
        demand = [sum(last - first for first, last in lacking[group.number]) for group in state.groups]
        snapshot = [n + int(group.is_state) for n, group in zip(demand, state.groups, strict=True)]
        restore = sequence.restore
        state.drop_restore(sequence)  # what is loaded takes the place of the states of the hit
        admits = self.allocator.admits([sequence])
        keeps = bool(state.states) and self.allocator.ensure(snapshot, admits=admits) is None
        pool = None if keeps else self.allocator.ensure(demand, admits=admits)
        if pool is not None:
            if restore is not None:
                state.prefix.pin_states(restore, 1)
                sequence.restore = restore
            raise self.allocator.refusal(pool, demand, [sequence], end, end, sequence.rows)
        if state.windows or state.states:
            sequence.asked_points = [position, *(point for point in sequence.asked_points if point > position)]
            sequence.prompt_points = [position, *(point for point in sequence.prompt_points if point > position)]
        self.allocator.advance_windows_of(sequence, position)
        for group in state.groups:
            self._load_group(group, sequence.row, position, lacking[group.number])
        state.counters.length_of[sequence.row] = position
        if keeps:
            self.snapshots.reserve(sequence, [position], in_step=False)
        state.set_next_lengths(sequence)

    def _lacking(self, group: PagedGroup, row: int, position: int) -> list[tuple[int, int]]:
        """Slots that are needed to go on from `position` and are not there, as runs: of the head, and of the tail."""
        blocks = self.state.tables[group.number].blocks_of[row]
        if group.is_state:
            return [] if blocks else [(0, 1)]
        end, head = position // group.slot_tokens, group.head_blocks
        first = group.first_block(position)
        runs = (blocks, min(head, end)), (max(blocks, head, first), end)
        return [(low, high) for low, high in runs if low < high]

    def _load_group(self, group: PagedGroup, row: int, position: int, lacking: list[tuple[int, int]]) -> None:
        table, pages = self.state.tables[group.number], self.state.pages[group.number]
        table.blocks_of[row] = 1 if group.is_state else position // group.slot_tokens
        for low, high in lacking:
            table.write(row, low, pages.allocate(high - low))
        if group.is_window:
            table.first_of[row] = group.first_block(position)

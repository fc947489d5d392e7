"""States: the live one of each sequence, the snapshots that its steps leave, and the columns that drafts need."""

from __future__ import annotations

import numpy as np

from kvweave.cache.copies import Copies
from kvweave.cache.sequence import Rows, Sequence
from kvweave.cache.state import CacheState
from kvweave.pool import Counts
from kvweave.table import spread


class Snapshots:
    """The state after a wanted position is left in pages of its own: by the step that passes it, where it can
    (`in_step`), else by a copy of the live state, between the step that ends there and the next one."""

    def __init__(self, state: CacheState) -> None:
        self.state = state

    # ---- before a step

    def positions(self, sequence: Sequence, start: int, end: int, on_the_way: bool) -> list[int]:
        """Which states the step over [start, end) should leave: all that are wanted, or only that at its end."""
        wanted = sequence.points_in(start, end)
        last = end // self.state.decode_every * self.state.decode_every
        if last > (wanted[-1] if wanted else start):
            wanted.append(last)
        return [point for point in wanted if on_the_way or point == end]

    def reserve(self, sequence: Sequence, positions: list[int], in_step: bool) -> None:
        """Pages for the states at `positions`, for which there is room."""
        if positions:
            self.state.counters.last_snapshot_of[sequence.row] = positions[-1]
        for position in positions:
            pages = [self.state.pages[group.number].allocate_snapshot() for group in self.state.states]
            sequence.snapshots[position] = tuple(pages)
        if in_step:
            sequence.in_step = positions
        elif positions:
            sequence.copy_at = positions[-1]

    def restore(self, sequence: Sequence, copies: Copies) -> None:
        """Copy the states of the hit into the live ones, before the first step."""
        point = sequence.restore
        if point is not None:
            copies.add_all(sequence.row, self.state.state_tags, point.states, self._live_states(sequence))
            self.state.drop_restore(sequence)

    def take_states(self, sequence: Sequence) -> None:
        """The states of the hit become the live ones: short of a page for a copy, their point is given up."""
        assert sequence.restore is not None, "only the states of a hit can be taken"
        for group, page in zip(self.state.states, self.state.prefix.take_states(sequence.restore)):
            self.state.tables[group.number].write_state(sequence.row, page)
        sequence.restore = None

    # ---- between steps

    def _live_states(self, sequence: Sequence) -> list[int]:
        """A page of each state group."""
        return [self.state.tables[group.number].pages.item(sequence.row, 0) for group in self.state.states]

    def copy_live(self, sequence: Sequence, copies: Copies) -> None:
        """Copy the live state to the snapshot that waits for it: the step that ends there is the last so far."""
        if sequence.copy_at >= 0:
            assert sequence.copy_at == self.state.counters.length_of[sequence.row], "the live state is a later one"
            pages = sequence.snapshots[sequence.copy_at]
            copies.add_all(sequence.row, self.state.state_tags, self._live_states(sequence), pages)
            sequence.copy_at = -1

    def drop_after(self, sequence: Sequence, length: int) -> None:
        """Give back the snapshots of positions beyond `length`."""
        for position in [p for p in sequence.snapshots if p > length]:
            self.state.free_snapshot(sequence.snapshots.pop(position))

    # ---- drafts: column i holds the state after the i-th of the tokens that may be rejected

    def add_columns(self, rows: Rows, columns: int) -> None:
        """So many columns for each row, for which there is room."""
        for group in self.state.states:
            table = self.state.tables[group.number]
            more = columns - table.blocks[rows]
            pages = self.state.pages[group.number].allocate(int(np.maximum(more, 0).sum()))
            table.append(rows[more > 0], more[more > 0], pages)

    def keep_accepted(self, rows: Rows, rejected: Counts) -> None:
        """Make the state after the last accepted token of each row the live one, and free the other columns."""
        for group in self.state.states:
            table = self.state.tables[group.number]
            columns = table.blocks[rows]
            live = columns - 1 - rejected
            each, slots = spread(rows, np.zeros_like(columns), columns)
            pages = table.pages[each, slots]
            is_live = slots == np.repeat(live, columns)
            table.write_many(each, slots, np.zeros_like(pages))
            table.write_many(rows, np.zeros_like(rows), pages[is_live])
            table.blocks[rows] = 1
            self.state.pages[group.number].release(pages[~is_live])
        self.state.counters.drafts[rows] = 0

    # ---- the end

    def donate_live(self, sequence: Sequence) -> None:
        """At its end a sequence needs its live state no more: where nothing is in flight it is a snapshot as it is."""
        state, row = self.state, sequence.row
        position = state.counters.committed_of[row]
        in_flight = position != state.counters.length_of[row] or state.counters.drafts_of[row]
        if not state.states or in_flight or position % state.grid or position < max(1, sequence.node.end):
            return
        if position == sequence.node.end and sequence.node.point_at(position) is not None:
            return
        if sequence.restore is not None or not state.tables[state.states[0].number].blocks_of[row]:
            return
        if sequence.copy_at == position:
            state.free_snapshot(sequence.snapshots.pop(position))
            sequence.copy_at = -1
        if position not in sequence.snapshots:
            sequence.snapshots[position] = tuple(self._live_states(sequence))
            for group in state.states:
                state.tables[group.number].clear(row)

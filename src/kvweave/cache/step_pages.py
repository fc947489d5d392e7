"""The pages of a step: how many new pages it needs of each group, and where in the block tables they go."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import reduce

import numpy as np

from kvweave.cache.allocator import Demand
from kvweave.cache.sequence import Rows, Sequence
from kvweave.cache.state import CacheState
from kvweave.pool import Counts, PagedGroup


class StepOptions:
    """Options of `Cache.extend`: `lookahead`, pages for this many tokens beyond the step; `drafts`, how many of the
    last tokens may be rejected; `in_step`, whether the engine writes snapshots inside the step (else only the state at
    its end is copied)."""

    def __init__(self, lookahead: int, drafts: int, in_step: bool) -> None:
        self.lookahead = lookahead
        self.drafts = drafts
        self.in_step = in_step


PLAIN = StepOptions(0, 0, False)
Lengths = Counts | SequenceOf[int]


class StepPages:
    """The step of each sequence from `start` to `after`, whose tables get pages up to `reach`.

    One row is counted in plain numbers, several in arrays: a chunk of a prompt is one row with many pages, a decode
    step is many rows with at most one page each.
    """

    def __init__(
        self,
        state: CacheState,
        rows: Rows,
        sequences: list[Sequence],
        start: Lengths,
        after: Lengths,
        reach: Lengths,
        options: StepOptions,
    ) -> None:
        self.state, self.rows, self.sequences, self.options = state, rows, sequences, options
        self.start, self.after, self._reach = start, after, reach
        self.growth: list[Counts] = []
        """New blocks of each row, of several, by `CacheState.same_block_size`; and of all rows together."""
        self._totals: list[int] = []
        self.stateful: list[int] = []
        """Rows that pass their next stop."""
        self.takes_states = False
        """Whether rows take the states of their hits, where they can, instead of copies: the hits are lost then."""
        self._is_one = len(sequences) == 1
        if self._is_one:
            self._count_row(int(reach[0]))
        else:
            self._count_rows(np.asarray(reach))

    def _count_row(self, reach: int) -> None:
        state, row, self.longest = self.state, self.sequences[0].row, reach
        for same in state.same_block_size:
            have = state.tables[same[0].number].blocks_of[row]
            self._totals.append(max(0, -(-reach // same[0].slot_tokens) - have))
        if state.states and reach >= state.counters.next_stop_of[row]:
            self.stateful = [0]

    def _count_rows(self, reach: Counts) -> None:
        state, rows = self.state, self.rows
        self.longest = int(reach[reach.argmax()])
        for same in state.same_block_size:
            size, have = same[0].slot_tokens, state.tables[same[0].number].blocks[rows]
            growth = np.maximum((reach + (size - 1)) // size - have, 0)
            self.growth.append(growth)
            self._totals.append(int(np.add.reduce(growth)))
        if state.states:
            self.stateful = (reach >= state.counters.next_stop[rows]).nonzero()[0].tolist()

    def demand(self, count: int | None = None) -> Demand:
        """Pages for the first `count` rows, or all: new blocks; for each row a live state, but for those that have one
        or take one, and one for each draft (no draft of the step before is left)."""
        state, demand = self.state, [0] * len(self.state.groups)
        is_all, count = count is None, len(self.sequences) if count is None else count
        for i, same in enumerate(state.same_block_size):
            blocks = self._totals[i] if is_all else int(self.growth[i][:count].sum())
            for group in same:
                demand[group.number] = blocks
        if state.states:
            num_states = count * (1 + self.options.drafts) - self._num_live(count)
            if self.takes_states:
                num_states -= sum([self.sequences[i].can_take_states for i in self.stateful if i < count])
            for group in state.states:
                demand[group.number] = num_states
        return demand

    def _num_live(self, count: int) -> int:
        """How many of the first rows have a live state."""
        table = self.state.tables[self.state.states[0].number]
        if self._is_one:
            return min(1, table.blocks_of[self.sequences[0].row])
        return int(np.count_nonzero(table.blocks[self.rows[:count]]))

    def let_take_states(self) -> bool:
        """Short of pages, rows take the states of their hits, instead of copies, where nobody else needs these; whether
        any can."""
        self.takes_states = any(self.sequences[i].can_take_states for i in self.stateful)
        return self.takes_states

    def span(self) -> tuple[Counts, Counts]:
        """For each row the tokens whose pages must be held together: from the committed length to the reached one."""
        return self.state.counters.committed[self.rows], np.asarray(self._reach)

    def append(self) -> None:
        """Enter new pages into the tables."""
        for i, same in enumerate(self.state.same_block_size):
            total = self._totals[i]
            if not total:
                continue
            if self._is_one:
                for group in same:
                    self._append_run(group, total)
                continue
            growing = self.growth[i].nonzero()[0]
            rows, more = self.rows[growing], self.growth[i][growing]
            for group in same:
                self.state.tables[group.number].append(rows, more, self.state.pages[group.number].allocate(total))

    def _append_run(self, group: PagedGroup, count: int) -> None:
        """Pages of one row; those of a window that outlast the prompt are kept apart from those that do not."""
        row, num_prompt = self.sequences[0].row, self.sequences[0].num_prompt
        table, pages = self.state.tables[group.number], self.state.pages[group.number]
        blocks = table.blocks_of[row]
        if group.is_window and (self.start[0] < num_prompt or pages.is_mostly_needed):
            num_passing = group.first_block(num_prompt) - blocks
            table.write(row, blocks, pages.allocate_run(count, num_passing))
        else:
            table.write(row, blocks, pages.allocate(count))
        table.blocks_of[row] = blocks + count

    def set_counters(self) -> None:
        """After `append`: set the new lengths, and the lengths up to which pages are allocated."""
        state, counters, rows = self.state, self.state.counters, self.rows
        if self._is_one:
            counters.length_of[self.sequences[0].row] = int(self.after[0])
            state.set_ready_of(self.sequences[0].row)
            return
        counters.lengths[rows] = self.after
        ends = [state.tables[same[0].number].blocks[rows] * same[0].slot_tokens for same in state.same_block_size]
        if state.states or state.ends_in_block:
            ends.append(counters.next_stop[rows] - 1)
        counters.ready[rows] = reduce(np.minimum, ends)

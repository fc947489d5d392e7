"""The pages of a step: how many new pages it needs of each group, and where in the block tables they go.

`OneRowPages` computes with plain numbers, `ManyRowPages` with arrays: a chunk of a prompt is one row with many pages, a
decode step is many rows with at most one page each. Both have the same methods.
"""

from __future__ import annotations

import numpy as np

from kvweave.cache.sequence import Rows, Sequence
from kvweave.cache.state import CacheState
from kvweave.pool import Counts
from kvweave.pool.page_pool import Demand


class StepOptions:
    """Options of `Cache.extend`: `lookahead`, pages for this many tokens beyond the step; `drafts`, how many of the
    last tokens may be rejected; `in_step`, whether the engine writes snapshots inside the step (else only the state at
    its end is copied)."""

    def __init__(self, lookahead: int, drafts: int, in_step: bool) -> None:
        self.lookahead = lookahead
        self.drafts = drafts
        self.in_step = in_step


PLAIN = StepOptions(0, 0, False)


class OneRowPages:
    """The step of one sequence from `start` to `after`."""

    def __init__(self, state: CacheState, sequence: Sequence, start: int, after: int, options: StepOptions) -> None:
        self.state, self.options = state, options
        reach = after + options.lookahead
        self.sequences, self.rows = [sequence], sequence.rows
        self.start, self.after = [start], [after]
        self.longest = reach
        self.growth = [0] * len(state.same_block_size)
        for i, same in enumerate(state.same_block_size):
            have = state.tables[same[0].number].blocks_of[sequence.row]
            self.growth[i] = max(0, -(-reach // same[0].slot_tokens) - have)
        passes_stop = bool(state.states) and reach >= state.counters.next_stop_of[sequence.row]
        self.stateful = [0] if passes_stop else []
        self.takes_states = False
        """Whether rows take the states of their hits, where they can, instead of copies: the hits are lost then."""

    def demand(self, _count: int | None = None) -> Demand:
        """Pages for all rows, or for the first `count`."""
        states = self.state.states
        num_live = min(1, self.state.tables[states[0].number].blocks_of[self.sequences[0].row]) if states else 0
        return _demand(self, self.growth, 1, num_live)

    def span(self) -> tuple[Counts, Counts]:
        """For each row the tokens whose pages must be there at once when all steps before this one are committed."""
        return np.array(self.start), np.array([self.longest])

    def append(self) -> None:
        row, num_prompt = self.sequences[0].row, self.sequences[0].num_prompt
        for same, count in zip(self.state.same_block_size, self.growth):
            if count:
                for group in same:
                    table, pages = self.state.tables[group.number], self.state.pages[group.number]
                    blocks = table.blocks_of[row]
                    if group.is_window and (self.start[0] < num_prompt or pages.is_mostly_needed):
                        num_passing = group.first_block(num_prompt) - blocks
                        table.write(row, blocks, pages.allocate_run(count, num_passing))
                    else:
                        table.write(row, blocks, pages.allocate(count))
                    table.blocks_of[row] = blocks + count

    def set_counters(self) -> None:
        """After `append`: set the new length, and the length up to which pages are allocated."""
        row = self.sequences[0].row
        self.state.counters.length_of[row] = self.after[0]
        if not self.stateful:
            self.state.set_ready_of(row)


class ManyRowPages:
    """The step of several sequences, whose tables get pages up to `reach`."""

    def __init__(
        self,
        state: CacheState,
        rows: Rows,
        sequences: list[Sequence],
        start: Counts,
        after: Counts,
        reach: Counts,
        options: StepOptions,
    ) -> None:
        self.state, self.rows, self.sequences, self.options = state, rows, sequences, options
        self.start, self.after = start, after
        self._reach = reach
        self.growth: list[Counts] = []
        for same in state.same_block_size:
            size, have = same[0].slot_tokens, state.tables[same[0].number].blocks[rows]
            self.growth.append(np.maximum((reach + (size - 1)) // size - have, 0))
        self._totals = [int(np.add.reduce(growth)) for growth in self.growth]
        self._sums: list[Counts] = []
        """Of the growth: of the first row, of the first two, and so on."""
        self.takes_states = False
        self.stateful: list[int] = []
        if state.states:
            self.stateful = (reach >= state.counters.next_stop[rows]).nonzero()[0].tolist()

    @property
    def longest(self) -> int:
        return int(self._reach[self._reach.argmax()])

    def demand(self, count: int | None = None) -> Demand:
        blocks, states = self._totals, self.state.states
        count = len(self.rows) if count is None else count
        if count < len(self.rows):
            self._sums = self._sums or [np.cumsum(growth) for growth in self.growth]
            blocks = [int(sums[count - 1]) for sums in self._sums]
        num_live = np.count_nonzero(self.state.tables[states[0].number].blocks[self.rows[:count]]) if states else 0
        return _demand(self, blocks, count, int(num_live))

    def span(self) -> tuple[Counts, Counts]:
        return self.start, self._reach

    def append(self) -> None:
        for same, growth, total in zip(self.state.same_block_size, self.growth, self._totals):
            if not total:
                continue
            growing = growth.nonzero()[0]
            rows, more = self.rows[growing], growth[growing]
            for group in same:
                self.state.tables[group.number].append(rows, more, self.state.pages[group.number].allocate(total))

    def set_counters(self) -> None:
        counters = self.state.counters
        counters.lengths[self.rows] = self.after
        ends = [
            self.state.tables[same[0].number].blocks[self.rows] * same[0].slot_tokens
            for same in self.state.same_block_size
        ]
        if self.state.states or self.state.ends_in_block:
            ends.append(counters.next_stop[self.rows] - 1)
        ready = ends[0]
        for end in ends[1:]:
            ready = np.minimum(ready, end)
        counters.ready[self.rows] = ready


StepPages = OneRowPages | ManyRowPages


def _demand(step: StepPages, blocks: list[int], num_rows: int, num_live: int) -> Demand:
    """New blocks, by `CacheState.same_block_size`; for each of the first rows a live state, but for those that have one
    or take one, and one for each draft (no draft of the step before is left)."""
    state = step.state
    demand = [0] * len(state.groups)
    for same, count in zip(state.same_block_size, blocks):
        for group in same:
            demand[group.number] = count
    if state.states:
        num_states = num_rows * (1 + step.options.drafts) - num_live
        if step.takes_states:
            num_states -= sum([step.sequences[i].can_take_states for i in step.stateful if i < num_rows])
        for group in state.states:
            demand[group.number] = num_states
    return demand

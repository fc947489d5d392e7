"""Steps: pages before them, counting after them. A batch of one and a batch of many take the same way.

Any number of steps may lie between `extend` and `commit`: each is planned from where it starts, and what it reads or
writes stays until it is committed. Counters move for all rows at once; rows that need more are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kvweave.cache.allocator import Known, PageAllocator
from kvweave.cache.copies import Copies
from kvweave.cache.publish import Publisher
from kvweave.cache.sequence import Rows, Sequence
from kvweave.cache.snapshots import Snapshots
from kvweave.cache.state import CacheState
from kvweave.cache.step_pages import PLAIN, ManyRowPages, OneRowPages, StepOptions, StepPages
from kvweave.errors import NeverFits, NotSettled, OutOfPages
from kvweave.pool import Counts, PagePool

MANY: Final = 64
"""With more rows than this, pages are ensured before the rows are asked for snapshots: a refusal is then cheap."""


class Steps:
    def __init__(self, state: CacheState, allocator: PageAllocator, snapshots: Snapshots, publisher: Publisher) -> None:
        self.state = state
        self.allocator = allocator
        self.snapshots = snapshots
        self.publisher = publisher
        self._has_drafts = False
        """Whether any step so far may have left states from which drafts can be taken back."""

    # ---- extend

    def extend(
        self, rows: Rows, sequences: list[Sequence], start: Counts, counts: Counts | int, options: StepOptions
    ) -> Copies | None:
        """Allocate pages for `counts` more tokens of each row; `start` are the rows' lengths. All or nothing."""
        counters = self.state.counters
        if self._has_drafts and counters.drafts[rows].any():
            raise NotSettled("drafts of the last step are neither accepted nor rejected: call accept first")
        if len(sequences) == 1:
            copies = self._extend_one(sequences[0], counts if isinstance(counts, int) else int(counts[0]), options)
        else:
            copies = self._extend_many(rows, sequences, start, counts, options)
        if options.drafts:
            self._has_drafts = True
            counters.drafts[rows] = options.drafts
        return copies

    def _extend_one(self, sequence: Sequence, count: int, options: StepOptions) -> Copies | None:
        counters, row = self.state.counters, sequence.row
        start = counters.length_of[row]
        after, copies = start + count, None
        if options.drafts or after + options.lookahead > counters.ready_of[row]:
            copies = self._allocate(OneRowPages(self.state, sequence, start, after, options), sequence.rows)
        else:
            counters.length_of[row] = after
        counters.step_start_of[row] = start
        return copies

    def _extend_many(
        self, rows: Rows, sequences: list[Sequence], start: Counts, counts: Counts | int, options: StepOptions
    ) -> Copies | None:
        counters = self.state.counters
        after = start + counts
        step = self._short_rows(rows, sequences, start, after, options)
        copies = None if step is None else self._allocate(step, rows)
        counters.lengths[rows] = after
        counters.step_start[rows] = start
        return copies

    def _short_rows(
        self, rows: Rows, sequences: list[Sequence], start: Counts, after: Counts, options: StepOptions
    ) -> ManyRowPages | None:
        """The step of those rows that are short of pages, or are to have drafts; None where there is none."""
        reach = after + options.lookahead if options.lookahead else after
        short = reach > self.state.counters.ready[rows]
        num_short = len(rows) if options.drafts else int(np.count_nonzero(short))
        if num_short == len(rows):
            return ManyRowPages(self.state, rows, sequences, start, after, reach, options)
        if not num_short:
            return None
        at = short.nonzero()[0]
        chosen = [sequences[i] for i in at.tolist()]
        return ManyRowPages(self.state, rows[at], chosen, start[at], after[at], reach[at], options)

    def can_extend(self, rows: Rows, sequences: list[Sequence], count: int) -> bool:
        """Whether `extend` by `count` tokens would succeed; changes nothing."""
        start = self.state.counters.lengths[rows]
        step = self._short_rows(rows, sequences, start, start + count, PLAIN)
        if step is None or step.longest > self.state.max_tokens:
            return step is None
        return self._fits(step, {}, len(step.rows)) or (_let_take_states(step) and self._fits(step, {}, len(step.rows)))

    def _allocate(self, step: StepPages, asking: Rows) -> Copies | None:
        """Allocate pages, live states and snapshots for the rows of `step`, which are short of pages; `asking` are all
        rows of the call. Returns the copies to be made before the step."""
        stateful, options = step.stateful, step.options
        if step.longest > self.state.max_tokens or len(stateful) > MANY:
            self._ensure(step, asking)  # before all of them are asked what else they want
        snapshots = [self._snapshots_of(step, i) for i in stateful]
        optional = sum(map(len, snapshots))
        # Snapshots are optional: where they do not fit, the step goes without them.
        if not optional or not self._ensure_with_snapshots(step, optional):
            snapshots = [[] for _ in stateful]
            self._ensure(step, asking)
        step.append()
        copies = Copies() if stateful else None
        for i, positions in zip(stateful, snapshots):
            if step.takes_states and step.sequences[i].can_take_states:
                self.snapshots.take_states(step.sequences[i])
            self._make_states(step.sequences[i], positions, options.in_step, copies)
        if options.drafts:
            self.snapshots.add_columns(step.rows, 1 + options.drafts)
        step.set_counters()
        for i in stateful:
            self.state.set_next_lengths(step.sequences[i])
            self.state.counters.passed_stop_of[step.sequences[i].row] = options.drafts
        return copies

    def _snapshots_of(self, step: StepPages, i: int) -> list[int]:
        """Positions of the states that a row's step should leave, drafts apart."""
        drafts, in_step = step.options.drafts, step.options.in_step
        if drafts and not in_step:
            return []
        return self.snapshots.positions(step.sequences[i], int(step.start[i]), int(step.after[i]) - drafts, in_step)

    def _ensure_with_snapshots(self, step: StepPages, count: int) -> bool:
        """Whether there are so many pages of each state more, made sure of with all others."""
        more = [n + (count if g.is_state else 0) for n, g in zip(step.demand(), self.state.groups)]
        return self.allocator.ensure(more, admits=self.allocator.admits(step.sequences)) is None

    def _ensure(self, step: StepPages, asking: Rows) -> None:
        """Make sure of the pages, or raise with everything as it was."""
        known: Known = {}
        if step.longest > self.state.max_tokens:
            raise self._refusal(self.state.pools[0], step, asking)
        admits = self.allocator.admits(step.sequences)
        pool = self.allocator.ensure(step.demand(), admits=admits, known=known)
        if pool is not None and _let_take_states(step):
            pool = self.allocator.ensure(step.demand(), admits=admits, known=known)
        if pool is not None:
            raise self._refusal(pool, step, asking, partial(self._fits, step, known))

    def _refusal(
        self, pool: PagePool, step: StepPages, asking: Rows, fits: Callable[[int], bool] | None = None
    ) -> OutOfPages | NeverFits:
        demand, drafts = step.demand(), step.options.drafts
        return self.allocator.refusal(pool, demand, step.sequences, *step.span(), asking, fits, drafts)

    def _fits(self, step: StepPages, known: Known, count: int) -> bool:
        """Whether the first `count` rows could be allocated."""
        admits = self.allocator.admits(step.sequences[:count])
        return self.allocator.lacking(step.demand(count), admits=admits, known=known) is None

    def _make_states(self, sequence: Sequence, positions: list[int], in_step: bool, copies: Copies | None) -> None:
        """Live states and the snapshots of a step; what is to be copied before it."""
        assert copies is not None
        state, row = self.state, sequence.row
        self.snapshots.copy_live(sequence, copies)
        for group in state.states:
            table = state.tables[group.number]
            if not table.blocks_of[row]:
                table.write_state(row, state.pages[group.number].allocate_apart(is_needed=True))
        self.snapshots.restore(sequence, copies)
        self.snapshots.reserve(sequence, positions, in_step)

    # ---- commit

    def commit(self, rows: Rows, sequences: list[Sequence], until: Counts | None) -> Copies | None:
        """What was written up to `until`, or all of it, may be shared; returns the copies to be made next."""
        counters = self.state.counters
        if self._has_drafts:
            self._accept_committed(rows, counters.lengths[rows] if until is None else until)
        if len(sequences) == 1:
            row = sequences[0].row
            end = counters.length_of[row] if until is None else int(until[0])
            counters.committed_of[row] = end
            return self._handle_events_of(sequences[0], end) if end >= counters.next_event_of[row] else None
        until = counters.lengths[rows] if until is None else until
        counters.committed[rows] = until
        due = (until >= counters.next_event[rows]).nonzero()[0]
        return self._handle_events(rows[due], [sequences[i] for i in due.tolist()], until[due]) if len(due) else None

    def _accept_committed(self, rows: Rows, until: Counts) -> None:
        """Drafts that are committed to the last are accepted."""
        counters = self.state.counters
        accepted = (until == counters.lengths[rows]) & (counters.drafts[rows] > 0)
        if accepted.any():
            self.snapshots.keep_accepted(rows[accepted], np.zeros(int(accepted.sum()), np.int64))

    def _handle_events_of(self, sequence: Sequence, until: int) -> Copies | None:
        """`_handle_events` for one row, in plain numbers."""
        state, row, copies = self.state, sequence.row, None
        if until >= state.counters.next_point_of[row]:
            copies = Copies()
            self._handle_point(sequence, copies)
        if state.windows:
            self.allocator.advance_windows_of(sequence, until // state.grid * state.grid)
            state.counters.next_event_of[row] = min(state.counters.next_point_of[row], state.moves.next(until))
        return copies

    def _handle_events(self, rows: Rows, sequences: list[Sequence], until: Counts) -> Copies:
        """These rows have passed a point, or windows move on, or others could find more of them."""
        state, counters, copies = self.state, self.state.counters, Copies()
        for i in (until >= counters.next_point[rows]).nonzero()[0].tolist():
            self._handle_point(sequences[i], copies)
        if state.windows:
            numbers = until // state.grid
            for i in (counters.first_unpublished[rows] <= until).nonzero()[0].tolist():
                self.allocator.advance_windows_of(sequences[i], int(numbers[i]) * state.grid)
            needed, next_move = state.moves.look_up(numbers)
            self.allocator.advance_windows(rows, needed)
            counters.next_event[rows] = np.minimum(counters.next_point[rows], next_move)
        return copies

    def _handle_point(self, sequence: Sequence, copies: Copies) -> None:
        """A sequence has passed points, which enter the tree."""
        state, row = self.state, sequence.row
        committed = state.counters.committed_of[row]
        if sequence.copy_at == committed:
            self.snapshots.copy_live(sequence, copies)
            state.set_next_stop(sequence)
        if committed >= state.publish_at(sequence):
            self.publisher.publish(sequence)
        elif state.states:
            late = [point for point in sequence.snapshots if sequence.last_point < point <= committed]
            if late and max(late) != sequence.answer:
                self.publisher.keep_answer(sequence, max(late))
        state.set_next_event(sequence)

    # ---- accept

    def accept(self, rows: Rows, sequences: list[Sequence], lengths: Counts) -> None:
        """The tokens from `lengths` on are rejected; their pages stay, for the next step needs them."""
        state, counters = self.state, self.state.counters
        before, prompts = counters.lengths[rows], counters.prompts[rows]
        drafted = counters.drafts[rows] > 0
        if np.count_nonzero(drafted):
            self.snapshots.keep_accepted(rows[drafted], (before - lengths)[drafted])
        counters.lengths[rows] = lengths
        counters.step_start[rows] = np.minimum(counters.step_start[rows], lengths)
        state.tokens.cut_many(rows, sequences, np.maximum(lengths, prompts))
        for i in counters.passed_stop[rows].nonzero()[0].tolist():
            counters.passed_stop_of[sequences[i].row] = 0
            state.set_next_stop(sequences[i])  # a state that rejected drafts had passed is wanted again


def _let_take_states(step: StepPages) -> bool:
    """Short of pages, rows take the states of their hits, instead of copies, where nobody else needs these; whether
    any can."""
    step.takes_states = any(step.sequences[i].can_take_states for i in step.stateful)
    return step.takes_states

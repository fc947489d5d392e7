"""Pages for sequences, all or nothing: what is asked for is checked first, and evicted for only when it can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from heapq import nsmallest
from itertools import islice

import numpy as np

from kvweave.cache.sequence import Batch, Rows, Sequence
from kvweave.cache.state import CacheState
from kvweave.errors import NeverFits, OutOfPages, Shortage
from kvweave.pool import Ids, PagedGroup, PagePool
from kvweave.table import Counts, spread

MOST_NAMED = 8
"""So many sequences that could be preempted are named in an error."""
RECLAIMED = 64
"""Of so many sequences at a time is taken what they need not hold, until a request can be met."""

Demand = list[int]
"""Pages by group number."""
Reclaimable = dict[str, dict[int, Ids]]
"""By pool and group number: pages that would be free if sequences held no more than their next tokens need."""


class PageAllocator:
    """Makes sure that pages can be allocated. `reserve` is the share of each pool that a sequence which does not run
    yet must leave: free, or evictable."""

    def __init__(self, state: CacheState, reserve: float) -> None:
        self.state = state
        self.reserve = reserve

    # ---- asking

    def ensure(self, demand: Demand, *, admits: bool = False, known: Reclaimable | None = None) -> PagePool | None:
        """Make sure that these pages can be allocated now, by eviction if need be; the pool that cannot give them, if
        there is one: then nothing was changed. Who asks on gets to know what was found out of sequences as `known`."""
        lacking = self.lacking(demand, admits=admits, known=known)
        if lacking is None:
            for pool in self.state.pools:
                if not pool.prepare(demand):
                    self._free_up(pool, demand)
        return lacking

    def lacking(self, demand: Demand, *, admits: bool = False, known: Reclaimable | None = None) -> PagePool | None:
        """The pool that could not give these pages, not even by eviction; changes nothing. Who asks several times
        at one moment passes on what is `known`."""
        known = {} if known is None else known
        for pool in self.state.pools:
            asked = self._with_reserve(pool, demand) if admits and self.reserve else demand
            if pool.is_ready(asked) or pool.could_be_ready(asked, {}):
                continue
            if pool.name not in known:
                known[pool.name] = self._reclaimable(pool)
            if not pool.could_be_ready(asked, known[pool.name]):
                return pool
        return None

    def _with_reserve(self, pool: PagePool, demand: Demand) -> Demand:
        """A pool of which nothing is asked need not have its reserve."""
        largest = max(pool.groups, key=lambda pages: pages.per_superpage)
        asked = list(demand)
        if any(demand[pages.group.number] for pages in pool.groups):
            asked[largest.group.number] += int(self.reserve * pool.num_superpages * largest.per_superpage)
        return asked

    # ---- sequences hold on to what points that are not in the tree yet need; under pressure they need not

    def _behind(self, group: PagedGroup, rows: Rows) -> tuple[Rows, Counts, Counts]:
        """Rows of a window that hold blocks behind what their next token needs: row, first block, how many."""
        first = self.state.tables[group.number].first[rows]
        behind = group.first_blocks(self.state.counters.committed[rows]) - first
        moving = behind > 0
        return rows[moving], first[moving], behind[moving]

    def _spare_snapshots(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Snapshots that no step in flight is to write: taken and not in the tree yet, or still to be copied."""
        committed = self.state.counters.committed_of
        return [
            (sequence, position)
            for sequence in sequences
            for position in sequence.snapshots
            if position <= committed[sequence.row] or position == sequence.copy_at
        ]

    def _reclaimable(self, pool: PagePool) -> dict[int, Ids]:
        """Pages that would be free if sequences held no more than their next tokens need."""
        found: dict[int, Ids] = {}
        running = self.state.by_row
        spare = self._spare_snapshots(running.values()) if self.state.states else []
        for pages in pool.groups:
            group = pages.group
            if group.is_state and spare:
                nth = self.state.states.index(group)
                found[group.number] = np.array([sequence.snapshots[at][nth] for sequence, at in spare], np.int32)
            if group.is_window and running:
                rows, first, count = self._behind(group, np.fromiter(running, np.int64, len(running)))
                parked = [run for s in running.values() for _, run in s.parked.get(group.number, ())]
                behind = self.state.tables[group.number].pages[spread(rows, first, count)]
                held, times = np.unique(np.concatenate([behind, *parked]), return_counts=True)
                found[group.number] = held[times == pages.num_names(held)]
        return found

    def advance_windows(self, rows: Rows, first_blocks: list[Counts]) -> None:
        """Let windows go on to these first blocks of each row: what they have passed leaves the tables."""
        for group, needed in zip(self.state.windows, first_blocks):
            first = self.state.tables[group.number].first[rows]
            moving = needed > first
            if np.count_nonzero(moving):
                self._pass(group, rows[moving], first[moving], (needed - first)[moving])

    def advance_windows_of(self, sequence: Sequence, end: int) -> None:
        """The same for one sequence; pages that points which are not in the tree yet need are parked beside the table.

        first                                       first_block(end)
        |.......|############|......|###############|          #: [tail(point), point) of such points
        """
        row = sequence.row
        for group in self.state.windows:
            table, size = self.state.tables[group.number], group.slot_tokens
            first, last = table.first_of[row], min(group.first_block(end), table.blocks_of[row])
            if last <= first:
                continue
            pages, at, gone = table.pages[row, first:last].copy(), first, []
            for point in self.state.passed_points(sequence, first * size, end):
                low, high = max(group.first_block(point), at), min(point // size, last)
                if high > low:
                    gone.append(pages[at - first : low - first])
                    sequence.parked.setdefault(group.number, []).append((low, pages[low - first : high - first]))
                    at = high
            gone.append(pages[at - first :])
            table.first_of[row] = last
            table.erase(row, first, last)
            self.state.pages[group.number].release(gone[0] if len(gone) == 1 else np.concatenate(gone))

    def _pass(self, group: PagedGroup, rows: Rows, first: Counts, passed: Counts) -> None:
        """Take `passed` slots of each row, from `first` on, out of a window's table."""
        table = self.state.tables[group.number]
        table.first[rows] = first + passed
        slots = first
        if passed[passed.argmax()] > 1:
            rows, slots = spread(rows, first, passed)
        pages = table.pages[rows, slots]
        table.write_many(rows, slots, np.zeros(len(slots), np.int32))
        self.state.pages[group.number].release(pages)

    def _reclaim(self, sequences: list[Sequence]) -> None:
        """Let sequences hold no more than their next tokens need."""
        for sequence, position in self._spare_snapshots(sequences):
            self.state.free_states(sequence.snapshots.pop(position))
            sequence.copy_at = -1 if position == sequence.copy_at else sequence.copy_at
            sequence.answer = -1
            self.state.set_next_event(sequence)
        for sequence in sequences:
            self.state.release_parked(sequence)
        for group in self.state.windows:
            rows, first, count = self._behind(group, Batch(sequences).rows)
            if len(rows):
                self._pass(group, rows, first, count)

    # ---- evicting

    def _free_up(self, pool: PagePool, demand: Demand) -> None:
        """Evict until the pages can be allocated: of each group its own first, then whatever the policy says, then what
        sequences hold and do not need yet."""
        prefix = self.state.prefix
        promised = 0  # super-pages for groups before
        for pages in pool.groups:
            count = demand[pages.group.number]
            superpages = max(0, pool.free_superpages.size - promised)
            short = count - pages.free_pages.size - superpages * pages.per_superpage
            if short > 0:
                prefix.evict(pages.group, min(short, pages.num_evictable))
            promised += pages.superpages_for(count)
        rows = [pages for pages in pool.groups if not pages.group.is_state]
        tokens = min((pages.group.slot_tokens * pages.per_superpage for pages in rows), default=1)
        running = iter(list(self.state.by_row.values()))
        while not pool.is_ready(demand):
            if not prefix.evict_next(tokens):
                some = list(islice(running, RECLAIMED))
                assert some, f"pool {pool.name}: {demand} pages could be had, but were not"
                self._reclaim(some)
        assert pool.prepare(demand), "what is ready can be prepared"

    # ---- refusing

    def refusal(
        self,
        pool: PagePool,
        sequences: list[Sequence],
        starts: Counts,
        ends: Counts,
        fits: Callable[[int], bool] | None = None,
        others: SequenceOf[Sequence] = (),
    ) -> OutOfPages | NeverFits:
        """Why `sequences` cannot get pages for the tokens from `starts` to `ends`; `fits` says whether the first so
        many of them could. `others` are served by the same call, if more than they are."""
        never = self.never_fits(starts, ends)
        if never is not None:
            return never
        low, high = 0, len(sequences)
        while high - low > 1 and fits is not None:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        preemptible = self._preemptible(others or sequences)
        return OutOfPages(pool.name, self._shortages(pool, ends, sequences), sequences[low:], preemptible)

    def _shortages(self, pool: PagePool, ends: Counts, sequences: list[Sequence]) -> list[Shortage]:
        shortages, rows = [], np.array([sequence.row for sequence in sequences])
        for pages in pool.groups:
            group = pages.group
            blocks = np.ones_like(ends) if group.is_state else -(-ends // group.slot_tokens)
            wanted = int(np.maximum(blocks - self.state.tables[group.number].blocks[rows], 0).sum())
            if wanted:
                shortages.append(Shortage(group.tag, wanted, pool.available(pages), pages.num_evictable))
        return shortages

    def _preemptible(self, asking: SequenceOf[Sequence]) -> list[Sequence]:
        """Other running sequences: of the lowest priority first, then the youngest."""
        rows = {sequence.row for sequence in asking}
        others = [sequence for row, sequence in self.state.by_row.items() if row not in rows]
        return nsmallest(MOST_NAMED, others, key=lambda sequence: (sequence.priority, -sequence.opened))

    def never_fits(self, starts: Counts, ends: Counts) -> NeverFits | None:
        """Why a sequence of which the tokens [start, end) are computed in one step would not fit an empty cache; for
        several such steps at once."""
        state = self.state
        if (most := int(ends.max())) > state.max_tokens:
            return NeverFits(
                f"{most} tokens are more than the {state.max_tokens} that the cache was made for: make it with a larger"
                " max_tokens",
                available_bytes=state.plan.num_bytes,
                smallest_bytes=state.plan.num_bytes,
            )
        for pool in state.pools:
            superpages = np.zeros(len(starts), np.int64)
            for pages in pool.groups:
                superpages += -(-pages.group.blocks_for(starts, ends) // pages.per_superpage)
            too_many = np.flatnonzero(superpages > pool.num_superpages)
            if len(too_many):
                at = int(too_many[-1])
                need = int(superpages[at])
                unit = state.plan.pool(pool.name).unit_bytes
                return NeverFits(
                    f"a sequence of {ends[at]} tokens, those from {starts[at]} on in one step, takes {need} super-pages"
                    f" of pool {pool.name!r}, which has {pool.num_superpages}; take shorter steps where layers have"
                    " windows, or plan with more memory",
                    available_bytes=pool.num_superpages * unit,
                    smallest_bytes=(need + 1) * unit,
                )
        return None

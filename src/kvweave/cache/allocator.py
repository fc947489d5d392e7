"""Pages for sequences, all or nothing: nothing is evicted for a request unless eviction can satisfy all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import gcd, lcm

import numpy as np

from kvweave.cache.sequence import Batch, Rows, Sequence
from kvweave.cache.state import CacheState
from kvweave.errors import NeverFits, OutOfPages, Shortage
from kvweave.pool import Counts, Ids, Obtainable, PagedGroup, PagePool
from kvweave.pool.page_pool import Demand
from kvweave.prefix import StatePages
from kvweave.table import spread

MOST_NAMED = 8
"""An error names at most this many sequences that could be preempted."""
MOST_EVICTED = 64
"""After this many evicted points it is checked again whether the request can be met."""
RECLAIMED = 64
"""Pages that sequences hold and do not need are reclaimed from this many sequences at a time."""

Known = dict[str, Obtainable]
"""By pool: what it could give if sequences held no more than their next tokens need."""


class PageAllocator:
    """Makes sure that pages can be allocated. `reserve` is the share of each pool that a sequence which does not run
    yet must leave to those that do: free, or evictable."""

    def __init__(self, state: CacheState, reserve: float) -> None:
        self.state = state
        self.reserve = reserve

    # ---- asking

    def admits(self, sequences: list[Sequence]) -> bool:
        """Whether the reserve must stay: one of these sequences does not run yet, and is not alone."""
        if not self.reserve or not any(s.length == s.num_cached for s in sequences):
            return False
        return len(sequences) > 1 or any(s.length != s.num_cached for s in self.state.by_row.values())

    def ensure(self, demand: Demand, *, admits: bool = False, known: Known | None = None) -> PagePool | None:
        """Make sure that these pages can be allocated now, by eviction if need be; the pool that cannot give them, if
        there is one: then nothing was changed. `known` is filled as by `lacking`."""
        lacking = self.lacking(demand, admits=admits, known=known)
        if lacking is None:
            for pool in self.state.pools:
                if not pool.prepare(demand):
                    self._free_up(pool, demand)
        return lacking

    def lacking(self, demand: Demand, *, admits: bool = False, known: Known | None = None) -> PagePool | None:
        """The pool that could not give these pages, not even by eviction; changes nothing. `known` keeps what was
        computed, for further calls at the same moment."""
        known = {} if known is None else known
        for pool in self.state.pools:
            asked = self._with_reserve(pool, demand) if admits else demand
            if pool.name not in known:
                if pool.lack(asked) <= 0 or Obtainable(pool, {}).covers(asked):
                    continue
                known[pool.name] = Obtainable(pool, self._reclaimable(pool))
            if not known[pool.name].covers(asked):
                return pool
        return None

    def _with_reserve(self, pool: PagePool, demand: Demand) -> Demand:
        """A pool of which nothing is asked need not have its reserve."""
        largest = max(pool.groups, key=lambda pages: pages.per_superpage)
        asked = list(demand)
        if any(demand[pages.group.number] for pages in pool.groups):
            asked[largest.group.number] += int(self.reserve * pool.num_superpages * largest.per_superpage)
        return asked

    # ---- pages that sequences hold for points that are not published yet; under pressure they are reclaimed

    def _behind(self, group: PagedGroup, rows: Rows) -> tuple[Rows, Counts, Counts]:
        """Rows of a window that hold blocks behind what their next token needs: row, first block, how many."""
        first = self.state.tables[group.number].first[rows]
        behind = group.first_blocks(self.state.counters.committed[rows]) - first
        moving = behind > 0
        return rows[moving], first[moving], behind[moving]

    def _is_spare(self, sequence: Sequence, position: int) -> bool:
        """Whether no step in flight is to write a snapshot: taken and not in the tree yet, or still to be copied."""
        return position <= self.state.counters.committed_of[sequence.row] or position == sequence.copy_at

    def _reclaimable(self, pool: PagePool) -> dict[int, Ids]:
        """Pages that would be free if sequences held no more than their next tokens need."""
        found: dict[int, Ids] = {}
        retaining = [self.state.by_row[row] for row in self.state.retaining_rows]
        rows, unwritten = self.state.counters.prompts.nonzero()[0], self._unwritten_snapshots()
        for pages in pool.groups:
            group = pages.group
            if group.is_state:
                nth = self.state.states.index(group)
                in_flight = np.array([states[nth] for states in unwritten], np.int32)
                found[group.number] = pages.snapshots_but(in_flight)
            elif group.is_window:
                passed = self.state.tables[group.number].pages[spread(*self._behind(group, rows))]
                retained = [run for s in retaining for _, run in s.retained.get(group.number, ())]
                found[group.number] = pages.referenced_only_by(np.concatenate([passed, *retained]))
        return found

    def _unwritten_snapshots(self) -> list[StatePages]:
        """Pages of those that steps in flight are still to write."""
        counters, running = self.state.counters, self.state.by_row
        rows = (counters.last_snapshot > counters.committed).nonzero()[0].tolist()
        return [
            pages
            for sequence in [running[row] for row in rows]
            for position, pages in sequence.snapshots.items()
            if not self._is_spare(sequence, position)
        ]

    def advance_windows(self, rows: Rows, first_blocks: list[Counts]) -> None:
        """Move windows to these first blocks of each row, and release the blocks before them."""
        for group, needed in zip(self.state.windows, first_blocks):
            first = self.state.tables[group.number].first[rows]
            moving = needed > first
            if np.count_nonzero(moving):
                self._release_passed(group, rows[moving], first[moving], (needed - first)[moving])

    def advance_windows_of(self, sequence: Sequence, end: int) -> None:
        """The same for one sequence; pages that unpublished points need leave the table and are retained.

        first                                       first_block(end)
        |.......|############|......|###############|          #: [tail(point), point) of unpublished points
        """
        row = sequence.row
        for group in self.state.windows:
            table, size = self.state.tables[group.number], group.slot_tokens
            first, last = table.first_of[row], min(group.first_block(end), table.blocks_of[row])
            if last <= first:
                continue
            kept: list[tuple[int, int]] = []  # as few runs as they are: points may lie close together
            for point in self.state.passed_points(sequence, first * size, end):
                low, high = max(group.first_block(point), first), min(point // size, last)
                if kept and low <= kept[-1][1]:
                    low = kept.pop()[0]
                if low < high:
                    kept.append((low, high))
            pages, at, gone = table.pages[row, first:last].copy(), first, []
            for low, high in kept:
                gone.append(pages[at - first : low - first])
                self.state.retain(sequence, group, low, pages[low - first : high - first])
                at = high
            gone.append(pages[at - first :])
            table.first_of[row] = last
            table.erase(row, first, last)
            self.state.pages[group.number].release(gone[0] if len(gone) == 1 else np.concatenate(gone))

    def _release_passed(self, group: PagedGroup, rows: Rows, first: Counts, passed: Counts) -> None:
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
        for sequence in sequences:
            for position in [at for at in sequence.snapshots if self._is_spare(sequence, at)]:
                self.state.free_snapshot(sequence.snapshots.pop(position))
                sequence.copy_at = -1 if position == sequence.copy_at else sequence.copy_at
                self.state.set_next_event(sequence)
            if not sequence.snapshots:
                self.state.counters.last_snapshot_of[sequence.row] = 0
            self.state.release_retained(sequence)
        for group in self.state.windows:
            rows, first, count = self._behind(group, Batch(sequences).rows)
            if len(rows):
                self._release_passed(group, rows, first, count)

    def _with_spare(self) -> Iterator[Sequence]:
        """Sequences that may hold more than their next tokens need."""
        rows, has_spare = self.state.counters.prompts.nonzero()[0], self.state.counters.last_snapshot > 0
        has_spare[list(self.state.retaining_rows)] = True
        for group in self.state.windows:
            has_spare[self._behind(group, rows)[0]] = True
        for row in has_spare.nonzero()[0].tolist():
            yield self.state.by_row[row]

    # ---- evicting

    def _free_up(self, pool: PagePool, demand: Demand) -> None:
        """Evict until the pages can be allocated: whatever the policy says, after what helps a group that has several
        pages in a super-page; then what sequences hold and do not need yet."""
        prefix, spare = self.state.prefix, None
        while (lack := pool.lack(demand)) > 0:
            if not pool.is_whole and self._evict_own(pool, demand):
                continue
            if prefix.evict_next(lack * pool.tokens_per_superpage, pool.is_full):
                continue
            spare = self._with_spare() if spare is None else spare
            some = list(islice(spare, RECLAIMED))
            assert some, f"pool {pool.name}: {demand} pages could be had, but were not"
            self._reclaim(some)
        assert pool.prepare(demand), "what is ready can be prepared"

    def _evict_own(self, pool: PagePool, demand: Demand) -> bool:
        """Evict pages of groups that are short of some and need no whole super-page, a few points at a time; whether
        any went."""
        promised, evicted = 0, False  # super-pages for groups before
        for pages in pool.groups:
            count = demand[pages.group.number]
            superpages = max(0, pool.free_superpages.size - promised)
            short = min(count - pages.free_pages.size - superpages * pages.per_superpage, pages.num_evictable)
            if short > 0 and not pages.is_whole:
                before = pages.num_evicted
                self.state.prefix.evict(pages.group, short, MOST_EVICTED)
                evicted = evicted or pages.num_evicted > before
            promised += pages.superpages_for(count)
        return evicted

    # ---- refusing

    def refusal(
        self,
        pool: PagePool,
        demand: Demand,
        sequences: list[Sequence],
        starts: Counts,
        ends: Counts,
        asking: Rows,
        fits: Callable[[int], bool] | None = None,
        drafts: int = 0,
    ) -> OutOfPages | NeverFits:
        """Why `sequences`, which demand so many pages, cannot get them for the tokens from `starts` to `ends`, of which
        the last `drafts` have a state each. `asking` are all rows that the same call serves; `fits` says whether the
        first so many of `sequences` could."""
        if self.never_fits(starts.min(keepdims=True), ends.max(keepdims=True), drafts) is not None:  # more than any
            never = self.never_fits(starts, ends, drafts)
            if never is not None:
                return never
        low, high = 0, len(sequences)
        while high - low > 1 and fits is not None:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        shortages = [
            Shortage(pages.group.tag, demand[pages.group.number], pool.available(pages), pages.num_evictable)
            for pages in pool.groups
            if demand[pages.group.number]
        ]
        return OutOfPages(pool.name, shortages, sequences[low:], self._preemptible(asking))

    def _preemptible(self, asking: Rows) -> list[Sequence]:
        """Other running sequences: of the lowest priority first, then the youngest."""
        counters, is_other = self.state.counters, self.state.counters.prompts > 0
        is_other[asking] = False
        rows = is_other.nonzero()[0]
        first = np.lexsort((-counters.opened[rows], counters.priority[rows]))[:MOST_NAMED]
        return [self.state.by_row[row] for row in rows[first].tolist()]

    def never_fits_in_steps(self, num_tokens: int, step_tokens: int) -> NeverFits | None:
        """Why a sequence that is computed in such steps, the first of them from a hit on, would not fit.

        Pages of full attention are the most at the end, and those of windows come again where all that they hold
        repeats: so only the last steps are asked.
        """
        if num_tokens > self.state.max_tokens:
            return self._too_long(num_tokens)
        grid = self.state.grid
        apart = gcd(step_tokens, grid)
        spans = [max(1, (group.reach.span or 1) - group.reach.head) for group in self.state.windows]
        first = max(0, num_tokens - step_tokens - lcm(grid, *spans)) // apart * apart
        starts, steps = np.arange(first, num_tokens, apart), np.arange(grid // apart) * step_tokens
        soonest = np.zeros(grid, np.int64)  # by offset from the grid: where the first step with that offset starts
        soonest[steps % grid] = steps
        starts = starts[starts >= soonest[starts % grid]]
        return self.never_fits(starts, np.minimum(starts + step_tokens, num_tokens))

    def _too_long(self, num_tokens: int) -> NeverFits:
        state = self.state
        return NeverFits(
            f"{num_tokens} tokens are more than the {state.max_tokens} that the cache was made for: make it with a"
            " larger max_tokens",
            available_bytes=state.plan.num_bytes,
            smallest_bytes=state.plan.num_bytes,
        )

    def never_fits(self, starts: Counts, ends: Counts, drafts: int = 0) -> NeverFits | None:
        """Why a sequence of which the tokens [start, end) are computed in one step, the last `drafts` of them with a
        state each, would not fit an empty cache; for several such steps at once."""
        state = self.state
        if (most := int(ends.max())) > state.max_tokens:
            return self._too_long(most)
        for pool in state.pools:
            superpages = np.zeros(len(starts), np.int64)
            for pages in pool.groups:
                blocks = pages.group.blocks_for(starts, ends)
                if pages.group.is_state:
                    blocks += drafts
                superpages += -(-blocks // pages.per_superpage)
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

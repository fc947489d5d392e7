"""What a cache knows: its groups, tables and pools, the prefix cache, and for each row of the tables a few counters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvweave.cache.row_counters import RowCounters
from kvweave.cache.sequence import Sequence
from kvweave.cache.token_log import TokenLog
from kvweave.cache.window_moves import WindowMoves
from kvweave.plan import Plan
from kvweave.policy import Policy, order_of
from kvweave.pool import Ids, NoPages, PagedGroup, PagePool
from kvweave.pool.group import paged_groups
from kvweave.prefix import NEVER, Event, PrefixCache, Retention
from kvweave.table import BlockTable


class CacheState:
    """Shared by the parts of a cache."""

    def __init__(
        self,
        plan: Plan,
        rows: int,
        max_tokens: int,
        max_drafts: int,
        policy: str | Policy,
        retention: Retention,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.plan = plan
        self.max_tokens = max_tokens
        self.max_drafts = max_drafts
        self.groups = paged_groups(plan)
        with_pages = [group for group in self.groups if group.has_pages]
        self.pools = [PagePool(pool, [g for g in with_pages if g.pool == pool.name]) for pool in plan.pools]
        by_number = {pages.group.number: pages for pool in self.pools for pages in pool.groups}
        self.pages = [by_number.get(group.number) or NoPages(group) for group in self.groups]
        """By group number."""
        self.prefix = PrefixCache(self.groups, self.pages, order_of(policy, self.groups), on_event)
        tree = self.prefix.tree
        self.rows, self.full, self.windows, self.states = tree.rows, tree.full, tree.windows, tree.states
        self.state_tags = [group.tag for group in self.states]
        widths = [1 + max_drafts if g.is_state else -(-max_tokens // g.slot_tokens) for g in self.groups]
        self.tables = [BlockTable(group, rows, width) for group, width in zip(self.groups, widths)]
        sizes = sorted({group.slot_tokens for group in self.rows})
        self.same_block_size = [[group for group in self.rows if group.slot_tokens == size] for size in sizes]
        """Groups of rows whose tables have as many blocks as one another, always."""
        self.ends_in_block = any(max_tokens % size for size in sizes)
        """Whether a table's last block goes beyond `max_tokens`."""
        self.grid = self.prefix.grid
        self.retention = retention
        self.spacing = retention.spacing(plan, self.grid)
        self.sparse_spacing = retention.sparse_spacing(plan, self.grid)
        self.moves = WindowMoves(self.windows, self.grid, max_tokens)
        self.decode_every = -(-retention.decode_every // self.grid) * self.grid
        self.counters = RowCounters(rows)
        self.tokens = TokenLog(self.counters, rows)
        self.by_row: dict[int, Sequence] = {}
        self.retaining_rows: set[int] = set()
        """Rows of sequences with retained pages."""
        self.num_closed = 0
        """Sequences closed or reordered so far; batches made before must be looked at again."""
        self._free_rows = list(range(rows - 1, -1, -1))

    # ---- rows

    def take_row(self) -> int:
        if not self._free_rows:
            old = len(self.counters.lengths)
            for table in self.tables:
                table.add_rows(old)
            self.counters.add_rows(old)
            self.tokens.add_rows(old)
            self._free_rows = list(range(2 * old - 1, old - 1, -1))
        return self._free_rows.pop()

    def free_row(self, sequence: Sequence) -> None:
        del self.by_row[sequence.row]
        counters, row = self.counters, sequence.row
        counters.committed_of[row] = counters.prompt_of[row] = counters.last_snapshot_of[row] = 0
        counters.generation_of[row] += 1
        self._free_rows.append(row)
        self.num_closed += 1
        sequence.row = -1

    # ---- lengths at which there is more to do than to count

    def set_ready_of(self, row: int) -> None:
        """Note how far `extend` need only count: within the pages, before the next state that is wanted or the end."""
        ready = self.counters.next_stop_of[row] - 1
        for same in self.same_block_size:
            ready = min(ready, self.tables[same[0].number].blocks_of[row] * same[0].slot_tokens)
        self.counters.ready_of[row] = ready

    def set_next_lengths(self, sequence: Sequence) -> None:
        """Note where `extend` and `commit` have more to do with a sequence than to count."""
        self.set_next_stop(sequence)
        self.set_next_event(sequence)

    def set_next_stop(self, sequence: Sequence) -> None:
        """Note the next length at which `extend` has to do with states (at once where one is to be copied or made), or
        has no room for any sequence."""
        row, stop = sequence.row, self.max_tokens + 1
        if self.states:
            length = self.counters.length_of[row]
            has_live = bool(self.tables[self.states[0].number].blocks_of[row])
            at_once = sequence.copy_at >= 0 or not has_live
            stop = min(stop, length + 1 if at_once else self.next_wanted(sequence, length))
        self.counters.next_stop_of[row] = stop
        self.set_ready_of(row)

    def set_next_event(self, sequence: Sequence) -> None:
        """Note at which committed length points enter the tree, a state is copied, or a window moves on."""
        row, counters = sequence.row, self.counters
        committed = counters.committed_of[row]
        counters.first_unpublished_of[row] = first = self.first_unpublished(sequence)
        point = self.publish_at(sequence)
        if self.states:
            point = min(point, first if first > sequence.last_point else NEVER)
            point = sequence.copy_at if 0 <= sequence.copy_at < point else point
        point = max(point, committed + 1)
        counters.next_point_of[row] = point
        counters.next_event_of[row] = min(point, self.moves.next(committed))

    def publish_at(self, sequence: Sequence) -> int:
        """The committed length at which a sequence publishes by itself: the last point of its prompt, or never."""
        if sequence.private_from < sequence.last_point:
            return NEVER
        if self.states and not any(point <= sequence.last_point for point in sequence.snapshots):
            return NEVER
        return sequence.last_point or NEVER

    def first_unpublished(self, sequence: Sequence) -> int:
        """The first wanted point that neither is in the tree nor has all it needs kept."""
        if self.states:
            for point in sequence.snapshots:
                if point != sequence.answer:
                    return point
            return NEVER
        return sequence.next_point(sequence.node.end) if self.windows else NEVER

    def passed_points(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Wanted points in (start, end] that neither are in the tree nor have all they need kept, ascending."""
        if self.states:
            return [p for p in sequence.snapshots if start < p <= end and p != sequence.answer]
        return sequence.points_in(max(start, sequence.node.end), end)

    # ---- where resume points are wanted

    def plan_points(self, sequence: Sequence) -> None:
        """Choose where a prompt leaves resume points: full attention alone can resume anywhere."""
        if not (self.windows or self.states):
            return
        grid, back = self.grid, sequence.drop_last_blocks * self.grid
        start, last = sequence.num_cached, (sequence.num_prompt - 1) // grid * grid
        sequence.asked_points, sequence.prompt_points, sequence.last_point = [], [], 0
        if start >= last and sequence.given_points is None:
            return
        branches = [sequence.branch, *sequence.expected_branches] if self.retention.branches else []
        # a hit stops `back` tokens before what matches, so what matches must go on behind the point
        ends = {last, last - back} if self.retention.prompt_end else set()
        spacing = self.sparse_spacing if self.prefix.has_evicted else self.spacing
        asked, spaced = {*ends, *(branch - back for branch in branches)}, spacing.between(start, last)
        asked.update(sequence.remembered if self.retention.branches else ())
        if sequence.given_points is not None:
            asked, spaced = {point // grid * grid for point in sequence.given_points}, []
            last = max([start, *asked])
        sequence.asked_points = sorted(point for point in asked if start < point <= last)
        sequence.prompt_points = sorted({*spaced, *sequence.asked_points})
        sequence.last_point = last

    def add_branch(self, sequence: Sequence, position: int) -> None:
        """Want a point of an open prompt where another leaves it, if its retention leaves any there, and no pages are
        allocated beyond."""
        branch = position // self.grid * self.grid
        point = branch - sequence.drop_last_blocks * self.grid
        is_ahead = self.counters.length_of[sequence.row] < point < sequence.num_prompt
        if not self.retention.branches or sequence.given_points is not None or not is_ahead:
            return
        if self.windows or self.states:
            sequence.expected_branches = [*sequence.expected_branches, branch]
            sequence.asked_points = sorted({*sequence.asked_points, point})
            sequence.prompt_points = sorted({*sequence.prompt_points, point})
            self.set_next_lengths(sequence)

    def next_wanted(self, sequence: Sequence, position: int) -> int:
        """The first position after `position` whose state is wanted: in the prompt, then now and again."""
        wanted = sequence.next_point(position)
        if wanted < NEVER:
            return wanted
        return position // self.decode_every * self.decode_every + self.decode_every

    def num_shareable(self, sequence: Sequence) -> int:
        """Tokens of a sequence that others may find: written, not private, and their ids known."""
        known = min(self.counters.committed_of[sequence.row], sequence.num_tokens)
        return min(known, sequence.private_from)  # a `min` of two is compiled

    # ---- pages

    def free_snapshot(self, pages: tuple[int, ...]) -> None:
        """A page of each state group, which nobody holds any more."""
        for group, page in zip(self.states, pages):
            self.pages[group.number].free_one(page)

    def retain(self, sequence: Sequence, group: PagedGroup, first: int, pages: Ids) -> None:
        """A sequence holds pages of a window, from block `first` on, for unpublished points."""
        sequence.retained.setdefault(group.number, []).append((first, pages))
        self.retaining_rows.add(sequence.row)

    def release_retained(self, sequence: Sequence) -> None:
        """Unpublished points need their pages no more."""
        self.retaining_rows.discard(sequence.row)
        for number, runs in sequence.retained.items():
            self.pages[number].release(np.concatenate([pages for _, pages in runs]))
        sequence.retained = {}

    def drop_restore(self, sequence: Sequence) -> None:
        """The states of its hit were copied, or are not wanted."""
        if sequence.restore is not None:
            self.prefix.pin_states(sequence.restore, -1)
            sequence.restore = None

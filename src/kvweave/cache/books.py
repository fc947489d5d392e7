"""The books: every array that says who has what, one row a sequence, shared by the parts of a cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from kvweave.cache.sequence import Rows, Sequence
from kvweave.plan import Plan
from kvweave.pool import NULL, Ids, PoolPages
from kvweave.prefix import Event, Node, Policy, Prefix, Retention, tree_groups
from kvweave.table import Counts, GroupTable

NEVER = np.iinfo(np.int64).max
RECENT = 256
"""Generated tokens that are kept by row before they are handed to their sequences."""


class Books:
    """Tables, pools and the prefix tree of a plan, and what is known of each row.

    `lengths` is how many tokens have a place, `committed` how many are true. `room` is the length up to which the
    tables reach, `wake` the committed length at which there is more to do than to count, `mark` the one at which a
    resume point is wanted.
    """

    def __init__(
        self,
        plan: Plan,
        rows: int,
        max_tokens: int,
        policy: Policy,
        retention: Retention,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.plan = plan
        self.tables = [GroupTable(group, rows, max_tokens, plan.num_pages(group.tag)) for group in plan.groups]
        self.numbers = {table.tag: number for number, table in enumerate(self.tables)}
        self.pools = [PoolPages(pool, [g for g in plan.groups if g.pool == pool.name]) for pool in plan.pools]
        by_name = {pool.name: pool for pool in self.pools}
        self.pool_of = [by_name.get(group.pool) for group in plan.groups]
        sizes = [plan.stride_bytes(group.tag) for group in plan.groups]
        self.prefix = Prefix(tree_groups(plan), sizes, self.give_back, policy, on_event)
        self.grid = self.prefix.tree.grid
        self.retention = retention
        self.spacing = retention.spacing(plan, self.grid)
        self.states = [number for number, table in enumerate(self.tables) if not table.per_token]
        self.windows = [n for n, t in enumerate(self.tables) if t.per_token and t.reach.span is not None]
        self.lengths: Counts = np.zeros(rows, np.int64)
        self.committed, self.room, self.wake, self.mark, self.fill = (np.zeros(rows, np.int64) for _ in range(5))
        self.recent: Ids = np.zeros((rows, RECENT), np.int32)
        self.by_row: dict[int, Sequence] = {}
        self.dirty: set[int] = set()
        """Rows with something committed that is not in the tree yet."""
        self.closes = 0
        """How many sequences were closed; batches made before must be looked at again."""
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def state_tags(self) -> list[str]:
        return [self.tables[number].tag for number in self.states]

    # ---- rows

    def take_row(self) -> int:
        if not self._free_rows:
            self._add_rows(len(self.lengths))
        return self._free_rows.pop()

    def _add_rows(self, count: int) -> None:
        old, new = len(self.lengths), len(self.lengths) + count
        for table in self.tables:
            table.grow(new, 0)
        for name in ("lengths", "committed", "room", "wake", "mark", "fill"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(count, np.int64)]))
        self.recent = np.concatenate([self.recent, np.zeros((count, RECENT), np.int32)])
        self._free_rows = list(range(new - 1, old - 1, -1))

    def free_row(self, sequence: Sequence) -> None:
        row = sequence.row
        for table in self.tables:
            table.clear(row)
        self.fill[row] = 0
        self.dirty.discard(row)
        del self.by_row[row]
        self._free_rows.append(row)
        self.closes += 1
        sequence.row = -1

    def copy_row(self, source: int, row: int) -> None:
        """A forked sequence stands where its parent does."""
        for array in (self.lengths, self.committed, self.room, self.wake, self.mark):
            array[row] = array[source]

    def enter(self, sequence: Sequence, node: Node) -> None:
        """Put a new sequence into its row, and the pages of its hit into the tables."""
        row, position = sequence.row, node.end
        self.by_row[row] = sequence
        self.lengths[row] = self.committed[row] = self.room[row] = position
        self.mark[row] = self.next_mark(sequence, position)
        self.wake[row] = min(position + self.grid, int(self.mark[row]))
        path = node.path()
        for number, table in enumerate(self.tables):
            if not table.per_token:
                if position:
                    sequence.restore.append((number, int(node.pages[number][-1])))
                continue
            pages = np.concatenate([n.pages[number] for n in path]) if path else np.empty(0, np.int32)
            first = table.reach.tail(position) // table.slot_tokens
            pages[table.head_blocks : first] = NULL
            self.widen(table, len(pages))
            table.write(row, 0, pages)
            table.first[row] = max(first, table.head_blocks)
            table.shared[row] = table.blocks[row] = len(pages)

    def set_room(self, rows: Rows) -> None:
        """Note up to which length the tables of these rows reach."""
        room = np.full(len(rows), NEVER)
        for table in self.tables:
            if table.per_token:
                room = np.minimum(room, table.blocks[rows] * table.slot_tokens)
        self.room[rows] = room

    def widen(self, table: GroupTable, slots: int) -> None:
        if slots > table.pages.shape[1]:
            table.grow(len(self.lengths), max(slots, 2 * table.pages.shape[1]))

    def give_back(self, number: int, pages: Ids) -> int:
        """Let go of pages of a group; returns how many became free."""
        pool = self.pool_of[number]
        return pool.release(self.tables[number].tag, pages) if pool and len(pages) else 0

    # ---- tokens

    def remember(self, rows: Rows, tokens: Ids) -> None:
        """Keep generated tokens by row; sequences get them when they are asked for."""
        width = tokens.shape[1]
        full = self.fill[rows] + width > RECENT
        if full.any():
            for row in rows[full].tolist():
                self.flush_tokens(self.by_row[row])
        if width > RECENT:
            for row, line in zip(rows.tolist(), tokens, strict=True):
                self.by_row[row].add_tokens(line)
            return
        at = self.fill[rows]
        for column in range(width):
            self.recent[rows, at + column] = tokens[:, column]
        self.fill[rows] = at + width

    def flush_tokens(self, sequence: Sequence) -> None:
        fill = int(self.fill[sequence.row]) if sequence.is_open else 0
        if fill:
            sequence.add_tokens(self.recent[sequence.row, :fill])
            self.fill[sequence.row] = 0

    # ---- resume points

    def want_points(self, sequence: Sequence) -> None:
        """Where a prompt should leave resume points, beyond its end: only windows and states need any."""
        if not self.prefix.tree.trailing:
            return
        start, last = sequence.num_cached, (sequence.num_prompt - 1) // self.grid * self.grid
        points = {last if self.retention.prompt_end else 0, sequence.branch if self.retention.branches else 0}
        sequence.points = sorted(point for point in points if start < point <= last)
        if self.spacing:
            sequence.on_the_way = list(range(start - start % self.spacing + self.spacing, last, self.spacing))

    def next_mark(self, sequence: Sequence, position: int) -> int:
        """The next length at which a resume point is to be made: a snapshot's, or the prompt's last point."""
        if not self.states:
            return sequence.points[-1] if sequence.points else NEVER
        every = -(-self.retention.decode_every // self.grid) * self.grid
        return self.next_stop(sequence, position) or position // every * every + every

    def next_stop(self, sequence: Sequence, position: int) -> int | None:
        """The next position after `position` at which states should be snapshotted while the prompt is computed."""
        return next(iter(self.stops(sequence, position, sequence.num_prompt)), None)

    def stops(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """All such positions in (start, end], ascending."""
        if not self.states:
            return []
        way = sequence.on_the_way
        first, last = bisect_right(way, start), bisect_right(way, end)
        return sorted({*way[first:last], *(point for point in sequence.points if start < point <= end)})

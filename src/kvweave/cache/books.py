"""The books: every array that says who has what, one row a sequence, shared by the parts of a cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvweave.cache.sequence import Rows, Sequence
from kvweave.plan import Plan
from kvweave.pool import Ids, PoolPages
from kvweave.prefix import Event, Node, Policy, Prefix, Retention, tree_groups
from kvweave.prefix.retention import NEVER
from kvweave.table import Counts, GroupTable

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
        self.states = [number for number, table in enumerate(self.tables) if not table.per_token]
        self.prefix = Prefix(tree_groups(plan), sizes, self.give_back, self.give_back_states, policy, on_event)
        self.grid = self.prefix.tree.grid
        self.retention = retention
        self.spacing = retention.spacing(plan, self.grid)
        self.alike = list(_by_slots(self.tables).values())
        """Numbers of tables whose rows have the same number of slots, always: those of states, and by slot size."""
        self._rulers = [self.tables[numbers[0]] for numbers in self.alike if self.tables[numbers[0]].per_token]
        self.per_token = [number for number, table in enumerate(self.tables) if table.per_token]
        self.windows = [n for n, t in enumerate(self.tables) if t.per_token and t.reach.span is not None]
        self.lengths: Counts = np.zeros(rows, np.int64)
        self.committed, self.room, self.wake, self.mark, self.fill = (np.zeros(rows, np.int64) for _ in range(5))
        self.recent: Ids = np.zeros((rows, RECENT), np.int32)
        self._most_recent = 0
        """No row has more recent tokens than so many."""
        self.by_row: dict[int, Sequence] = {}
        self.dirty: set[int] = set()
        """Rows with something committed that is not in the tree yet."""
        self.planned: set[int] = set()
        """Rows whose step is to leave states in pages that are set aside."""
        self.has_drafts = False
        """Whether any step so far left states from which drafts can be taken back."""
        self.fresh: set[int] = set()
        """Rows that have no live states yet."""
        self.pointed: set[int] = set()
        """Rows whose sequences still have resume points to leave on the way through their prompts."""
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
        for rows in (self.dirty, self.planned, self.fresh, self.pointed):
            rows.discard(row)
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
        if self.states:
            self.fresh.add(row)
        if sequence.points:
            self.pointed.add(row)
        self.lengths[row] = self.committed[row] = self.room[row] = position
        mark = self.next_mark(sequence, position)
        self.mark[row] = mark
        self.wake[row] = min(position + self.grid, mark)
        if position:
            path = node.path()
            for number in self.per_token:
                self._enter_run(self.tables[number], row, [n.pages[number] for n in path], position)
            if self.states:
                sequence.restore = node.snapshots[position]

    def _enter_run(self, table: GroupTable, row: int, runs: list[Ids], position: int) -> None:
        """The pages of a hit at `position` that the next token can see; what lies between head and tail stays NULL."""
        blocks = position // table.slot_tokens
        first = max(table.tails.first_block(position), table.head_blocks)
        self.widen(table, blocks)
        end = blocks
        for pages in reversed(runs):
            start = end - len(pages)
            low, head = max(start, min(first, end)), table.head_blocks
            table.write(row, low, pages[low - start :])
            if start < head and start < low:
                table.write(row, start, pages[: head - start])
            if start <= first and not head:
                break
            end = start
        table.first[row] = first
        table.shared[row] = table.blocks[row] = blocks

    def set_room(self, rows: Rows) -> None:
        """Note up to which length the tables of these rows reach."""
        reach = [t.blocks[rows] * t.slot_tokens for t in self._rulers]
        self.room[rows] = NEVER if not reach else reach[0] if len(reach) == 1 else np.minimum.reduce(reach)

    def set_room_of(self, row: int) -> None:
        """`set_room` for one row, in plain numbers."""
        self.room[row] = min([NEVER, *(int(table.blocks[row]) * table.slot_tokens for table in self._rulers)])

    def widen(self, table: GroupTable, slots: int) -> None:
        if slots > table.width:
            self.has_drafts = self.has_drafts or not table.per_token
            table.grow(len(self.lengths), max(slots, 2 * table.width))

    def give_back(self, number: int, pages: Ids, gaps: bool = True) -> int:
        """Let go of pages of a group, NULLs among them if there are `gaps`; returns how many became free."""
        pool = self.pool_of[number]
        return pool.release(self.tables[number].tag, pages, gaps) if pool and len(pages) else 0

    def give_back_states(self, pages: tuple[int, ...]) -> None:
        """Let go of a snapshot: a page of each group of states, which nobody shares."""
        for number, page in zip(self.states, pages, strict=True):
            self.give_back_one(number, page)

    def give_back_one(self, number: int, page: int) -> None:
        """Let go of a single page, which nobody shares."""
        pool = self.pool_of[number]
        if pool:
            pool.release_one(self.tables[number].tag, page)

    # ---- tokens

    def remember(self, rows: Rows, tokens: Ids) -> None:
        """Keep generated tokens by row; sequences get them when they are asked for."""
        width = tokens.shape[1]
        self._most_recent += width
        if self._most_recent > RECENT:
            for sequence in self.by_row.values():
                self.flush_tokens(sequence)
            self._most_recent = width
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
        sequence.spaced_end = last

    def next_mark(self, sequence: Sequence, position: int) -> int:
        """The next length at which a resume point is to be made: a snapshot's, or the prompt's last point."""
        if not self.states:
            return sequence.points[-1] if sequence.points else NEVER
        every = -(-self.retention.decode_every // self.grid) * self.grid
        return self.next_stop(sequence, position) or position // every * every + every

    def next_stop(self, sequence: Sequence, position: int) -> int | None:
        """The next position after `position` at which states should be snapshotted while the prompt is computed."""
        stop = self.next_wanted(sequence, position) if self.states else NEVER
        return None if stop == NEVER else stop

    def stops(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """All such positions in (start, end], ascending."""
        return self.wanted(sequence, start, end) if self.states else []

    def wanted(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """All wanted resume points in (start, end], ascending."""
        wanted, position = [], self.next_spaced(sequence, start)
        while position <= end:
            wanted.append(position)
            position = self.next_spaced(sequence, position)
        points = [point for point in sequence.points if start < point <= end and point not in wanted]
        return sorted(wanted + points) if points else wanted

    def next_wanted(self, sequence: Sequence, position: int) -> int:
        """The first wanted resume point after `position`, or `NEVER`."""
        spaced = self.next_spaced(sequence, position)
        return min([spaced, *(point for point in sequence.points if point > position)])

    def next_spaced(self, sequence: Sequence, position: int) -> int:
        """The first position after `position` at which a resume point is welcome, or `NEVER`."""
        spaced = self.spacing.after(position)
        return spaced if spaced < sequence.spaced_end else NEVER


def _by_slots(tables: list[GroupTable]) -> dict[int, list[int]]:
    """The numbers of tables by the size of their slots; 0 for those of states."""
    alike: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        alike.setdefault(table.slot_tokens if table.per_token else 0, []).append(number)
    return alike

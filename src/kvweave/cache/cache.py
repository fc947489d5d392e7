"""The cache: open, extend, commit, fork, truncate, close. Everything above numpy stays outside.

The life of a sequence, and who owns its pages:

    open      the longest joint hit is matched and pinned; its pages enter the row's tables, still the tree's
    extend    pages for the next tokens are taken; they are the sequence's
    commit    what was written becomes visible: pages move to the tree, duplicates are given back
    close     the rest is given back, the pins are let go

One thread owns a cache. Calls from another raise `WrongThread`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from kvweave.cache.fork import Forks
from kvweave.cache.publish import Publisher
from kvweave.cache.room import Room
from kvweave.cache.sequence import Batch, Copy, Pin, Rows, Sequence
from kvweave.cache.states import States
from kvweave.cache.stats import GroupStats, InfiniteCache, PoolStats, Stats
from kvweave.errors import BadSequence, BadTokens, CannotTruncate, WrongThread
from kvweave.plan import Plan
from kvweave.pool import NULL, Ids, PoolPages
from kvweave.prefix import (
    POLICIES,
    Contents,
    Event,
    Node,
    Policy,
    Prefix,
    Retention,
    Span,
    as_tokens,
    tree_groups,
)
from kvweave.table import Counts, GroupTable

NEVER = np.iinfo(np.int64).max
RECENT = 256
"""Generated tokens that are kept by row before they are handed to their sequences."""


class Cache:
    """A KV cache over a plan. Ids in and out; the tensors are somebody else's.

    `policy` decides what is evicted first, `retention` where resume points are left, `admission_reserve` is the share
    of each pool that only running sequences may take. Tables have `rows` rows, and are as wide as `max_tokens` or the
    pool allow; memory is touched where it is used. `on_event` is told of every change of what can be hit.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        policy: str | Policy = "lru",
        retention: Retention | None = None,
        admission_reserve: float = 0.0,
        rows: int = 256,
        max_tokens: int = 1 << 20,
        on_event: Callable[[Event], None] | None = None,
        track_infinite: bool = False,
    ) -> None:
        self.plan = plan
        self.tables = [GroupTable(group, rows, max_tokens, plan.num_pages(group.tag)) for group in plan.groups]
        self.pools = [PoolPages(pool, [g for g in plan.groups if g.pool == pool.name]) for pool in plan.pools]
        by_name = {pool.name: pool for pool in self.pools}
        self.pool_of = [by_name.get(group.pool) for group in plan.groups]
        sizes = [plan.stride_bytes(group.tag) for group in plan.groups]
        choose = POLICIES[policy] if isinstance(policy, str) else policy
        self.prefix = Prefix(tree_groups(plan), sizes, self.give_back, choose, on_event)
        self.grid = self.prefix.tree.grid
        self.retention = retention or Retention()
        self.spacing = self.retention.spacing(plan, self.grid)
        self.states = [number for number, table in enumerate(self.tables) if not table.per_token]
        self.windows = [n for n, t in enumerate(self.tables) if t.per_token and t.reach.span is not None]
        self.lengths: Counts = np.zeros(rows, np.int64)
        self.committed: Counts = np.zeros(rows, np.int64)
        self._room: Counts = np.zeros(rows, np.int64)
        self._wake: Counts = np.zeros(rows, np.int64)
        self._mark: Counts = np.zeros(rows, np.int64)
        self._recent: Ids = np.zeros((rows, RECENT), np.int32)
        self._fill: Counts = np.zeros(rows, np.int64)
        self._free_rows = list(range(rows - 1, -1, -1))
        self.by_row: dict[int, Sequence] = {}
        self._dirty: set[int] = set()
        self._contents = Contents(on_event)
        self.room = Room(self, admission_reserve)
        self.state_keeper = States(self)
        self._publisher = Publisher(self)
        self._forks = Forks(self)
        self.closes = 0
        self._infinite = InfiniteCache(self.grid) if track_infinite else None
        self._requests = self._prompt_tokens = self._hit_tokens = self.evicted_pages = 0
        self._thread = threading.get_ident()

    # ---- open

    def open(
        self,
        tokens: object,
        *,
        namespace: Hashable = "",
        spans: SequenceOf[Span] = (),
        priority: int = 0,
        blocks_earlier: int = 0,
        reuse: bool = True,
    ) -> Sequence:
        """A sequence that starts with `tokens`; the longest joint hit is matched and pinned in one step.

        At least one token stays to be computed. `namespace` is what must be equal for KV to be shared (model, adapter,
        tenant); `blocks_earlier` lets the hit stop so many grid blocks earlier, as drafts that need hidden states ask.
        """
        self._check_thread()
        prompt = self._contents.keyed(as_tokens(tokens), spans)
        if not len(prompt):
            raise BadTokens("a prompt needs at least one token")
        self.publish()
        match = self.prefix.tree.match(namespace, prompt)
        limit = min(match.length, len(prompt) - 1) // self.grid * self.grid - blocks_earlier * self.grid
        position = self.prefix.tree.hit(match, limit) if reuse else 0
        node = self.prefix.node_at(match, position, self.prefix.tree.root(namespace))
        self.prefix.pin(node)
        if position:
            self.prefix.touch(node, priority)
        sequence = Sequence(self, self.take_row(), prompt, namespace, priority, node)
        sequence.branch = match.length if reuse and match.length > position else 0
        self._want_points(sequence)
        self.by_row[sequence.row] = sequence
        self._enter(sequence, node)
        self._count_request(sequence)
        return sequence

    def _want_points(self, sequence: Sequence) -> None:
        """Where this prompt should leave resume points, beyond its end: only windows and states need any."""
        if not self.prefix.tree.trailing:
            return
        start, last = sequence.num_cached, (sequence.num_prompt - 1) // self.grid * self.grid
        points = {last if self.retention.prompt_end else 0, sequence.branch if self.retention.branches else 0}
        sequence.points = sorted(point for point in points if start < point <= last)
        if self.spacing:
            sequence.on_the_way = list(range(start - start % self.spacing + self.spacing, last, self.spacing))

    def _enter(self, sequence: Sequence, node: Node) -> None:
        """Write the pages of a hit into the tables of a fresh row."""
        row, position = sequence.row, node.end
        self.lengths[row] = self.committed[row] = self._room[row] = position
        self._mark[row] = self._next_mark(sequence, position)
        self._wake[row] = min(position + self.grid, int(self._mark[row]))
        path = node.path()
        for number, table in enumerate(self.tables):
            if not table.per_token:
                if position:
                    sequence.restore.append((number, int(node.pages[number][-1])))
                continue
            slots = position // table.slot_tokens
            self.widen(table, slots)
            pages = np.concatenate([n.pages[number] for n in path]) if path else np.empty(0, np.int32)
            first = table.reach.tail(position) // table.slot_tokens
            pages[table.head_blocks : first] = NULL
            table.write(row, 0, pages)
            table.first[row] = max(first, table.head_blocks)
            table.shared[row] = table.blocks[row] = slots

    def _count_request(self, sequence: Sequence) -> None:
        self._requests += 1
        self._prompt_tokens += sequence.num_prompt
        self._hit_tokens += sequence.num_cached
        if self._infinite is not None:
            tokens = sequence.tokens[: sequence.num_prompt // self.grid * self.grid].astype(np.uint64) + np.uint64(1)
            powers = np.cumprod(np.full(len(tokens), 0x9E3779B97F4A7C15, np.uint64))
            sums = np.cumsum(tokens * powers)[self.grid - 1 :: self.grid]
            self._infinite.see(hash(sequence.namespace), sums.tolist(), sequence.num_prompt - 1)

    # ---- extend

    def extend(
        self,
        sequences: Sequence | Batch | Iterable[Sequence],
        n: int,
        *,
        tokens: object = None,
        lookahead: int = 0,
        drafts: int = 0,
        checkpoints: bool = False,
    ) -> list[Copy]:
        """Room for the next `n` tokens of each sequence; all or nothing.

        `tokens` are their ids where they are not the prompt's: an array `[sequences]` or `[sequences, n]`. `lookahead`
        keeps room for so many more. The last `drafts` tokens may be rejected with `truncate`: states then get a column
        each, in which the state after that token is to be left. `checkpoints` asks for pages for the states that the
        step passes and should leave on its way (`Sequence.checkpoints`). Returns the copies to be made before the step.
        """
        self._check_thread()
        rows = self._rows(sequences)
        if n < 1 or lookahead < 0 or not 0 <= drafts <= n:
            raise BadSequence(f"cannot extend by {n} tokens with {lookahead} ahead and {drafts} drafts")
        if tokens is not None:
            tokens = self._checked_tokens(tokens, len(rows), n)
        after = self.lengths[rows] + n
        copies: list[Copy] = []
        short = self._room[rows] < after + lookahead
        if short.any() or (drafts and self.states):
            chosen = rows if drafts and self.states else rows[short]
            copies = self.room.make(chosen, self.lengths[chosen] + n + lookahead, drafts)
        self.lengths[rows] = after
        if checkpoints and self.states:
            for row in rows[after > self._mark[rows]].tolist():
                self.state_keeper.plan_checkpoints(self.by_row[row])
        if tokens is not None:
            self._remember(rows, tokens)
        return copies

    def set_room(self, rows: Rows) -> None:
        """Note up to which length the tables of these rows reach."""
        self._room[rows] = NEVER
        for table in self.tables:
            if table.per_token:
                self._room[rows] = np.minimum(self._room[rows], table.blocks[rows] * table.slot_tokens)

    def _checked_tokens(self, tokens: object, num_rows: int, n: int) -> Ids:
        array = as_tokens(np.asarray(tokens).ravel())
        if len(array) != num_rows * n:
            raise BadTokens(f"{len(array)} tokens for {num_rows} sequences of {n} each")
        return array.reshape(num_rows, n)

    def _remember(self, rows: Rows, tokens: Ids) -> None:
        """Keep generated tokens by row; sequences get them when they are asked for."""
        width = tokens.shape[1]
        full = self._fill[rows] + width > RECENT
        if full.any():
            for row in rows[full].tolist():
                self.flush_tokens(self.by_row[row])
        if width > RECENT:
            for row, line in zip(rows.tolist(), tokens, strict=True):
                self.by_row[row].add_tokens(line)
            return
        at = self._fill[rows]
        for column in range(width):
            self._recent[rows, at + column] = tokens[:, column]
        self._fill[rows] = at + width

    def flush_tokens(self, sequence: Sequence) -> None:
        fill = int(self._fill[sequence.row]) if sequence.is_open else 0
        if fill:
            sequence.add_tokens(self._recent[sequence.row, :fill])
            self._fill[sequence.row] = 0

    # ---- commit

    def commit(self, sequences: Sequence | Batch | Iterable[Sequence], lengths: object = None) -> list[Copy]:
        """What was written up to `lengths` (all of it, unless said) is true: others may find it from now on.

        Returns the snapshots to be taken, as copies, before the next step.
        """
        self._check_thread()
        rows = self._rows(sequences)
        until = self.lengths[rows] if lengths is None else self._checked_lengths(rows, lengths)
        self.committed[rows] = until
        if self.states:
            self.state_keeper.settle(rows, until)
        due = rows[until >= self._wake[rows]]
        return self._wake_up(due) if len(due) else []

    def _wake_up(self, rows: Rows) -> list[Copy]:
        """These rows have passed a block of the grid, or a mark: there is more to do than to count."""
        copies: list[Copy] = []
        for row in rows[self.committed[rows] >= self._mark[rows]].tolist():
            copies += self._reach_mark(self.by_row[row])
        ends = self.committed[rows] // self.grid * self.grid
        if self.windows:
            self._leave_behind(rows, ends)
        self._wake[rows] = np.minimum(ends + self.grid, self._mark[rows])
        self._dirty.update(rows.tolist())
        return copies

    def _checked_lengths(self, rows: Rows, lengths: object) -> Counts:
        until = np.broadcast_to(np.asarray(lengths, np.int64), rows.shape)
        bad = (until < self.committed[rows]) | (until > self.lengths[rows])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise BadSequence(
                f"cannot commit {until[i]} tokens of a sequence of {self.lengths[rows[i]]}"
                f" with {self.committed[rows[i]]} committed"
            )
        return until

    def _reach_mark(self, sequence: Sequence) -> list[Copy]:
        """A wanted resume point was reached: take its snapshots, and put into the tree what leads to it."""
        row, position = sequence.row, int(self.committed[sequence.row])
        copies = []
        self.state_keeper.take_checkpoints(sequence, position)
        if self.states and position % self.grid == 0 and position == int(self.lengths[row]):
            copies = self.state_keeper.snapshot(sequence, position)
        if sequence.points and position >= sequence.points[-1]:
            self._publisher.publish(sequence)
            sequence.points, sequence.on_the_way = [], []
        self._mark[row] = self._next_mark(sequence, position)
        return copies

    def _next_mark(self, sequence: Sequence, position: int) -> int:
        """The next length at which a commit has more to do than count: a snapshot, or the prompt's last point."""
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

    def _leave_behind(self, rows: Rows, ends: Counts) -> None:
        """Let go of the blocks that windows have passed at `ends`, for many rows at once."""
        for row in rows.tolist():
            if self.by_row[row].points:
                self._publisher.leave_behind(self.by_row[row])
        for number in self.windows:
            table = self.tables[number]
            target = np.minimum(table.reach.tail(ends) // table.slot_tokens, table.blocks[rows])
            passed = np.maximum(target - table.first[rows], 0)
            moving = passed > 0
            if moving.any():
                self._pass(number, rows[moving], passed[moving])

    def _pass(self, number: int, rows: Rows, passed: Counts) -> None:
        table = self.tables[number]
        repeated = np.repeat(rows, passed)
        slots = np.repeat(table.first[rows] - np.cumsum(passed) + passed, passed) + np.arange(int(passed.sum()))
        pages = table.pages[repeated, slots]
        self.give_back(number, pages[slots >= table.shared[repeated]])
        table.write_many(repeated, slots, np.zeros(len(slots), np.int32))
        table.first[rows] += passed

    # ---- fork, truncate, close

    def fork(self, sequence: Sequence, n: int = 1) -> tuple[list[Sequence], list[Copy]]:
        """`n` more sequences with the same past; full blocks are shared, the last one and states are copied."""
        self._check_thread()
        self._rows(sequence)
        if n < 1:
            raise BadSequence(f"cannot fork into {n} sequences")
        return self._forks.fork(sequence, n)

    def reorder(self, sequences: SequenceOf[Sequence], parents: SequenceOf[int]) -> list[Copy]:
        """Beam search: sequence i goes on as sequence `parents[i]` was. All or nothing."""
        self._check_thread()
        rows = self._rows(sequences)
        if len(parents) != len(rows) or any(not 0 <= parent < len(rows) for parent in parents):
            raise BadSequence(f"parents {list(parents)} do not name {len(rows)} sequences")
        return self._forks.reorder(list(sequences), list(parents))

    def truncate(self, sequence: Sequence, length: int) -> list[Copy]:
        """Forget the tokens from `length` on; their pages go back. Returns copies to be made before the next step."""
        self._check_thread()
        self._rows(sequence)
        row = sequence.row
        if not sequence.node.end <= length <= sequence.length or length < 1:
            low = max(1, sequence.node.end)
            raise CannotTruncate(f"cannot cut {sequence.length} tokens to {length}; {low} are shared with the tree")
        if length == sequence.length:
            return []
        self.flush_tokens(sequence)
        copies = self._forks.truncate(sequence, length)
        sequence.cut_tokens(max(length, 0))
        self.lengths[row] = length
        self.committed[row] = min(int(self.committed[row]), length)
        sequence.num_prompt = min(sequence.num_prompt, length)
        self.set_room(self.rows_of(row))
        return copies

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence: what it committed stays in the tree, unless `keep` is False; the rest is given back."""
        self._check_thread()
        self._rows(sequence)
        row = sequence.row
        if keep:
            self.state_keeper.donate_live(sequence)
            self._publisher.publish(sequence)
        for number, table in enumerate(self.tables):
            self.give_back(number, table.owned(row))
            table.clear(row)
        for pages in sequence.snapshots.values():
            self.state_keeper.give_back(pages)
        self.state_keeper.drop_checkpoints(sequence)
        sequence.node.rolling = False
        self.prefix.unpin(sequence.node)
        self._fill[row] = 0
        self._dirty.discard(row)
        del self.by_row[row]
        self._free_rows.append(row)
        self.closes += 1
        sequence.row = -1

    # ---- what stays

    def pin(self, tokens: object, *, namespace: Hashable = "", spans: SequenceOf[Span] = ()) -> Pin | None:
        """Keep the longest cached prefix of `tokens` (a system prompt) from eviction; None when nothing is cached."""
        self._check_thread()
        self.publish()
        prompt = self._contents.keyed(as_tokens(tokens), spans)
        match = self.prefix.tree.match(namespace, prompt)
        position = self.prefix.tree.hit(match, match.length)
        if not position:
            return None
        node = self.prefix.node_at(match, position, self.prefix.tree.root(namespace))
        self.prefix.pin(node)
        return Pin(self, node)

    def unpin(self, pin: Pin) -> None:
        """Let go of what `pin` gave."""
        self._check_thread()
        if pin.cache is not self:
            raise BadSequence("this prefix is not pinned, or not in this cache")
        pin.cache = None
        self.prefix.unpin(pin.node)

    def publish(self) -> None:
        """Put everything committed into the tree now; `open` does so by itself."""
        for row in self._dirty:
            self._publisher.publish(self.by_row[row])
        self._dirty.clear()

    def reset(self) -> None:
        """Forget all that is cached; sequences and pins must be gone."""
        self._check_thread()
        if self.by_row or any(node.uses for node in self.prefix.tree.nodes()):
            raise BadSequence(f"{len(self.by_row)} sequences are open, or prefixes pinned: close them before a reset")
        self.prefix.clear()

    # ---- tables

    def table(self, tag: str) -> Ids:
        """Page ids `[rows, slots]`: index it with the rows of sequences. A view, valid until the cache grows."""
        return self._table(tag).pages

    def kernel_table(self, tag: str) -> Ids:
        """Kernel-block ids, in step with `table`."""
        return self._table(tag).kernels

    def slots(self, sequence: Sequence, tag: str, start: int, end: int | None = None) -> Counts:
        """Where the rows of tokens [start, end) are written; -1 for those of other context-parallel ranks."""
        self._rows(sequence)
        end = sequence.length if end is None else end
        if not 0 <= start <= end <= sequence.length:
            raise BadSequence(f"slots {start} to {end} of a sequence of {sequence.length} tokens")
        return self._table(tag).slots(sequence.row, start, end, self.plan.parallel.cp_rank)

    def _table(self, tag: str) -> GroupTable:
        self.plan.group(tag)
        return next(table for table in self.tables if table.tag == tag)

    # ---- stats

    def stats(self) -> Stats:
        """The books of this moment."""
        groups = []
        for number, table in enumerate(self.tables):
            pool, cached = self.pool_of[number], self.prefix.cached[number]
            free = pool.groups[table.tag].num_free if pool else 0
            owned = pool.num_held(table.tag) if pool else 0
            padding = self.plan.padding_bytes(table.tag) * owned
            evictable = self.prefix.evictable(number)
            groups.append(GroupStats(table.tag, free, owned - cached, cached, evictable, padding))
        pools = tuple(PoolStats(pool.name, pool.num_supers, pool.free_supers.size) for pool in self.pools)
        return Stats(
            tuple(groups),
            pools,
            len(self.by_row),
            self.prefix.tree.num_nodes,
            self._requests,
            self._prompt_tokens,
            self._hit_tokens,
            self._infinite.hit_tokens if self._infinite else None,
            self.evicted_pages,
        )

    # ---- rows

    def rows_of(self, *rows: int) -> Rows:
        return np.array(rows, np.int64)

    def _rows(self, sequences: Sequence | Batch | Iterable[Sequence]) -> Rows:
        """The rows of open sequences of this cache."""
        if isinstance(sequences, Sequence):
            if sequences.cache is not self or sequences.row < 0:
                raise BadSequence(f"the sequence is {'closed' if sequences.cache is self else 'of another cache'}")
            return sequences.rows
        batch = sequences if isinstance(sequences, Batch) else Batch(sequences)
        if batch.checked != self.closes:
            batch.check(self)
            batch.checked = self.closes
        return batch.rows

    def take_row(self) -> int:
        if not self._free_rows:
            old, new = len(self.lengths), 2 * len(self.lengths)
            for table in self.tables:
                table.grow(new, 0)
            for name in ("lengths", "committed", "_room", "_wake", "_mark", "_fill"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(new - old, np.int64)]))
            self._recent = np.concatenate([self._recent, np.zeros((new - old, RECENT), np.int32)])
            self._free_rows = list(range(new - 1, old - 1, -1))
        return self._free_rows.pop()

    def copy_row(self, source: int, row: int) -> None:
        """A forked sequence stands where its parent does."""
        for array in (self.lengths, self.committed, self._room, self._wake, self._mark):
            array[row] = array[source]

    def widen(self, table: GroupTable, slots: int) -> None:
        if slots > table.pages.shape[1]:
            table.grow(len(self.lengths), max(slots, 2 * table.pages.shape[1]))

    def give_back(self, number: int, pages: Ids) -> int:
        pool = self.pool_of[number]
        return pool.release(self.tables[number].tag, pages) if pool and len(pages) else 0

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise WrongThread(f"this cache belongs to thread {self._thread}, called from {threading.get_ident()}")

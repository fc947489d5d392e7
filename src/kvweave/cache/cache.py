"""The cache: open, extend, commit, fork, truncate, close. Everything above numpy stays outside.

The life of a sequence, and who owns its pages:

    open      the longest joint hit is matched and pinned; its pages enter the row's tables, still the tree's
    arrive    instead, where tokens were computed elsewhere: pages for what can be seen from there, to be filled
    extend    pages for the next tokens are taken; they are the sequence's
    commit    what was written becomes visible: pages move to the tree, duplicates are given back
    close     the rest is given back, the pins are let go

One thread owns a cache: that which made it, or which said `adopt` last. Calls from another raise `WrongThread`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from kvweave.cache.books import Books
from kvweave.cache.fork import Forks
from kvweave.cache.publish import Publisher
from kvweave.cache.room import Room
from kvweave.cache.sequence import Batch, Copy, Pin, Rows, Sequence
from kvweave.cache.states import States
from kvweave.cache.stats import GroupStats, InfiniteCache, PoolStats, Stats
from kvweave.errors import BadSequence, BadTokens, CannotTruncate, UnknownName, WrongThread
from kvweave.plan import Plan
from kvweave.pool import Ids
from kvweave.prefix import (
    POLICIES,
    Contents,
    Event,
    Policy,
    Retention,
    Span,
    as_tokens,
)
from kvweave.table import Counts, GroupTable


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
        if isinstance(policy, str) and policy not in POLICIES:
            raise UnknownName("policy", policy, POLICIES)
        if rows < 1 or max_tokens < 1 or not 0 <= admission_reserve < 1:
            raise BadSequence(f"no cache of {rows} rows, {max_tokens} tokens and a reserve of {admission_reserve}")
        choose = POLICIES[policy] if isinstance(policy, str) else policy
        self.books = Books(plan, rows, max_tokens, choose, retention or Retention(), on_event)
        self.room = Room(self.books, admission_reserve)
        self._states = States(self.books, self.room)
        self._publisher = Publisher(self.books)
        self._forks = Forks(self.books, self.room, self._states, lambda sequence: self.close(sequence, keep=False))
        self._contents = Contents(on_event)
        self._infinite = InfiniteCache(self.books.grid) if track_infinite else None
        self._requests = self._prompt_tokens = self._hit_tokens = 0
        self._owner = threading.get_ident()

    @property
    def plan(self) -> Plan:
        return self.books.plan

    @property
    def grid(self) -> int:
        """Tokens between positions from which all groups could go on: the common multiple of their blocks."""
        return self.books.grid

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
        match = self.books.prefix.tree.match(namespace, prompt)
        limit = min(match.length, len(prompt) - 1) // self.grid * self.grid - blocks_earlier * self.grid
        position = self.books.prefix.tree.hit(match, limit) if reuse else 0
        node = self.books.prefix.node_at(match, position, self.books.prefix.tree.root(namespace))
        self.books.prefix.pin(node)
        if position:
            self.books.prefix.touch(node, priority)
        sequence = Sequence(self.books, self.books.take_row(), prompt, namespace, priority, node)
        sequence.branch = match.length if reuse and match.length > position else 0
        self.books.want_points(sequence)
        self.books.enter(sequence, node)
        self._count_request(sequence)
        return sequence

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
        step should leave on its way and at its end (`Sequence.checkpoints`). Returns the copies to be made before it.
        """
        self._check_thread()
        rows = self._rows(sequences)
        if n < 1 or lookahead < 0 or not 0 <= drafts <= n:
            raise BadSequence(f"cannot extend by {n} tokens with {lookahead} ahead and {drafts} drafts")
        if tokens is not None:
            tokens = self._checked_tokens(tokens, len(rows), n)
        if isinstance(sequences, Sequence) and tokens is None:
            return self._extend_one(sequences, n, lookahead, drafts, checkpoints)
        after = self.books.lengths[rows] + n
        copies: list[Copy] = []
        short = self.books.room[rows] < after + lookahead
        if np.count_nonzero(short) or (drafts and self.books.states):
            chosen = rows if drafts and self.books.states else rows[short]
            copies = self.room.make(chosen, self.books.lengths[chosen] + n + lookahead, drafts)
        self.books.lengths[rows] = after
        if self.books.planned or (checkpoints and self.books.states):
            self._plan_checkpoints(rows, checkpoints)
        if tokens is not None:
            self.books.remember(rows, tokens)
        return copies

    def _plan_checkpoints(self, rows: Rows, checkpoints: bool) -> None:
        """What an earlier step was to leave and was not committed is void; what this one passes is planned."""
        for row in self.books.planned & set(rows.tolist()):
            self._states.drop_checkpoints(self.books.by_row[row])
        if checkpoints and self.books.states:
            for row in rows[self.books.lengths[rows] > self.books.mark[rows]].tolist():
                self._states.plan_checkpoints(self.books.by_row[row])

    def _extend_one(self, sequence: Sequence, n: int, lookahead: int, drafts: int, checkpoints: bool) -> list[Copy]:
        """`extend` for one sequence, in plain numbers: a chunk of a prompt."""
        books, row = self.books, sequence.row
        after = int(books.lengths[row]) + n
        stops: list[int] = []
        copies: list[Copy] = []
        if books.states:
            self._states.drop_checkpoints(sequence)
            if after >= int(books.mark[row]):
                stops = self._states.stops(sequence, after, checkpoints)
                sequence.in_step = checkpoints
        if stops or int(books.room[row]) < after + lookahead or (drafts and books.states):
            copies = self.room.make_one(sequence, after + lookahead, drafts, stops)
        books.lengths[row] = after
        return copies

    def arrive(self, sequence: Sequence, position: int) -> None:
        """The tokens up to `position` were computed elsewhere: there is room for what the reach there needs, no more.

        Right after `open`, for a position of the grid that leaves a token to compute. All or nothing, as `extend`. Fill
        the pages from `num_cached` on that the tables name, whole ones, and the live states; then `commit`. If that
        fails, `close` with `keep=False`: nobody has seen them.
        """
        self._check_thread()
        self._rows(sequence)
        books, row = self.books, sequence.row
        start = sequence.length
        if start != sequence.num_cached or not start < position < sequence.num_prompt or position % self.grid:
            raise BadSequence(
                f"cannot arrive at {position}: right after open, a multiple of {self.grid} after {sequence.num_cached}"
                f" and before {sequence.num_prompt} can be arrived at; the sequence has {start} tokens"
            )
        self.room.arrive(sequence, position)
        if books.prefix.tree.trailing:
            sequence.points = [position, *(point for point in sequence.points if point > position)]
            books.pointed.add(row)
        books.lengths[row] = position
        books.mark[row] = position

    def _checked_tokens(self, tokens: object, num_rows: int, n: int) -> Ids:
        array = as_tokens(np.asarray(tokens).ravel())
        if len(array) != num_rows * n:
            raise BadTokens(f"{len(array)} tokens for {num_rows} sequences of {n} each")
        return array.reshape(num_rows, n)

    # ---- commit

    def commit(self, sequences: Sequence | Batch | Iterable[Sequence], lengths: object = None) -> list[Copy]:
        """What was written up to `lengths` (all of it, unless said) is true: others may find it from now on.

        Returns the snapshots to be taken, as copies, before the next step.
        """
        self._check_thread()
        rows = self._rows(sequences)
        if isinstance(sequences, Sequence) and lengths is None:
            return self._commit_one(sequences)
        until = self.books.lengths[rows] if lengths is None else self._checked_lengths(rows, lengths)
        self.books.committed[rows] = until
        if self.books.has_drafts:
            self._states.settle(rows, until)
        due = rows[until >= self.books.wake[rows]]
        return self._wake_up(due) if len(due) else []

    def _commit_one(self, sequence: Sequence) -> list[Copy]:
        """`commit` for one sequence, in plain numbers."""
        books, row = self.books, sequence.row
        until = int(books.lengths[row])
        books.committed[row] = until
        if books.has_drafts:
            self._states.settle(sequence.rows, books.lengths[sequence.rows])
        if until < int(books.wake[row]):
            return []
        copies = self._reach_mark(sequence) if until >= int(books.mark[row]) else []
        end = until // self.grid * self.grid
        if books.windows:
            self._publisher.leave_behind(sequence, end)
        books.wake[row] = min(end + self.grid, int(books.mark[row]))
        books.dirty.add(row)
        return copies

    def _wake_up(self, rows: Rows) -> list[Copy]:
        """These rows have passed a block of the grid, or a mark: there is more to do than to count."""
        copies: list[Copy] = []
        for row in rows[self.books.committed[rows] >= self.books.mark[rows]].tolist():
            copies += self._reach_mark(self.books.by_row[row])
        ends = self.books.committed[rows] // self.grid * self.grid
        if self.books.windows:
            self._leave_behind(rows, ends)
        self.books.wake[rows] = np.minimum(ends + self.grid, self.books.mark[rows])
        self.books.dirty.update(rows.tolist())
        return copies

    def _checked_lengths(self, rows: Rows, lengths: object) -> Counts:
        until = np.broadcast_to(np.asarray(lengths, np.int64), rows.shape)
        bad = (until < self.books.committed[rows]) | (until > self.books.lengths[rows])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise BadSequence(
                f"cannot commit {until[i]} tokens of a sequence of {self.books.lengths[rows[i]]}"
                f" with {self.books.committed[rows[i]]} committed"
            )
        return until

    def _reach_mark(self, sequence: Sequence) -> list[Copy]:
        """A wanted resume point was reached: take its snapshots, and put into the tree what leads to it."""
        row, position = sequence.row, int(self.books.committed[sequence.row])
        copies: list[Copy] = []
        if self.books.states:
            copies = self._states.take_checkpoints(sequence, position)
            if position % self.grid == 0 and position == int(self.books.lengths[row]):
                copies += self._states.snapshot(sequence, position)
        if sequence.points and position >= sequence.points[-1]:
            self._publisher.publish(sequence)
            sequence.points, sequence.spaced_end = [], 0
            self.books.pointed.discard(row)
        self.books.mark[row] = self.books.next_mark(sequence, position)
        return copies

    def _leave_behind(self, rows: Rows, ends: Counts) -> None:
        """Let go of the blocks that windows have passed at `ends`, for many rows at once."""
        if self.books.pointed:
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                if row in self.books.pointed:
                    self._publisher.leave_behind(self.books.by_row[row], end)
        for number in self.books.windows:
            table = self.books.tables[number]
            passed = table.reach.tail(ends) // table.slot_tokens - table.first[rows]
            moving = passed > 0
            if np.count_nonzero(moving):
                self._pass(number, rows[moving], passed[moving])

    def _pass(self, number: int, rows: Rows, passed: Counts) -> None:
        """Take the first `passed` slots of each row out of a window's table."""
        table = self.books.tables[number]
        slots = table.first[rows]
        table.first[rows] = slots + passed
        if passed.max() > 1:
            slots = np.repeat(slots - np.cumsum(passed) + passed, passed) + np.arange(int(passed.sum()))
            rows = np.repeat(rows, passed)
        pages = table.pages[rows, slots]
        self.books.give_back(number, pages[slots >= table.shared[rows]])
        table.write_many(rows, slots, np.zeros(len(slots), np.int32))

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
        self.books.flush_tokens(sequence)
        copies = self._forks.truncate(sequence, length)
        sequence.cut_tokens(max(length, 0))
        self.books.lengths[row] = length
        self.books.committed[row] = min(int(self.books.committed[row]), length)
        sequence.num_prompt = min(sequence.num_prompt, length)
        self.books.set_room_of(row)
        return copies

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence: what it committed stays in the tree, unless `keep` is False; the rest is given back."""
        self._check_thread()
        self._rows(sequence)
        row = sequence.row
        if keep:
            self._states.donate_live(sequence)
            self._publisher.publish(sequence)
        for number in self.books.per_token:
            self.books.give_back(number, self.books.tables[number].owned(row))
        self._states.give_back_live(row)
        for pages in sequence.snapshots.values():
            self.books.give_back_states(pages)
        self._states.drop_checkpoints(sequence)
        sequence.node.rolling = False
        self.books.prefix.unpin(sequence.node)
        self.books.free_row(sequence)

    # ---- what stays

    def pin(self, tokens: object, *, namespace: Hashable = "", spans: SequenceOf[Span] = ()) -> Pin | None:
        """Keep the longest cached prefix of `tokens` (a system prompt) from eviction; None when nothing is cached."""
        self._check_thread()
        self.publish()
        prompt = self._contents.keyed(as_tokens(tokens), spans)
        match = self.books.prefix.tree.match(namespace, prompt)
        position = self.books.prefix.tree.hit(match, match.length)
        if not position:
            return None
        node = self.books.prefix.node_at(match, position, self.books.prefix.tree.root(namespace))
        self.books.prefix.pin(node)
        return Pin(self.books, node)

    def unpin(self, pin: Pin) -> None:
        """Let go of what `pin` gave."""
        self._check_thread()
        if pin.books is not self.books:
            raise BadSequence("this prefix is not pinned, or not in this cache")
        pin.books = None
        self.books.prefix.unpin(pin.node)

    def publish(self) -> None:
        """Put everything committed into the tree now; `open` does so by itself."""
        for row in self.books.dirty:
            self._publisher.publish(self.books.by_row[row])
        self.books.dirty.clear()

    def reset(self) -> None:
        """Forget all that is cached; sequences and pins must be gone."""
        self._check_thread()
        if self.books.by_row or any(node.uses for node in self.books.prefix.tree.nodes()):
            raise BadSequence(
                f"{len(self.books.by_row)} sequences are open, or prefixes pinned: close them before a reset"
            )
        self.books.prefix.clear()

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
        return next(table for table in self.books.tables if table.tag == tag)

    # ---- stats

    def stats(self) -> Stats:
        """The books of this moment."""
        groups = []
        for number, table in enumerate(self.books.tables):
            pool, cached = self.books.pool_of[number], self.books.prefix.cached[number]
            free = pool.groups[table.tag].num_free if pool else 0
            owned = pool.num_held(table.tag) if pool else 0
            padding = self.plan.padding_bytes(table.tag) * owned
            evictable = self.books.prefix.evictable(number)
            groups.append(GroupStats(table.tag, free, owned - cached, cached, evictable, padding))
        pools = tuple(PoolStats(pool.name, pool.num_supers, pool.free_supers.size) for pool in self.books.pools)
        return Stats(
            tuple(groups),
            pools,
            len(self.books.by_row),
            self.books.prefix.tree.num_nodes,
            self._requests,
            self._prompt_tokens,
            self._hit_tokens,
            self._infinite.hit_tokens if self._infinite else None,
            self.room.evicted_pages,
        )

    # ---- rows, threads

    def adopt(self) -> None:
        """The calling thread owns the cache from now on; see to it that whoever owned it is done with it."""
        self._owner = threading.get_ident()

    def _rows(self, sequences: Sequence | Batch | Iterable[Sequence]) -> Rows:
        """The rows of open sequences of this cache."""
        if isinstance(sequences, Sequence):
            if sequences.books is not self.books or sequences.row < 0:
                raise BadSequence(
                    f"the sequence is {'closed' if sequences.books is self.books else 'of another cache'}"
                )
            return sequences.rows
        batch = sequences if isinstance(sequences, Batch) else Batch(sequences)
        if batch.checked != self.books.closes:
            batch.check(self.books)
            batch.checked = self.books.closes
        return batch.rows

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThread(f"this cache belongs to thread {self._owner}, called from {threading.get_ident()}")

"""Room: taking pages for sequences, all or nothing, evicting exactly what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvweave.cache.sequence import Checkpoint, Copy, Rows, Sequence
from kvweave.errors import CannotTruncate, NeverFits, OutOfPages
from kvweave.pool import NULL, Ids, PoolPages
from kvweave.table import Counts, GroupTable

if TYPE_CHECKING:
    from kvweave.cache.cache import Cache


class Room:
    """Takes and gives back the pages of sequences. Everything is asked for before anything is changed."""

    def __init__(self, cache: Cache, admission_reserve: float) -> None:
        self.cache = cache
        self.reserve = admission_reserve
        self.numbers = {table.tag: number for number, table in enumerate(cache.tables)}

    # ---- extend

    def make(self, rows: Rows, lengths: Counts, drafts: int) -> list[Copy]:
        """Pages so that the rows reach `lengths`."""
        cache = self.cache
        if len(rows) == 1 and not drafts:
            return self._make_one(cache._by_row[int(rows[0])], int(lengths[0]))
        grows = [self._growth(table, rows, lengths, drafts) for table in cache.tables]
        is_new = bool((cache.committed[rows] == 0).any()) or any(cache._by_row[r].restore for r in rows.tolist())
        self.ensure([int(grow.sum()) for grow in grows], lengths, is_new)
        copies: list[Copy] = []
        for number, (table, grow) in enumerate(zip(cache.tables, grows, strict=True)):
            if not grow.any():
                continue
            chosen, counts = rows[grow > 0], grow[grow > 0]
            pages = self.take(number, int(counts.sum()))
            if table.per_token:
                self._append(table, chosen, counts, pages)
            else:
                self._add_states(table, chosen, counts, pages)
        if cache.states:
            copies = self._restore(rows)
        cache.set_room(rows)
        return copies

    def _make_one(self, sequence: Sequence, length: int) -> list[Copy]:
        """`make` for one row, in plain numbers."""
        cache, row = self.cache, sequence.row
        grows = []
        for table in cache.tables:
            need = -(-length // table.slot_tokens) if table.per_token else 1
            cache.widen(table, need)
            have = int(table.blocks[row]) if table.per_token else int(table.pages[row, 0] != NULL)
            grows.append(max(0, need - have))
        is_new = bool(sequence.restore) or not cache.committed[row]
        self.ensure(grows, np.array([length]), is_new)
        for number, count in enumerate(grows):
            if count:
                table = cache.tables[number]
                table.write(row, int(table.blocks[row]), self.take(number, count))
                table.blocks[row] += count if table.per_token else 0
        cache.set_room(sequence.rows)
        return self._restore(sequence.rows) if sequence.restore else []

    def _growth(self, table: GroupTable, rows: Rows, lengths: Counts, drafts: int) -> Counts:
        """New pages a row."""
        if table.per_token:
            need = -(-lengths // table.slot_tokens)
            self.cache.widen(table, int(need.max()))
            more: Counts = np.maximum(need - table.blocks[rows], 0)
            return more
        self.cache.widen(table, 1 + drafts)
        have = np.count_nonzero(table.pages[rows], axis=1)
        fresh: Counts = np.maximum(1 + drafts - have, 0).astype(np.int64)
        return fresh

    def _append(self, table: GroupTable, rows: Rows, counts: Counts, pages: Ids) -> None:
        if len(rows) == 1:
            table.write(int(rows[0]), int(table.blocks[rows[0]]), pages)
        else:
            starts = table.blocks[rows] - np.cumsum(counts) + counts
            slots = np.repeat(starts, counts) + np.arange(len(pages))
            table.write_many(np.repeat(rows, counts), slots, pages)
        table.blocks[rows] += counts

    def _add_states(self, table: GroupTable, rows: Rows, counts: Counts, pages: Ids) -> None:
        at = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            have = int(np.count_nonzero(table.pages[row]))
            table.pages[row, have : have + count] = pages[at : at + count]
            at += count

    def _restore(self, rows: Rows) -> list[Copy]:
        """Snapshots of hits that are to be copied into fresh live states."""
        moves: dict[int, tuple[list[int], list[int]]] = {}
        for row in rows.tolist():
            sequence = self.cache._by_row[row]
            for number, page in sequence.restore:
                src, dst = moves.setdefault(number, ([], []))
                src.append(page)
                dst.append(int(self.cache.tables[number].pages[row, 0]))
            sequence.restore = []
        return [self._copy(number, src, dst) for number, (src, dst) in moves.items()]

    def _copy(self, number: int, src: list[int], dst: list[int]) -> Copy:
        return Copy(self.cache.tables[number].tag, np.array(src, np.int32), np.array(dst, np.int32))

    # ---- pages

    def take(self, number: int, count: int) -> Ids:
        pool = self.cache.pool_of[number]
        return pool.take(self.cache.tables[number].tag, count) if pool else np.zeros(count, np.int32)

    def ensure(self, counts: list[int], lengths: Counts, is_new: bool = False) -> None:
        """Make sure that `counts[g]` pages of each group can be taken; evict, or raise with nothing taken."""
        for pool in self.cache.pools:
            wanted = {tag: counts[self.numbers[tag]] for tag in pool.groups}
            if not any(wanted.values()):
                continue
            asked = dict(wanted)
            if is_new and self.reserve:
                spare = {tag: int(self.reserve * pool.num_supers * pool.groups[tag].per_super) for tag in wanted}
                largest = max(wanted, key=lambda tag: spare[tag])
                asked[largest] += spare[largest]
            if pool.prepare(asked):
                self._evict_for(pool, asked, lengths)

    def _evict_for(self, pool: PoolPages, wanted: dict[str, int], lengths: Counts) -> None:
        if self._short_after_eviction(pool, wanted):
            self._refuse(pool, wanted, lengths)
        supers = pool.free_supers.size
        for tag, count in wanted.items():  # each from its own first
            group, number = pool.groups[tag], self.numbers[tag]
            short = count - group.num_free - supers * group.per_super
            if short > 0:
                self.cache.evicted_pages += self.cache.prefix.evict(number, short)
            supers = max(0, supers - group.supers_for(count))
        while pool.prepare(wanted):
            if not any(self._squeeze(pool, tag) for tag in pool.groups):
                self._refuse(pool, wanted, lengths)

    def _squeeze(self, pool: PoolPages, tag: str) -> bool:
        """Evict about a super-page's worth of one group."""
        freed = self.cache.prefix.evict(self.numbers[tag], pool.groups[tag].per_super)
        self.cache.evicted_pages += freed
        return freed > 0

    def _short_after_eviction(self, pool: PoolPages, wanted: dict[str, int]) -> bool:
        """Whether even evicting all that can go would not do, by the super-pages that could become empty."""
        prefix = self.cache.prefix
        free = {tag: group.num_free + prefix.evictable(self.numbers[tag]) for tag, group in pool.groups.items()}
        short = need = 0
        for tag, group in pool.groups.items():
            lack = wanted[tag] - free[tag]
            need += max(0, -(-lack // group.per_super))
            short += max(0, -lack // group.per_super) if lack < 0 else 0
        return need > pool.free_supers.size + short

    def _refuse(self, pool: PoolPages, wanted: dict[str, int], lengths: Counts) -> None:
        """Raise `NeverFits` where even an empty pool would be too small for one of the sequences, else `OutOfPages`."""
        cache = self.cache
        longest = int(lengths.max())
        supers = 0
        for tag in pool.groups:
            group = cache.plan.group(tag)
            supers += -(-group.num_blocks_held(longest) // group.pages_per_super)
        if supers > pool.num_supers:
            unit = cache.plan.pool(pool.name).unit_bytes
            raise NeverFits(
                f"a sequence of {longest} tokens takes {supers} super-pages of pool {pool.name!r}, which has"
                f" {pool.num_supers}",
                available_bytes=pool.num_supers * unit,
                smallest_bytes=(supers + 1) * unit,
            )
        tag = max(wanted, key=lambda tag: wanted[tag] - pool.available(tag))
        evictable = cache.prefix.evictable(self.numbers[tag])
        raise OutOfPages(pool.name, wanted=wanted[tag], available=pool.available(tag), evictable=evictable)

    # ---- states

    def settle_drafts(self, rows: Rows, until: Counts) -> None:
        """The step is over: the state after the last accepted token becomes the live one."""
        for number in self.cache.states:
            table = self.cache.tables[number]
            if table.pages.shape[1] == 1:
                continue
            for row, length in zip(rows.tolist(), until.tolist(), strict=True):
                self._choose_state(table, row, int(self.cache.lengths[row]) - length)

    def _choose_state(self, table: GroupTable, row: int, tokens_back: int) -> None:
        have = int(np.count_nonzero(table.pages[row]))
        if have > 1:
            column = have - 1 - tokens_back
            pages = table.pages[row].copy()
            table.pages[row, 0], table.pages[row, column] = pages[column], pages[0]
            self.cache.give_back(self.numbers[table.tag], table.pages[row, 1:have].copy())
            table.pages[row, 1:] = NULL

    def snapshot(self, sequence: Sequence, position: int) -> list[Copy]:
        """Copies of the live states, for the tree; none where there is no page for them."""
        cache = self.cache
        if position in sequence.snapshots or position <= sequence.node.end:
            return []
        counts = [1 if number in cache.states else 0 for number in range(len(cache.tables))]
        try:
            self.ensure(counts, cache.rows_of(1))
        except (OutOfPages, NeverFits):
            return []
        copies, taken = [], []
        for number in cache.states:
            page = int(self.take(number, 1)[0])
            taken.append((number, page))
            copies.append(self._copy(number, [int(cache.tables[number].pages[sequence.row, 0])], [page]))
        if not sequence.points:  # of those taken while generating, only the last is kept
            for old in [p for p in sequence.snapshots if p > sequence.node.end]:
                cache.give_back_all(sequence.snapshots.pop(old))
        sequence.snapshots[position] = taken
        return copies

    def plan_checkpoints(self, sequence: Sequence) -> None:
        """Pages for the states that the step up to the sequence's length passes; none where there is no room."""
        cache = self.cache
        self.drop_checkpoints(sequence)
        positions = cache.stops(sequence, int(cache.committed[sequence.row]), sequence.length - 1)
        counts = [len(positions) if number in cache.states else 0 for number in range(len(cache.tables))]
        try:
            self.ensure(counts, cache.rows_of(1))
        except (OutOfPages, NeverFits):
            return
        for number in cache.states if positions else ():
            pages = self.take(number, len(positions)).tolist()
            tag = cache.tables[number].tag
            sequence.checkpoints += [Checkpoint(tag, at, page) for at, page in zip(positions, pages, strict=True)]

    def take_checkpoints(self, sequence: Sequence, position: int) -> None:
        """The step left its states: those up to `position` are snapshots now, the others were not written."""
        for checkpoint in sequence.checkpoints:
            number = self.numbers[checkpoint.tag]
            if checkpoint.position <= position:
                sequence.snapshots.setdefault(checkpoint.position, []).append((number, checkpoint.page))
            else:
                self.cache.give_back(number, np.array([checkpoint.page], np.int32))
        sequence.checkpoints = []

    def drop_checkpoints(self, sequence: Sequence) -> None:
        self.take_checkpoints(sequence, -1)

    def donate_live(self, sequence: Sequence) -> None:
        """At its end a sequence needs its live state no more: on the grid, it is a snapshot as it is."""
        cache, row = self.cache, sequence.row
        position = int(cache.committed[row])
        if not cache.states or position % cache.grid or position != sequence.length or position <= sequence.node.end:
            return
        if position in sequence.snapshots or sequence.restore:
            return
        sequence.snapshots[position] = [(number, int(cache.tables[number].pages[row, 0])) for number in cache.states]
        for number in cache.states:
            cache.tables[number].pages[row, 0] = NULL

    # ---- fork, reorder, truncate

    def fork(self, sequence: Sequence, n: int) -> tuple[list[Sequence], list[Copy]]:
        cache = self.cache
        counts = [n * len(self._private(number, sequence)) for number in range(len(cache.tables))]
        self.ensure(counts, cache.rows_of(sequence.length))
        cache.flush_tokens(sequence)
        children, copies = [], []
        for _ in range(n):
            row = cache._take_row()
            child = Sequence(cache, row, sequence.tokens.copy(), sequence.namespace, sequence.priority, sequence.node)
            cache.prefix.pin(sequence.node)
            sequence.node.rolling = False
            child.num_cached, child.num_prompt = sequence.num_cached, sequence.num_prompt
            child.branch, child.restore = sequence.branch, list(sequence.restore)
            child.points, child.on_the_way = list(sequence.points), list(sequence.on_the_way)
            cache.adopt(child)
            copies += self._share_rows(sequence.row, row, sequence)
            children.append(child)
        return children, copies

    def _private(self, number: int, sequence: Sequence) -> Counts:
        """The slots that cannot be shared: live states, and the last block when it is not full."""
        table, row = self.cache.tables[number], sequence.row
        if not table.per_token:
            return np.flatnonzero(table.pages[row, :1])
        first = max(sequence.length // table.slot_tokens, int(table.shared[row]))
        slots: Counts = np.arange(first, int(table.blocks[row]))
        private: Counts = slots[table.pages[row, slots] != NULL]
        return private

    def _share_rows(self, source: int, row: int, sequence: Sequence) -> list[Copy]:
        """Make `row` a twin of `source`: pages counted once more, private ones replaced by copies."""
        cache, copies = self.cache, []
        for name in ("lengths", "committed", "_room", "_wake", "_mark"):
            array = getattr(cache, name)
            array[row] = array[source]
        for number, table in enumerate(cache.tables):
            private = self._private(number, sequence)
            pages = table.pages[source].copy()
            if table.per_token:
                owned = np.arange(int(table.shared[source]), int(table.blocks[source]))
                owned = owned[~np.isin(owned, private)]
                self._share(number, pages[owned][pages[owned] != NULL])
            else:
                pages[1:] = NULL
            fresh = self.take(number, len(private))
            if len(private):
                copies.append(Copy(table.tag, pages[private], fresh))
            pages[private] = fresh
            table.write(row, 0, pages)
            for name in ("first", "shared", "blocks"):
                getattr(table, name)[row] = getattr(table, name)[source]
        return copies

    def _share(self, number: int, pages: Ids) -> None:
        pool = self.cache.pool_of[number]
        if pool and len(pages):
            pool.share(self.cache.tables[number].tag, pages)

    def reorder(self, sequences: list[Sequence], parents: list[int]) -> list[Copy]:
        """Fork each parent for its further children, then let the children take the place of the dropped."""
        used: dict[int, list[int]] = {}
        for child, parent in enumerate(parents):
            used.setdefault(parent, []).append(child)
        extra = list(used.items())
        counts = [0] * len(self.cache.tables)
        for parent, children in extra:
            for number in range(len(counts)):
                counts[number] += (len(children) - 1) * len(self._private(number, sequences[parent]))
        rows = self.cache.rows_of(*(s.row for s in sequences))
        self.ensure(counts, self.cache.lengths[rows])
        copies: list[Copy] = []
        placed: dict[int, Sequence] = {}
        for parent, children in extra:
            keeper = parent if parent in children else children[0]
            placed[keeper] = sequences[parent]
            others = [child for child in children if child != keeper]
            if others:
                made, more = self.fork(sequences[parent], len(others))
                copies += more
                placed |= dict(zip(others, made, strict=True))
        return self._swap(sequences, placed, copies)

    def _swap(self, sequences: list[Sequence], placed: dict[int, Sequence], copies: list[Copy]) -> list[Copy]:
        """Sequence i becomes what is in its place; those in nobody's place are closed."""
        kept = {id(sequence) for sequence in placed.values()}
        states = {i: {name: getattr(s, name) for name in Sequence.__slots__} for i, s in placed.items()}
        for sequence in sequences:
            if id(sequence) not in kept:
                self.cache.close(sequence, keep=False)
        for i, sequence in enumerate(sequences):
            for name, value in states[i].items():
                setattr(sequence, name, value)
            self.cache.adopt(sequence)
        for sequence in placed.values():
            if all(sequence is not mine for mine in sequences):
                sequence.row = -1
        return copies

    def truncate(self, sequence: Sequence, length: int) -> list[Copy]:
        """Give back the pages beyond `length`, after making sure that what is before it is all there.

        A block that ends up half full and is shared with a fork is copied: the next token will be written into it.
        """
        cache, row = self.cache, sequence.row
        for table in cache.tables:
            self._check_reach(table, row, sequence, length)
        halves = [self._shared_half(number, row, length) for number in range(len(cache.tables))]
        self.ensure([int(page != NULL) for page in halves], cache.rows_of(length))
        copies = []
        for number, page in enumerate(halves):
            if page != NULL:
                table, fresh = cache.tables[number], self.take(number, 1)
                copies.append(self._copy(number, [page], fresh.tolist()))
                table.write(row, length // table.slot_tokens, fresh)
                cache.give_back(number, np.array([page], np.int32))
        back = sequence.length - length
        for number, table in enumerate(cache.tables):
            if not table.per_token:
                self._choose_state(table, row, back)
                continue
            keep = max(-(-length // table.slot_tokens), int(table.shared[row]))
            slots = np.arange(keep, int(table.blocks[row]))
            cache.give_back(number, table.pages[row, slots])
            table.write(row, keep, np.zeros(len(slots), np.int32))
            table.blocks[row] = keep
        for position in [p for p in sequence.snapshots if p > length]:
            cache.give_back_all(sequence.snapshots.pop(position))
        self.take_checkpoints(sequence, -1)
        return copies

    def _shared_half(self, number: int, row: int, length: int) -> int:
        """The page of a block that `length` cuts and that another sequence owns too; NULL if there is none."""
        table, pool = self.cache.tables[number], self.cache.pool_of[number]
        slot = length // table.slot_tokens
        if not table.per_token or not length % table.slot_tokens or slot < table.shared[row] or pool is None:
            return NULL
        page = int(table.pages[row, slot])
        return page if pool.groups[table.tag].refs[page] else NULL

    def _check_reach(self, table: GroupTable, row: int, sequence: Sequence, length: int) -> None:
        if table.per_token:
            first = max(table.reach.tail(length) // table.slot_tokens, table.head_blocks)
            if table.reach.span is not None and first < int(table.first[row]):
                held = int(table.first[row]) * table.slot_tokens
                raise CannotTruncate(
                    f"group {table.tag!r} needs tokens from {first * table.slot_tokens} on to go on from {length}, but"
                    f" holds only those from {held} on; open the sequence again from its tokens"
                )
            return
        have = int(np.count_nonzero(table.pages[row]))
        if sequence.length - length > max(have - 1, 0) and not sequence.restore:
            raise CannotTruncate(
                f"group {table.tag!r} holds the state after {sequence.length} tokens, not after {length}; extend with"
                " drafts= to be able to go back, or open the sequence again from its tokens"
            )

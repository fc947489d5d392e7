"""Room: taking pages for sequences, all or nothing, evicting exactly what is needed."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from kvweave.cache.books import Books
from kvweave.cache.sequence import Copy, Rows, Sequence
from kvweave.errors import NeverFits, OutOfPages
from kvweave.pool import Ids, PoolPages
from kvweave.table import Counts, GroupTable


def copies_of(tables: list[GroupTable], src: SequenceOf[int], dst: SequenceOf[int]) -> list[Copy]:
    """One page of each table."""
    both = np.array([src, dst], np.int32)
    return [Copy(table.tag, both[0, i : i + 1], both[1, i : i + 1]) for i, table in enumerate(tables)]


def _lacking(table: GroupTable, blocks: int, position: int) -> list[tuple[int, int]]:
    """Slots from `blocks` on that are needed to go on from `position`, as runs: of the head, and of the tail."""
    if not table.per_token:
        return [(blocks, 1)] if not blocks else []
    end, head = position // table.slot_tokens, table.head_blocks
    runs = (blocks, min(head, end)), (max(blocks, head, table.tails.first_block(position)), end)
    return [(first, last) for first, last in runs if first < last]


class Room:
    """Takes the pages of sequences. Everything is asked for before anything is changed."""

    def __init__(self, books: Books, admission_reserve: float) -> None:
        self.books = books
        self.reserve = admission_reserve
        self.evicted_pages = 0
        self.live_tables = [books.tables[number] for number in books.states]
        self._tags = [[(tag, books.numbers[tag]) for tag in pool.groups] for pool in books.pools]

    # ---- extend

    def make(self, rows: Rows, lengths: Counts, drafts: int) -> list[Copy]:
        """Pages so that the rows reach `lengths`; live states, and one more a draft token."""
        if len(rows) == 1:
            return self.make_one(self.books.by_row[int(rows[0])], int(lengths[0]), drafts)
        books = self.books
        grows = [self._growth(numbers, rows, lengths, drafts) for numbers in books.alike]
        counts = [0] * len(books.tables)
        for numbers, grow in zip(books.alike, grows, strict=True):
            count = 0 if grow is None else int(grow.sum())
            for number in numbers:
                counts[number] = count
        is_new = bool(self.reserve) and bool((books.committed[rows] == 0).any())
        self.ensure(counts, int(lengths.max()), is_new)
        for numbers, grow in zip(books.alike, grows, strict=True):
            if grow is not None:
                self._append(numbers, rows, grow, counts[numbers[0]])
        books.set_room(rows)
        if not books.fresh:
            return []
        books.fresh.difference_update(rows.tolist())
        return self._restore([books.by_row[row] for row in rows.tolist()])

    def make_one(self, sequence: Sequence, length: int, drafts: int, stops: SequenceOf[int] = ()) -> list[Copy]:
        """`make` for one row, in plain numbers; with pages for its states at `stops`, where there is room for them."""
        books, row = self.books, sequence.row
        grows = [0] * len(books.tables)
        for numbers in books.alike:
            table = books.tables[numbers[0]]
            need = -(-length // table.slot_tokens) if table.per_token else 1 + drafts
            grow = max(0, need - int(table.blocks[row]))
            for number in numbers:
                grows[number] = grow
        is_new = bool(self.reserve) and (not books.committed[row] or bool(sequence.restore))
        if not stops or not self._ensure_with(grows, len(stops), length, is_new):
            stops = ()
            self.ensure(grows, length, is_new)
        for number, count in enumerate(grows):
            if count:
                table = books.tables[number]
                books.widen(table, int(table.blocks[row]) + count)
                if count == 1:
                    table.append_one(row, self._take_one(number))
                else:
                    table.append(row, self.take(number, count))
        if stops:
            sequence.planned = {stop: self.take_states() for stop in stops}
            books.planned.add(row)
        books.set_room_of(row)
        books.fresh.discard(row)
        return self._restore([sequence]) if sequence.restore else []

    def _ensure_with(self, grows: list[int], count: int, length: int, is_new: bool) -> bool:
        """Whether `grows` and `count` pages more of each state can be taken, all at once."""
        counts = list(grows)
        for number in self.books.states:
            counts[number] += count
        return self.can_ensure(counts, length, is_new)

    def _growth(self, numbers: list[int], rows: Rows, lengths: Counts, drafts: int) -> Counts | None:
        """New pages a row for tables that are alike; None where no row needs any."""
        table = self.books.tables[numbers[0]]
        if not table.per_token and not drafts and not self.books.fresh:
            return None
        need = -(-lengths // table.slot_tokens) if table.per_token else 1 + drafts
        grow: Counts = need - table.blocks[rows]
        if grow.max() <= 0:
            return None
        return np.maximum(grow, 0) if grow.min() < 0 else grow

    def _append(self, numbers: list[int], rows: Rows, grow: Counts, count: int) -> None:
        """`grow` more pages at the end of each row, `count` in all, for tables that are alike."""
        tables = [self.books.tables[number] for number in numbers]
        slots = tables[0].blocks[rows]
        most = int((slots + grow).max())
        for table in tables:
            self.books.widen(table, most)
            table.blocks[rows] = slots + grow
        if count != len(rows) or grow.min() != 1:
            slots = np.repeat(slots - np.cumsum(grow) + grow, grow) + np.arange(count)
            rows = np.repeat(rows, grow)
        for number, table in zip(numbers, tables, strict=True):
            table.write_many(rows, slots, self.take(number, count))

    def _restore(self, sequences: list[Sequence]) -> list[Copy]:
        """Snapshots of hits that are to be copied into fresh live states."""
        copies = []
        for sequence in sequences:
            if sequence.restore:
                copies += copies_of(self.live_tables, sequence.restore, self.live(sequence))
                sequence.restore = ()
        return copies

    # ---- arrive

    def arrive(self, sequence: Sequence, position: int) -> None:
        """Pages for what the token at `position` can see, and a live state: all that is not in the tables yet."""
        books, row = self.books, sequence.row
        lacking = [_lacking(table, int(table.blocks[row]), position) for table in books.tables]
        counts = [sum(last - first for first, last in runs) for runs in lacking]
        self.ensure(counts, position, bool(self.reserve))
        for number, (table, runs) in enumerate(zip(books.tables, lacking, strict=True)):
            before, slots = int(table.blocks[row]), position // table.slot_tokens if table.per_token else 1
            books.widen(table, slots)
            table.blocks[row] = slots
            for first, last in runs:
                table.write(row, first, self.take(number, last - first))
            if table.span is not None and table.per_token:
                first = max(table.tails.first_block(position), table.head_blocks)
                table.erase(row, int(table.first[row]), min(first, before))
                table.first[row] = first
        sequence.restore = ()
        books.set_room_of(row)
        books.fresh.discard(row)

    # ---- pages

    def live(self, sequence: Sequence) -> list[int]:
        """The pages of its live states."""
        return [int(table.pages[sequence.row, 0]) for table in self.live_tables]

    def take_states(self) -> tuple[int, ...]:
        """A page of each group of states."""
        return tuple([self._take_one(number) for number in self.books.states])

    def _take_one(self, number: int) -> int:
        pool = self.books.pool_of[number]
        return pool.take_one(self.books.tables[number].tag) if pool else 0

    def take(self, number: int, count: int) -> Ids:
        pool = self.books.pool_of[number]
        return pool.take(self.books.tables[number].tag, count) if pool else np.zeros(count, np.int32)

    def ensure(self, counts: list[int], length: int, is_new: bool = False) -> None:
        """Make sure that `counts[g]` pages of each group can be taken; evict, or raise with nothing taken.

        `length` is that of the longest sequence that asks, to tell what can never fit from what does not fit now.
        """
        for pool, tags in zip(self.books.pools, self._tags, strict=True):
            wanted = {tag: counts[number] for tag, number in tags if counts[number]}
            if not wanted:
                continue
            if is_new and self.reserve:
                largest = max(wanted, key=lambda tag: pool.groups[tag].per_super)
                wanted[largest] += int(self.reserve * pool.num_supers * pool.groups[largest].per_super)
            if pool.prepare(wanted):
                self._evict_for(pool, wanted, length)

    def can_ensure(self, counts: list[int], length: int, is_new: bool = False) -> bool:
        """`ensure`, for what can be done without."""
        try:
            self.ensure(counts, length, is_new)
        except (OutOfPages, NeverFits):
            return False
        return True

    def _evict_for(self, pool: PoolPages, wanted: dict[str, int], length: int) -> None:
        if self._short_after_eviction(pool, wanted):
            self._refuse(pool, wanted, length)
        supers = pool.free_supers.size
        for tag, count in wanted.items():  # each from its own first
            group = pool.groups[tag]
            short = count - group.num_free - supers * group.per_super
            if short > 0:
                self._evict(tag, short)
            supers = max(0, supers - group.supers_for(count))
        while pool.prepare(wanted):
            if not any(self._evict(tag, group.per_super) for tag, group in pool.groups.items()):
                self._refuse(pool, wanted, length)

    def _evict(self, tag: str, count: int) -> int:
        prefix = self.books.prefix
        before = sum(prefix.cached)
        freed = prefix.evict(self.books.numbers[tag], count)
        self.evicted_pages += before - sum(prefix.cached)
        return freed

    def _short_after_eviction(self, pool: PoolPages, wanted: dict[str, int]) -> bool:
        """Whether even evicting all that can go would not do, by the super-pages that could become empty at best."""
        need = spare = 0
        for tag, group in pool.groups.items():
            left = group.num_free + self.books.prefix.evictable(self.books.numbers[tag]) - wanted.get(tag, 0)
            need += max(0, -(left // group.per_super))
            spare += max(0, left // group.per_super)
        return need > pool.free_supers.size + spare

    def _refuse(self, pool: PoolPages, wanted: dict[str, int], length: int) -> None:
        """Raise `NeverFits` where even an empty pool would be too small for one sequence, else `OutOfPages`."""
        plan = self.books.plan
        groups = [plan.group(tag) for tag in pool.groups]
        supers = sum(-(-group.num_blocks_held(length) // group.pages_per_super) for group in groups)
        if supers > pool.num_supers:
            unit = plan.pool(pool.name).unit_bytes
            raise NeverFits(
                f"a sequence of {length} tokens takes {supers} super-pages of pool {pool.name!r}, which has"
                f" {pool.num_supers}",
                available_bytes=pool.num_supers * unit,
                smallest_bytes=(supers + 1) * unit,
            )
        tag = max(wanted, key=lambda tag: wanted[tag] - pool.available(tag))
        evictable = self.books.prefix.evictable(self.books.numbers[tag])
        raise OutOfPages(pool.name, wanted=wanted[tag], available=pool.available(tag), evictable=evictable)

"""Fork, reorder, truncate: sequences that share a past, and sequences that take a step back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvweave.cache.books import Books
from kvweave.cache.room import Room
from kvweave.cache.sequence import FIELDS, Copy, Sequence
from kvweave.cache.states import States
from kvweave.errors import CannotTruncate
from kvweave.pool import NULL
from kvweave.table import Counts, GroupTable


class Forks:
    """Full blocks are shared and counted; what the next token is written into is copied."""

    def __init__(self, books: Books, room: Room, states: States, drop: Callable[[Sequence], None]) -> None:
        self.books = books
        self.room = room
        self.states = states
        self._drop = drop

    def fork(self, sequence: Sequence, n: int) -> tuple[list[Sequence], list[Copy]]:
        books = self.books
        counts = [n * len(self._private(table, sequence)) for table in books.tables]
        self.room.ensure(counts, sequence.length)
        made, copies = [], []
        for _ in range(n):
            child, more = self._twin(sequence)
            made.append(child)
            copies += more
        return made, copies

    def _twin(self, sequence: Sequence) -> tuple[Sequence, list[Copy]]:
        books, row = self.books, self.books.take_row()
        child = Sequence(books, row, sequence.tokens, sequence.namespace, sequence.priority, sequence.node)
        child.num_cached, child.num_prompt = sequence.num_cached, sequence.num_prompt
        child.branch, child.restore = sequence.branch, sequence.restore
        child.points, child.spaced_end = list(sequence.points), sequence.spaced_end
        sequence.node.rolling = False
        books.prefix.pin(sequence.node)
        books.by_row[row] = child
        for rows in (books.fresh, books.pointed):
            if sequence.row in rows:
                rows.add(row)
        books.copy_row(sequence.row, row)
        copies = []
        for number, table in enumerate(books.tables):
            copies += self._share(number, table, sequence, row)
        return child, copies

    def _private(self, table: GroupTable, sequence: Sequence) -> Counts:
        """The slots that cannot be shared: the live state, and the last block when it is not full."""
        row = sequence.row
        if not table.per_token:
            return np.arange(min(1, int(table.blocks[row])))
        first = max(sequence.length // table.slot_tokens, int(table.shared[row]))
        slots = np.arange(first, int(table.blocks[row]))
        private: Counts = slots[table.pages[row, slots] != NULL]
        return private

    def _share(self, number: int, table: GroupTable, sequence: Sequence, row: int) -> list[Copy]:
        """Make `row` a twin of a sequence's: its own pages counted once more, private ones replaced by copies."""
        source, pool = sequence.row, self.books.pool_of[number]
        private = self._private(table, sequence)
        blocks = int(table.blocks[source]) if table.per_token else len(private)
        pages = table.pages[source, :blocks].copy()
        own = np.arange(int(table.shared[source]), blocks)
        own = own[~np.isin(own, private) & (pages[own] != NULL)]
        if pool and len(own):
            pool.share(table.tag, pages[own])
        fresh = self.room.take(number, len(private))
        copies = [Copy(table.tag, pages[private], fresh)] if len(private) else []
        pages[private] = fresh
        table.write(row, 0, pages)
        table.first[row], table.shared[row], table.blocks[row] = table.first[source], table.shared[source], blocks
        return copies

    def reorder(self, sequences: list[Sequence], parents: list[int]) -> list[Copy]:
        """Fork each parent for its further children, then let the children take the places of the dropped."""
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(parents):
            children.setdefault(parent, []).append(child)
        counts = [
            sum((len(c) - 1) * len(self._private(table, sequences[p])) for p, c in children.items())
            for table in self.books.tables
        ]
        self.room.ensure(counts, max(sequence.length for sequence in sequences))
        copies: list[Copy] = []
        places: dict[int, Sequence] = {}
        for parent, own in children.items():
            keeper = parent if parent in own else own[0]
            others = [child for child in own if child != keeper]
            made, more = self.fork(sequences[parent], len(others)) if others else ([], [])
            copies += more
            places |= {keeper: sequences[parent], **dict(zip(others, made, strict=True))}
        self._swap(sequences, places)
        return copies

    def _swap(self, sequences: list[Sequence], places: dict[int, Sequence]) -> None:
        """Sequence i becomes what is in place i; those in nobody's place are closed."""
        kept = {id(sequence) for sequence in places.values()}
        lives = {i: {name: getattr(s, name) for name in FIELDS} for i, s in places.items()}
        for sequence in sequences:
            if id(sequence) not in kept:
                self._drop(sequence)
        for sequence in places.values():
            sequence.row = -1
        for i, sequence in enumerate(sequences):
            for name, value in lives[i].items():
                setattr(sequence, name, value)
            self.books.by_row[sequence.row] = sequence
        self.books.closes += 1  # batches made before mean other rows now

    # ---- truncate

    def truncate(self, sequence: Sequence, length: int) -> list[Copy]:
        """Give back the pages beyond `length`, after making sure that what is before it is all there.

        A block that ends up half full and is shared with a fork is copied: the next token will be written into it.
        """
        books, row = self.books, sequence.row
        for table in books.tables:
            self._check_reach(table, sequence, length)
        halves = [self._shared_half(number, row, length) for number in range(len(books.tables))]
        self.room.ensure([int(page != NULL) for page in halves], length)
        copies = [self._unshare(number, row, length) for number, page in enumerate(halves) if page != NULL]
        back = sequence.length - length
        for number, table in enumerate(books.tables):
            if not table.per_token:
                self.states.choose(number, row, back)
                continue
            keep = max(-(-length // table.slot_tokens), int(table.shared[row]))
            slots = np.arange(keep, int(table.blocks[row]))
            books.give_back(number, table.pages[row, slots])
            table.write(row, keep, np.zeros(len(slots), np.int32))
            table.blocks[row] = keep
        for position in [p for p in sequence.snapshots if p > length]:
            books.give_back_states(sequence.snapshots.pop(position))
        self.states.drop_checkpoints(sequence)
        return copies

    def _shared_half(self, number: int, row: int, length: int) -> int:
        """The page of a block that `length` cuts and that another sequence owns too; NULL if there is none."""
        table, pool = self.books.tables[number], self.books.pool_of[number]
        slot = length // table.slot_tokens
        if not table.per_token or not length % table.slot_tokens or slot < table.shared[row] or pool is None:
            return NULL
        page = int(table.pages[row, slot])
        return page if pool.groups[table.tag].refs[page] else NULL

    def _unshare(self, number: int, row: int, length: int) -> Copy:
        table = self.books.tables[number]
        slot = length // table.slot_tokens
        old, fresh = table.pages[row, slot : slot + 1].copy(), self.room.take(number, 1)
        table.write(row, slot, fresh)
        self.books.give_back(number, old)
        return Copy(table.tag, old, fresh)

    def _check_reach(self, table: GroupTable, sequence: Sequence, length: int) -> None:
        row = sequence.row
        if not table.per_token:
            if not self.states.can_go_back(table, sequence, sequence.length - length):
                raise CannotTruncate(
                    f"group {table.tag!r} holds the state after {sequence.length} tokens, not after {length}; extend"
                    " with drafts= to be able to go back, or open the sequence again from its tokens"
                )
        elif table.reach.span is not None:
            first = max(table.reach.tail(length) // table.slot_tokens, table.head_blocks)
            if first < int(table.first[row]):
                raise CannotTruncate(
                    f"group {table.tag!r} needs tokens from {first * table.slot_tokens} on to go on from {length}, but"
                    f" holds only those from {int(table.first[row]) * table.slot_tokens} on; open the sequence again"
                    " from its tokens"
                )

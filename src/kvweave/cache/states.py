"""States: the live one of each sequence, the snapshots it leaves, and the columns from which drafts are taken back."""

from __future__ import annotations

import numpy as np

from kvweave.cache.books import Books
from kvweave.cache.room import Room, copies_of
from kvweave.cache.sequence import Copy, Rows, Sequence
from kvweave.pool import NULL
from kvweave.table import Counts, GroupTable


class States:
    def __init__(self, books: Books, room: Room) -> None:
        self.books = books
        self.room = room

    # ---- drafts: column i holds the state after the i-th of the tokens that may be rejected

    def settle(self, rows: Rows, until: Counts) -> None:
        """A step with drafts is over: the state after the last token that stays becomes the live one."""
        for number in self.books.states:
            for row, length in zip(rows.tolist(), until.tolist(), strict=True):
                self.choose(number, row, int(self.books.lengths[row]) - length)

    def choose(self, number: int, row: int, tokens_back: int) -> None:
        """Make the state of so many tokens ago the live one, and give the other columns back."""
        table = self.books.tables[number]
        columns = int(table.blocks[row])
        if columns > 1:
            pages = table.pages[row, :columns].copy()
            live = columns - 1 - tokens_back
            self.books.give_back(number, np.delete(pages, live))
            table.write(row, 0, np.zeros(columns, np.int32))
            table.pages[row, 0] = pages[live]
            table.blocks[row] = 1

    def can_go_back(self, table: GroupTable, sequence: Sequence, tokens: int) -> bool:
        return bool(sequence.restore) or tokens < max(1, int(table.blocks[sequence.row]))

    # ---- snapshots

    def snapshot(self, sequence: Sequence, position: int) -> list[Copy]:
        """Copies of the live states, for the tree; none where there is no page for them."""
        if position in sequence.snapshots or position <= sequence.node.end or not self._has_room(1):
            return []
        pages = self.room.take_states()
        if not sequence.points:  # of those taken while generating, only the last is kept
            for old in [p for p in sequence.snapshots if p > sequence.node.end]:
                self.books.give_back_states(sequence.snapshots.pop(old))
        sequence.snapshots[position] = pages
        return self._copies_of_live(sequence, pages)

    def _copies_of_live(self, sequence: Sequence, pages: tuple[int, ...]) -> list[Copy]:
        return copies_of(self.room.live_tables, self.room.live(sequence), pages)

    def donate_live(self, sequence: Sequence) -> None:
        """At its end a sequence needs its live state no more: on the grid, it is a snapshot as it is."""
        books, row = self.books, sequence.row
        position = int(books.committed[row])
        if not books.states or position % books.grid or position != sequence.length or position <= sequence.node.end:
            return
        if position in sequence.snapshots or sequence.restore:
            return
        sequence.snapshots[position] = tuple(self.room.live(sequence))
        for table in self.room.live_tables:
            table.pages[row, 0] = NULL

    def give_back_live(self, row: int) -> None:
        """Let go of the live states, and of those after drafts; they may be donated already."""
        for number, table in zip(self.books.states, self.room.live_tables, strict=True):
            columns, live = int(table.blocks[row]), int(table.pages[row, 0])
            if columns > 1:
                self.books.give_back(number, table.owned(row))
            elif live != NULL:
                self.books.give_back_one(number, live)

    def _has_room(self, count: int) -> bool:
        counts = [count if number in self.books.states else 0 for number in range(len(self.books.tables))]
        return self.room.can_ensure(counts, 1)

    # ---- checkpoints: snapshots that a step writes on its way, or that are taken when it is over

    def stops(self, sequence: Sequence, length: int, on_the_way: bool) -> list[int]:
        """Where a step up to `length` should leave states: everywhere on its way, or only where it ends."""
        start = int(self.books.committed[sequence.row])
        if on_the_way:
            return self.books.stops(sequence, start, length)
        return [length] if self.books.next_stop(sequence, start) == length else []

    def plan_checkpoints(self, sequence: Sequence) -> None:
        """Pages for the states that the step up to the sequence's length passes; none where there is no room."""
        self.drop_checkpoints(sequence)
        positions = self.stops(sequence, sequence.length, True)
        if positions and self._has_room(len(positions)):
            sequence.planned = {position: self.room.take_states() for position in positions}
            sequence.in_step = True
            self.books.planned.add(sequence.row)

    def take_checkpoints(self, sequence: Sequence, position: int) -> list[Copy]:
        """The step is over: its states up to `position` are snapshots now, the others were not written.

        A step that leaves none on its way ends at the one it has: that is the live state, and is copied.
        """
        copies: list[Copy] = []
        in_tree = sequence.node.end
        planned, sequence.planned = sequence.planned, {}
        self.books.planned.discard(sequence.row)
        for at, pages in planned.items():
            if in_tree < at <= position and at not in sequence.snapshots:
                sequence.snapshots[at] = pages
                if not sequence.in_step:
                    copies = self._copies_of_live(sequence, pages)
            else:
                self.books.give_back_states(pages)
        return copies

    def drop_checkpoints(self, sequence: Sequence) -> None:
        if sequence.planned:
            self.take_checkpoints(sequence, -1)

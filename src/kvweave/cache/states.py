"""States: the live one of each sequence, the snapshots it leaves, and the columns from which drafts are taken back."""

from __future__ import annotations

import numpy as np

from kvweave.cache.books import Books
from kvweave.cache.room import Room
from kvweave.cache.sequence import Copy, Rows, Sequence
from kvweave.errors import NeverFits, OutOfPages
from kvweave.pool import NULL
from kvweave.table import Counts, GroupTable


class States:
    def __init__(self, books: Books, room: Room) -> None:
        self.books = books
        self.room = room

    # ---- drafts: column i holds the state after the i-th of the tokens that may be rejected

    def settle(self, rows: Rows, until: Counts) -> None:
        """The step is over: the state after the last token that stays becomes the live one."""
        for number in self.books.states:
            table = self.books.tables[number]
            if table.pages.shape[1] > 1:
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
        books = self.books
        if position in sequence.snapshots or position <= sequence.node.end or not self._has_room(1):
            return []
        pages = [int(self.room.take(number, 1)[0]) for number in books.states]
        if not sequence.points:  # of those taken while generating, only the last is kept
            for old in [p for p in sequence.snapshots if p > sequence.node.end]:
                self.give_back(sequence.snapshots.pop(old))
        sequence.snapshots[position] = pages
        live = [int(books.tables[number].pages[sequence.row, 0]) for number in books.states]
        return [self.room.copy(number, live[i], pages[i]) for i, number in enumerate(books.states)]

    def give_back(self, pages: list[int]) -> None:
        """Let go of one snapshot."""
        for number, page in zip(self.books.states, pages, strict=True):
            self.books.give_back(number, np.array([page], np.int32))

    def donate_live(self, sequence: Sequence) -> None:
        """At its end a sequence needs its live state no more: on the grid, it is a snapshot as it is."""
        books, row = self.books, sequence.row
        position = int(books.committed[row])
        if not books.states or position % books.grid or position != sequence.length or position <= sequence.node.end:
            return
        if position in sequence.snapshots or sequence.restore:
            return
        sequence.snapshots[position] = [int(books.tables[number].pages[row, 0]) for number in books.states]
        for number in books.states:
            books.tables[number].pages[row, 0] = NULL

    def _has_room(self, count: int) -> bool:
        counts = [count if number in self.books.states else 0 for number in range(len(self.books.tables))]
        try:
            self.room.ensure(counts, 1)
        except (OutOfPages, NeverFits):
            return False
        return True

    # ---- checkpoints: snapshots that a step writes on its way

    def plan_checkpoints(self, sequence: Sequence) -> None:
        """Pages for the states that the step up to the sequence's length passes; none where there is no room."""
        books = self.books
        self.drop_checkpoints(sequence)
        positions = books.stops(sequence, int(books.committed[sequence.row]), sequence.length - 1)
        if positions and self._has_room(len(positions)):
            pages = [self.room.take(number, len(positions)).tolist() for number in books.states]
            sequence.planned = dict(zip(positions, map(list, zip(*pages, strict=True)), strict=True))

    def take_checkpoints(self, sequence: Sequence, position: int) -> None:
        """The step left its states: those up to `position` are snapshots now, the others were not written."""
        for at, pages in sequence.planned.items():
            if at <= position and at > sequence.node.end and at not in sequence.snapshots:
                sequence.snapshots[at] = pages
            else:
                self.give_back(pages)
        sequence.planned = {}

    def drop_checkpoints(self, sequence: Sequence) -> None:
        self.take_checkpoints(sequence, -1)

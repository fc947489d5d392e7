"""Publishing: committed pages move from a sequence to the tree.

Walk down from the node on which the sequence stands. Where the tree has the tokens already, our pages are duplicates:
the tables take over the tree's pages, ours fill its gaps or go back. Where it has not, a new run is made of ours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.cache.books import Books
from kvweave.cache.sequence import Sequence
from kvweave.pool import NULL, Ids
from kvweave.prefix import Node
from kvweave.table import Counts, GroupTable


class Publisher:
    def __init__(self, books: Books) -> None:
        self.books = books

    def publish(self, sequence: Sequence) -> None:
        """Put what is committed into the tree, up to the last position that will be a resume point."""
        books, start = self.books, sequence.node.end
        end = min(int(books.committed[sequence.row]), sequence.num_tokens) // books.grid * books.grid
        if books.states:
            end = max((point for point in sequence.snapshots if point <= end), default=start)
        if end <= start:
            return
        points = {point for point in sequence.points if start < point < end}
        if books.states:
            points &= sequence.snapshots.keys()
        node = sequence.node
        for point in (*sorted(points), end):
            node = self._lead_to(sequence, node, point)
        books.prefix.pin(node)
        books.prefix.unpin(sequence.node)
        sequence.node = node
        for table in books.tables:
            if table.per_token:
                table.shared[sequence.row] = node.end // table.slot_tokens
                self._hide_passed(table, sequence.row, start // table.slot_tokens)

    def _hide_passed(self, table: GroupTable, row: int, start: int) -> None:
        """Pages kept for points on the way are the tree's now, and behind the window: out of the table."""
        start, end = max(start, table.head_blocks), int(min(table.first[row], table.shared[row]))
        if table.reach.span is not None and end > start:
            table.write(row, start, np.zeros(end - start, np.int32))

    def leave_behind(self, sequence: Sequence) -> None:
        """Let windows go on, but hold on to the blocks that resume points not in the tree yet will need."""
        books, row = self.books, sequence.row
        end = int(books.committed[row]) // books.grid * books.grid
        for number in books.windows:
            table = books.tables[number]
            first = int(table.first[row])
            start = max(first, int(table.shared[row]))
            last = int(min(table.reach.tail(end) // table.slot_tokens, table.blocks[row]))
            if last > start:
                slots = np.arange(start, last)
                spare = slots[~self._needed(sequence, table, slots, end)]
                self._let_go(sequence, number, spare, table.pages[row, spare])
            if (passed := min(start, last) - first) > 0:
                table.write(row, first, np.zeros(passed, np.int32))
            table.first[row] = max(first, last)

    def _needed(self, sequence: Sequence, table: GroupTable, slots: Counts, end: int) -> NDArray[np.bool_]:
        """Which slots before `end` the wanted points of a sequence, or `end` itself, need.

        Tails only move on, so a slot is needed if the next point behind it needs it.
        """
        ends = (slots + 1) * table.slot_tokens
        wanted = np.array([*sorted({*sequence.points, *sequence.on_the_way}), end])
        nearest = np.minimum(wanted[np.minimum(np.searchsorted(wanted[:-1], ends), len(wanted) - 1)], end)
        needed: NDArray[np.bool_] = table.reach.tail(nearest) // table.slot_tokens <= slots
        return needed | (slots < table.head_blocks) if table.head_blocks else needed

    def _lead_to(self, sequence: Sequence, node: Node, point: int) -> Node:
        """Walk and build from `node` to a node that ends at `point`."""
        books, tree = self.books, self.books.prefix.tree
        while node.end < point:
            rest = sequence.run(node.end, point)
            child = node.children.get(rest[: tree.grid].tobytes())
            if child is None:
                return self._build(sequence, node, point)
            same = tree.common(child.tokens, rest)
            if same < len(child.tokens):
                child = books.prefix.split(child, node.end + same)
            self._merge(sequence, child)
            node = child
        return node

    def _build(self, sequence: Sequence, node: Node, point: int) -> Node:
        """A new run from `node` to `point`, or more of the sequence's own last run."""
        prefix = self.books.prefix
        tokens = sequence.run(node.end, point)
        extras = any(node.end < p < point for p in sequence.on_the_way)
        pages = [self._donated(sequence, number, node.end, point) for number in range(len(self.books.tables))]
        self._forget_snapshots(sequence, point)
        is_end = point not in sequence.points
        if node is sequence.node and is_end and prefix.can_grow(node):
            prefix.grow(node, tokens, pages)
            self._shed(node)
            return node
        child = prefix.insert(node, tokens, pages, extras=extras, priority=sequence.priority)
        child.rolling = is_end
        return child

    def _donated(self, sequence: Sequence, number: int, start: int, end: int) -> Ids:
        """Our pages of one group for the run [start, end), but for those that no point needs: they go back."""
        table, row = self.books.tables[number], sequence.row
        if not table.per_token:
            size, nth = self.books.prefix.tree.groups[number].block_tokens, self.books.states.index(number)
            pages = np.zeros((end - start) // size, np.int32)
            for point, taken in sequence.snapshots.items():
                if start < point <= end:
                    pages[(point - start) // size - 1] = taken[nth]
            return pages
        first, last = start // table.slot_tokens, end // table.slot_tokens
        pages = table.pages[row, first:last].copy()
        if table.reach.span is not None:
            slots = np.arange(first, last)
            spare = ~self._needed(sequence, table, slots, end)
            self._let_go(sequence, number, slots[spare], pages[spare])
            pages[spare] = NULL
        return pages

    def _let_go(self, sequence: Sequence, number: int, slots: Counts, pages: Ids) -> None:
        """Give pages back and take them out of the table."""
        if len(slots):
            self.books.give_back(number, pages)
            rows = np.full(len(slots), sequence.row)
            self.books.tables[number].write_many(rows, slots, np.zeros(len(slots), np.int32))

    def _merge(self, sequence: Sequence, node: Node) -> None:
        """The tree has this run already: take over its pages, fill its gaps with ours, give back the rest."""
        node.extras |= any(node.start < point < node.end for point in sequence.on_the_way)
        for number, table in enumerate(self.books.tables):
            if table.per_token:
                self._merge_rows(sequence, node, number)
                continue
            ours = self._donated(sequence, number, node.start, node.end)
            self.books.give_back(number, self.books.prefix.keep(node, number, 0, ours))
        self._forget_snapshots(sequence, node.end)

    def _forget_snapshots(self, sequence: Sequence, end: int) -> None:
        """Those up to `end` are the tree's now."""
        if sequence.snapshots:
            sequence.snapshots = {point: pages for point, pages in sequence.snapshots.items() if point > end}

    def _merge_rows(self, sequence: Sequence, node: Node, number: int) -> None:
        books, table, row = self.books, self.books.tables[number], sequence.row
        first, last = node.start // table.slot_tokens, node.end // table.slot_tokens
        ours = table.pages[row, first:last].copy()
        useful = ours
        if table.reach.span is not None:
            slots = np.arange(first, last)
            needed = self._needed(sequence, table, slots, node.end)
            useful = np.where(needed, ours, np.int32(NULL))
            books.give_back(number, ours[~needed])
        books.give_back(number, books.prefix.keep(node, number, 0, useful))
        visible = np.where(ours == NULL, np.int32(NULL), node.pages[number])
        table.write(row, first, visible)

    def _shed(self, node: Node) -> None:
        """A point moved on: drop what its windows and states have passed."""
        prefix = self.books.prefix
        for number in prefix.tree.trailing:
            tail = int(prefix.tree.groups[number].reach.tail(node.end))
            prefix.drop(node, number, prefix.tree.before(node, number, tail))

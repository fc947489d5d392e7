"""Publishing: committed pages move from a sequence to the tree.

Walk down from the node on which the sequence stands. Where the tree has the tokens already, our pages are duplicates:
the tables take over the tree's pages, ours fill its gaps or go back. Where it has not, a new run is made of ours.
"""

from __future__ import annotations

import numpy as np

from kvweave.cache.books import Books
from kvweave.cache.sequence import Sequence
from kvweave.pool import NULL, Ids
from kvweave.prefix import Node
from kvweave.prefix.node import Snapshots
from kvweave.prefix.tree import NO_PAGES, Range
from kvweave.table import GroupTable


class Publisher:
    def __init__(self, books: Books) -> None:
        self.books = books

    def publish(self, sequence: Sequence) -> None:
        """Put what is committed into the tree, up to the last position that will be a resume point."""
        books, start = self.books, sequence.node.end
        committed = int(books.committed[sequence.row])
        if committed < start + books.grid or (books.states and not sequence.snapshots):
            return
        end = min(committed, sequence.num_tokens) // books.grid * books.grid
        if books.states:
            end = max([point for point in sequence.snapshots if point <= end], default=start)
        if end <= start:
            return
        points = [point for point in sequence.points if start < point < end]
        if books.states:
            points = [point for point in points if point in sequence.snapshots]
        node = sequence.node
        for point in [*points, end]:
            node = self._lead_to(sequence, node, point)
        if node is not sequence.node:
            books.prefix.pin(node)
            books.prefix.unpin(sequence.node)
            sequence.node = node
        for table in books.tables:
            if table.per_token:
                table.shared[sequence.row] = node.end // table.slot_tokens
                if table.span is not None:
                    self._hide_passed(table, sequence.row, start // table.slot_tokens)

    def _hide_passed(self, table: GroupTable, row: int, start: int) -> None:
        """Pages kept for points on the way are the tree's now, and behind the window: out of the table."""
        start, end = max(start, table.head_blocks), min(int(table.first[row]), int(table.shared[row]))
        if end > start:
            table.erase(row, start, end)

    def leave_behind(self, sequence: Sequence, end: int) -> None:
        """Let windows go on to `end`, but hold on to blocks that resume points not in the tree yet will need."""
        books, row = self.books, sequence.row
        for number in books.windows:
            table = books.tables[number]
            first, shared = int(table.first[row]), int(table.shared[row])
            last = min(table.tails.first_block(end), int(table.blocks[row]))
            if last <= first:
                continue
            table.first[row] = last
            if shared > first:
                table.erase(row, first, min(shared, last))
            self._let_go(row, number, self._spare(sequence, table, max(first, shared), last, end))

    def _let_go(self, row: int, number: int, runs: list[Range]) -> None:
        """Give back runs of slots, and take them out of the table."""
        table = self.books.tables[number]
        if runs:
            pages = [table.pages[row, low:high] for low, high in runs]
            self.books.give_back(number, pages[0] if len(pages) == 1 else np.concatenate(pages), gaps=False)
            for low, high in runs:
                table.erase(row, low, high)

    def _spare(self, sequence: Sequence, table: GroupTable, first: int, last: int, end: int) -> list[Range]:
        """Slots of [first, last), all behind the window at `end`, that no wanted point of a sequence needs."""
        spare, low = [], max(first, table.head_blocks)
        if low >= last:
            return []
        for point in [*self.books.wanted(sequence, low * table.slot_tokens, end - 1), end]:
            needed = min(table.tails.first_block(point), last)
            if needed > low:
                spare.append((low, needed))
            low = max(low, needed, point // table.slot_tokens)
        return spare

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
        extras = self.books.next_spaced(sequence, node.end) < point
        snapshots = _donated_states(sequence, node.end, point)
        pages: list[Ids] = [NO_PAGES] * len(self.books.tables)
        for number in self.books.per_token:
            pages[number] = self._donated(sequence, number, node.end, point)
        is_end = point not in sequence.points
        if node is sequence.node and is_end and prefix.can_grow(node):
            prefix.grow(node, tokens, pages, snapshots)
            return node
        child = prefix.insert(node, tokens, pages, snapshots, extras=extras, priority=sequence.priority)
        child.rolling = is_end
        return child

    def _donated(self, sequence: Sequence, number: int, start: int, end: int) -> Ids:
        """Our pages of one group for the run [start, end), but for those that no point needs: they go back."""
        table, row = self.books.tables[number], sequence.row
        first, last = start // table.slot_tokens, end // table.slot_tokens
        if table.span is not None:  # what was passed before is sorted out already
            passed = min(table.tails.first_block(end), last)
            start = max(first, int(table.first[row]))
            self._let_go(row, number, self._spare(sequence, table, start, passed, end))
        return table.pages[row, first:last].copy()

    def _merge(self, sequence: Sequence, node: Node) -> None:
        """The tree has this run already: take over its pages, fill its gaps with ours, give back the rest."""
        node.extras |= self.books.next_spaced(sequence, node.start) < node.end
        if self.books.states:
            self.books.prefix.keep_snapshots(node, _donated_states(sequence, node.start, node.end))
        for number in self.books.per_token:
            self._merge_rows(sequence, node, number)

    def _merge_rows(self, sequence: Sequence, node: Node, number: int) -> None:
        books, table, row = self.books, self.books.tables[number], sequence.row
        first, last = node.start // table.slot_tokens, node.end // table.slot_tokens
        ours = self._donated(sequence, number, node.start, node.end)
        books.give_back(number, books.prefix.keep(node, number, 0, ours))
        table.write(row, first, np.where(table.pages[row, first:last] == NULL, np.int32(NULL), node.pages[number]))


def _donated_states(sequence: Sequence, start: int, end: int) -> Snapshots:
    """Those of (start, end] are the sequence's no more."""
    return {at: sequence.snapshots.pop(at) for at in list(sequence.snapshots) if start < at <= end}

"""A simulated engine: it writes a signature into every row it fills, and checks every row it may read.

A row's signature is the hash of the namespace and of all tokens up to its own, so a page that belongs to another
prompt, was never written, or was overwritten is caught the moment a sequence could read it.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np

from kvweave.cache import Cache, Copy, Sequence
from kvweave.pool import NULL
from kvweave.prefix import Node


class Engine:
    """Memory for every group of a cache's plan, one number a row."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.memory: list[np.ndarray] = []
        for table, group in zip(cache.books.tables, cache.plan.groups, strict=True):
            pages = cache.plan.num_pages(group.tag)
            rows = table.slot_tokens if table.per_token else 1
            self.memory.append(np.zeros((pages + group.pages_per_super + 1, rows), np.int64))
        self.numbers = {table.tag: number for number, table in enumerate(cache.books.tables)}

    def carry_out(self, copies: SequenceOf[Copy]) -> None:
        for tag, src, dst in copies:
            for a, b in zip(src.tolist(), dst.tolist(), strict=True):
                assert a != NULL, f"a copy out of the NULL page of {tag}"
                assert b != NULL, f"a copy into the NULL page of {tag}"
                self.memory[self.numbers[tag]][b] = self.memory[self.numbers[tag]][a]

    def step(self, sequence: Sequence, start: int) -> None:
        """Compute the tokens [start, length): read what each needs, then write it."""
        signs = signatures(sequence.namespace, sequence.tokens[: sequence.length])
        for number, table in enumerate(self.cache.books.tables):
            if table.per_token:
                self.check_rows(sequence, number, start, signs)
                for position in range(start, sequence.length):
                    page, offset = self._at(number, sequence.row, position)
                    assert page != NULL, f"no page for token {position} of {table.tag}"
                    self.memory[number][page, offset] = signs[position]
            else:
                self._step_state(sequence, number, start, signs)

    def load(self, sequence: Sequence) -> None:
        """Fill the pages that the cache did not have, whole, as from a store."""
        length, cached = sequence.length, sequence.num_cached
        signs = signatures(sequence.namespace, sequence.tokens[:length])
        for number, table in enumerate(self.cache.books.tables):
            if not table.per_token:
                self.memory[number][table.pages[sequence.row, 0], 0] = signs[length - 1]
                continue
            for token in range(cached, length):
                page, offset = self._at(number, sequence.row, token)
                if page != NULL:
                    self.memory[number][page, offset] = signs[token]

    def _step_state(self, sequence: Sequence, number: int, start: int, signs: list[int]) -> None:
        pages = self.cache.books.tables[number].pages[sequence.row]
        assert pages[0] != NULL, "no live state"
        if start:
            assert self.memory[number][pages[0], 0] == signs[start - 1], (
                f"the state is not the one after {start} tokens"
            )
        for tag, position, page in sequence.checkpoints:
            if tag == self.cache.books.tables[number].tag:
                self.memory[number][page, 0] = signs[position - 1]
        columns = int(self.cache.books.tables[number].blocks[sequence.row])
        for back in range(columns):
            self.memory[number][pages[columns - 1 - back], 0] = signs[sequence.length - 1 - back]

    def check_rows(self, sequence: Sequence, number: int, position: int, signs: list[int]) -> None:
        """All that is needed to go on from `position` is there."""
        reach = self.cache.books.tables[number].reach
        needed = [*range(min(reach.head, position)), *range(max(reach.head, int(reach.tail(position))), position)]
        for token in needed:
            page, offset = self._at(number, sequence.row, token)
            assert page != NULL, (
                f"token {token} of {self.cache.books.tables[number].tag} is needed at {position}, but gone"
            )
            assert self.memory[number][page, offset] == signs[token], f"token {token} holds somebody else's row"

    def _at(self, number: int, row: int, position: int) -> tuple[int, int]:
        table = self.cache.books.tables[number]
        return int(table.pages[row, position // table.slot_tokens]), position % table.slot_tokens


def signatures(namespace: Hashable, tokens: np.ndarray) -> list[int]:
    """For each token, a number that stands for it and all before it."""
    sign, signs = hash(namespace), []
    for token in tokens.tolist():
        sign = hash((sign, token))
        signs.append(sign)
    return signs


def node_pages(cache: Cache, node: Node, number: int) -> list[int]:
    """The pages of a group that a node of the tree keeps."""
    if number in cache.books.states:
        nth = cache.books.states.index(number)
        return [pages[nth] for pages in node.snapshots.values()]
    pages: list[int] = node.pages[number][node.pages[number] != NULL].tolist()
    return pages


def check_books(cache: Cache) -> None:
    """Every page has one owner, or as many as are counted; free + owned = all; tables and kernel tables agree."""
    for number, table in enumerate(cache.books.tables):
        pool = cache.books.pool_of[number]
        if pool is None:
            continue
        group = pool.groups[table.tag]
        owners: dict[int, int] = {}
        cached = counted = 0
        for node in cache.books.prefix.tree.nodes():
            for page in node_pages(cache, node, number):
                owners[page] = owners.get(page, 0) + 1
                cached += 1
            counted += node.counts[number]
        for row, sequence in cache.books.by_row.items():
            for page in table.owned(row)[table.owned(row) != NULL].tolist():
                owners[page] = owners.get(page, 0) + 1
            for taken in [*sequence.snapshots.values(), *sequence.planned.values()]:
                for page in [p for n, p in zip(cache.books.states, taken, strict=True) if n == number]:
                    owners[page] = owners.get(page, 0) + 1
        free = group.free.all.tolist()
        assert len(set(free)) == len(free), f"{table.tag}: a page is free twice"
        assert not set(free) & set(owners), f"{table.tag}: a free page is owned"
        assert NULL not in free
        assert NULL not in owners
        for page, count in owners.items():
            assert count == 1 + int(group.refs[page]), f"{table.tag}: page {page} has {count} owners"
        assert len(free) + len(owners) == group.num_supers * group.per_super, f"{table.tag}: pages are lost"
        assert cached == counted == cache.books.prefix.cached[number], (
            f"{table.tag}: {cached} cached, books say {cache.books.prefix.cached}"
        )
        assert 0 <= cache.books.prefix.locked[number] <= cached
        if table.kernel_blocks > 1:
            rows = table.pages.shape[0]
            expected = np.stack([table.kernel_ids(table.pages[row]).ravel() for row in range(rows)])
            assert (expected == table.kernels).all()
    for pool in cache.books.pools:
        assert pool.free_supers.size + sum(g.num_supers for g in pool.groups.values()) == pool.num_supers

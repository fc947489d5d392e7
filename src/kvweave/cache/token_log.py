"""Ids of generated tokens, kept by row for whole batches at once."""

from __future__ import annotations

import numpy as np

from kvweave.cache.arguments import ids_of
from kvweave.cache.row_counters import RowCounters
from kvweave.cache.sequence import Rows, Sequence
from kvweave.errors import BadTokens
from kvweave.pool import Counts, Ids

RECENT = 256
"""Ids kept by row before they are flushed to their sequence."""
TURNS = 192
"""In so many steps of a token the ids of each sequence of a batch are flushed once, so that no step does so for all."""


class TokenLog:
    """`known` ids of a row's sequence are known, from its first token on, without a gap. Those
    from `flushed` on are kept here, the others by the sequence."""

    def __init__(self, counters: RowCounters, rows: int) -> None:
        self._counters = counters
        self._turn = 0
        self._recent: Ids = np.full((rows, RECENT), 0, np.int32)  # touched now: not by the first step of many rows

    def add_rows(self, count: int) -> None:
        self._recent = np.pad(self._recent, ((0, count), (0, 0)))

    def enter(self, row: int, count: int) -> None:
        """The sequence of a row knows `count` ids, all flushed."""
        self._counters.known_of[row] = self._counters.flushed_of[row] = count

    def flush(self, sequence: Sequence) -> None:
        """Append a row's recent ids to its sequence's own."""
        row = sequence.row
        recent = self._counters.known_of[row] - self._counters.flushed_of[row] if row >= 0 else 0
        if recent:
            sequence.add_tokens(self._recent[row, :recent])
            self._counters.flushed_of[row] = self._counters.known_of[row]

    def cut(self, sequence: Sequence, length: int) -> None:
        self.flush(sequence)
        sequence.cut_tokens(length)
        self.enter(sequence.row, min(self._counters.known_of[sequence.row], length))

    def cut_many(self, rows: Rows, sequences: list[Sequence], lengths: Counts) -> None:
        """`cut` for many rows at once."""
        for i in (lengths < self._counters.flushed[rows]).nonzero()[0].tolist():
            self.cut(sequences[i], int(lengths[i]))
        self._counters.known[rows] = np.minimum(self._counters.known[rows], lengths)

    # ---- adding

    def checked(
        self, rows: Rows, sequences: list[Sequence], start: Counts, counts: Counts | int, tokens: object
    ) -> tuple[Ids, bool]:
        """The ids of the tokens [start, start + counts) of each row, one after the other, as an array; and whether none
        of them is known yet. Those that are must be the same ones; none before them may be unknown."""
        ids = ids_of(tokens)
        total = counts * len(rows) if isinstance(counts, int) else int(counts.sum())
        if len(ids) != total:
            raise BadTokens(f"{len(ids)} tokens for {len(rows)} sequences that get {total}")
        if len(sequences) == 1 and self._counters.known_of[sequences[0].row] == start[0]:
            return ids, True
        known = self._counters.known[rows]
        if not np.count_nonzero(known != start):
            return ids, True
        if (known < start).any():
            at = int(np.flatnonzero(known < start)[0])
            raise BadTokens(
                f"the ids of tokens {known[at]} to {start[at] - 1} of a sequence are not known: pass them to commit"
            )
        for sequence, first, new in _by_sequence(sequences, start, counts, ids):
            overlap = min(sequence.num_tokens - first, len(new))
            if overlap > 0 and not _are_equal(sequence.run(first, first + overlap), new[:overlap]):
                raise BadTokens(
                    f"these are not the ids of the tokens from {first} on that the sequence was opened with"
                )
        return ids, False

    def add(
        self, rows: Rows, sequences: list[Sequence], start: Counts, counts: Counts | int, ids: Ids, are_new: bool
    ) -> None:
        """Add checked ids of the tokens [start, start + counts) of each row; known ones are skipped."""
        if are_new and len(sequences) == 1 and len(ids) <= RECENT:
            self._add_one(sequences[0], int(start[0]), ids)
            return
        if are_new and isinstance(counts, int) and counts <= RECENT:
            self._add_columns(rows, sequences, start, ids.reshape(len(rows), counts))
            return
        for sequence, first, given in _by_sequence(sequences, start, counts, ids):
            new = given[max(0, sequence.num_tokens - first) :]
            sequence.add_tokens(new)
            self.enter(sequence.row, self._counters.known_of[sequence.row] + len(new))

    def _add_one(self, sequence: Sequence, start: int, ids: Ids) -> None:
        """`_add_columns` for one row, in plain numbers."""
        row = sequence.row
        if start - self._counters.flushed_of[row] + len(ids) > RECENT:
            self.flush(sequence)
        first = start - self._counters.flushed_of[row]
        self._recent[row, first : first + len(ids)] = ids
        self._counters.known_of[row] = start + len(ids)

    def _add_columns(self, rows: Rows, sequences: list[Sequence], start: Counts, ids: Ids) -> None:
        """The same number of ids for each row, none of them known."""
        width, column = ids.shape[1], start - self._counters.flushed[rows]
        longest = int(column[column.argmax()]) + width
        if longest > RECENT - TURNS:  # flushed before these are added: drafts that are rejected are never flushed
            turns = max(1, TURNS // width)
            self._turn = (self._turn + 1) % turns
            for sequence in sequences[self._turn :: turns]:
                self.flush(sequence)
            column[self._turn :: turns] = 0
            if longest > RECENT:
                full = column > RECENT - width
                for i in full.nonzero()[0].tolist():
                    self.flush(sequences[i])
                column[full] = 0
        for i in range(width):
            self._recent[rows, column + i if i else column] = ids[:, i]
        self._counters.known[rows] = start + width


def _are_equal(known: Ids, ids: Ids) -> bool:
    """Whether ids are those that are known; any id may stand for a content, which is known by a negative one."""
    return bool(((known == ids) | (known < 0)).all())


def _by_sequence(
    sequences: list[Sequence], start: Counts, counts: Counts | int, ids: Ids
) -> list[tuple[Sequence, int, Ids]]:
    """Each sequence, where its ids start, and its ids."""
    ends = np.cumsum(np.full(len(sequences), counts, np.int64) if isinstance(counts, int) else counts)
    runs = np.split(ids, ends[:-1])
    return list(zip(sequences, start.tolist(), runs, strict=True))

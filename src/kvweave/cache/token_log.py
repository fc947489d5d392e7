"""Ids of generated tokens, kept by row for whole batches at once."""

from __future__ import annotations

import numpy as np

from kvweave.cache.row_counters import RowCounters
from kvweave.cache.sequence import Rows, Sequence
from kvweave.errors import BadTokens
from kvweave.pool import Counts, Ids
from kvweave.prefix import as_tokens

RECENT = 512
"""Ids kept by row before they are flushed to their sequence."""
WIDEST = 32
"""Of more ids for each row than so many in one call, none are kept by row."""


class TokenLog:
    """`known` ids of a row's sequence are known, from its first token on, without a gap. Those from `flushed` on are
    kept here, the others by the sequence. The first of them is in column (`flushed` + row) % `RECENT`: so of rows that
    are as long as one another few are full in one step."""

    def __init__(self, counters: RowCounters, rows: int) -> None:
        self._counters = counters
        self._recent: Ids = np.full((rows, RECENT + WIDEST), 0, np.int32)  # touched now: not by the first step

    def add_rows(self, count: int) -> None:
        self._recent = np.pad(self._recent, ((0, count), (0, 0)))

    def enter(self, row: int, count: int) -> None:
        """The sequence of a row knows `count` ids, all flushed."""
        self._counters.known_of[row] = self._counters.flushed_of[row] = count
        self._counters.log_start_of[row] = count - (count + row) % RECENT

    def flush(self, sequence: Sequence) -> None:
        """Append a row's recent ids to its sequence's own."""
        row = sequence.row
        recent = self._counters.known_of[row] - self._counters.flushed_of[row] if row >= 0 else 0
        if recent:
            first = self._counters.flushed_of[row] - self._counters.log_start_of[row]
            sequence.add_tokens(self._recent[row, first : first + recent])
            self.enter(row, self._counters.known_of[row])

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
        ids = as_tokens(tokens if isinstance(tokens, np.ndarray) and tokens.ndim == 1 else np.asarray(tokens).ravel())
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
        if are_new and isinstance(counts, int) and counts <= WIDEST and len(sequences) > 1:
            self._add_columns(rows, sequences, start, ids.reshape(len(rows), counts))
            return
        for sequence, first, given in _by_sequence(sequences, start, counts, ids):
            new = given[max(0, sequence.num_tokens - first) :]
            sequence.add_tokens(new)
            self.enter(sequence.row, self._counters.known_of[sequence.row] + len(new))

    def _add_columns(self, rows: Rows, sequences: list[Sequence], start: Counts, ids: Ids) -> None:
        """The same number of ids for each row, none of them known."""
        column = start - self._counters.log_start[rows]
        for i in (column >= RECENT).nonzero()[0].tolist():  # before these are added: drafts may be rejected yet
            self.flush(sequences[i])
            column[i] -= RECENT
        for i in range(ids.shape[1]):
            self._recent[rows, column + i if i else column] = ids[:, i]
        self._counters.known[rows] = start + ids.shape[1]


def _are_equal(known: Ids, ids: Ids) -> bool:
    """Whether ids are those that are known; any id may stand for a content, which is known by a negative one."""
    return bool(((known == ids) | (known < 0)).all())


def _by_sequence(
    sequences: list[Sequence], start: Counts, counts: Counts | int, ids: Ids
) -> list[tuple[Sequence, int, Ids]]:
    """Each sequence, where its ids start, and its ids."""
    if len(sequences) == 1:
        return [(sequences[0], int(start[0]), ids)]
    ends = np.cumsum(np.full(len(sequences), counts, np.int64) if isinstance(counts, int) else counts)
    runs = np.split(ids, ends[:-1])
    return list(zip(sequences, start.tolist(), runs, strict=True))

"""Token ids that sequences were told while they run, kept by row for whole batches at once."""

from __future__ import annotations

import numpy as np

from kvweave.cache.sequence import Rows, Sequence
from kvweave.errors import BadTokens
from kvweave.pool import Ids
from kvweave.prefix import as_tokens
from kvweave.table import Counts

RECENT = 256
"""Ids that are kept by row before they are handed to their sequence."""


class TokenLog:
    """`known[row]` ids of a sequence are known, from its first token on; without a gap, whoever told them when."""

    def __init__(self, rows: int) -> None:
        self.known: Counts = np.zeros(rows, np.int64)
        self._recent: Ids = np.zeros((rows, RECENT), np.int32)
        self._fill: Counts = np.zeros(rows, np.int64)

    def add_rows(self, count: int) -> None:
        self.known, self._fill = np.pad(self.known, (0, count)), np.pad(self._fill, (0, count))
        self._recent = np.pad(self._recent, ((0, count), (0, 0)))

    def enter(self, sequence: Sequence, count: int) -> None:
        """A sequence in its row knows `count` ids."""
        self.known[sequence.row] = count
        self._fill[sequence.row] = 0

    def clear(self, row: int) -> None:
        self.known[row] = self._fill[row] = 0

    def flush(self, sequence: Sequence) -> None:
        """Hand a row's recent ids to its sequence."""
        row = sequence.row
        fill = int(self._fill[row]) if row >= 0 else 0
        if fill:
            sequence.add_tokens(self._recent[row, :fill])
            self._fill[row] = 0

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget the ids from `length` on."""
        self.flush(sequence)
        sequence.cut_tokens(length)
        self.known[sequence.row] = min(int(self.known[sequence.row]), length)

    def cut_many(self, rows: Rows, sequences: list[Sequence], lengths: Counts) -> None:
        """`cut` for many rows at once."""
        over = self.known[rows] - lengths
        recent = (over > 0) & (over <= self._fill[rows])
        self.known[rows[recent]] -= over[recent]
        self._fill[rows[recent]] -= over[recent]
        for i in np.flatnonzero((over > 0) & ~recent).tolist():
            self.cut(sequences[i], int(lengths[i]))

    # ---- telling

    def checked(
        self, rows: Rows, sequences: list[Sequence], start: Counts, counts: Counts | int, tokens: object
    ) -> Ids:
        """The ids of the tokens [start, start + counts) of each row, one after the other, as an array.

        Ids that are known already must be the same ones; none before them may be unknown.
        """
        ids = as_tokens(tokens if isinstance(tokens, np.ndarray) and tokens.ndim == 1 else np.asarray(tokens).ravel())
        total = counts * len(rows) if isinstance(counts, int) else int(counts.sum())
        if len(ids) != total:
            raise BadTokens(f"{len(ids)} tokens for {len(rows)} sequences that get {total}")
        known = self.known[rows]
        if not np.count_nonzero(known != start):
            return ids
        if (known < start).any():
            at = int(np.flatnonzero(known < start)[0])
            raise BadTokens(
                f"the ids of tokens {known[at]} to {start[at] - 1} of a sequence are not known: pass them to commit"
            )
        for sequence, first, new in _by_sequence(sequences, start, counts, ids):
            overlap = min(sequence.num_tokens - first, len(new))
            if overlap > 0 and not np.array_equal(sequence.run(first, first + overlap), new[:overlap]):
                raise BadTokens(
                    f"these are not the ids of the tokens from {first} on that the sequence was opened with"
                )
        return ids

    def tell(self, rows: Rows, sequences: list[Sequence], start: Counts, counts: Counts | int, ids: Ids) -> None:
        """Take over checked ids of the tokens [start, start + counts) of each row; those that are known, are."""
        if isinstance(counts, int) and counts <= RECENT and not np.count_nonzero(self.known[rows] != start):
            self._tell_alike(rows, sequences, ids.reshape(len(rows), counts))
            return
        for sequence, first, given in _by_sequence(sequences, start, counts, ids):
            new = given[max(0, sequence.num_tokens - first) :]
            sequence.add_tokens(new)
            self.known[sequence.row] += len(new)

    def _tell_alike(self, rows: Rows, sequences: list[Sequence], ids: Ids) -> None:
        """As many ids for each row, none of them known."""
        width, fill = ids.shape[1], self._fill[rows]
        if int(np.maximum.reduce(fill)) + width > RECENT:
            for sequence in sequences:
                self.flush(sequence)
            fill = self._fill[rows]
        for column in range(width):
            self._recent[rows, fill + column] = ids[:, column]
        self._fill[rows] = fill + width
        self.known[rows] += width


def _by_sequence(
    sequences: list[Sequence], start: Counts, counts: Counts | int, ids: Ids
) -> list[tuple[Sequence, int, Ids]]:
    """Each sequence, where its ids start, and its ids."""
    ends = np.cumsum(np.full(len(sequences), counts, np.int64) if isinstance(counts, int) else counts)
    runs = np.split(ids, ends[:-1])
    return list(zip(sequences, start.tolist(), runs, strict=True))

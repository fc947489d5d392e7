"""Copies of pages that an engine must make before its next step, and the check that it has read the list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvweave.pool import NULL, Ids


class Copy(NamedTuple):
    """Pages of a group to be copied, `src` to `dst`, before the next step; copies are carried out in order."""

    tag: str
    src: Ids
    dst: Ids


class Copies:
    """Copies in the order in which they are to be carried out, one a group. Whoever iterates over them has taken them
    over.

    Until then the next call on one of their sequences is refused: a page that was never copied would be read as if
    it had been. No page of one call is both read and written.
    """

    def __init__(self) -> None:
        self.taken = False
        self._pages: dict[str, list[tuple[int, int, int]]] = {}
        """By group: row of a sequence, source, target."""

    def add(self, row: int, tag: str, src: int, dst: int) -> None:
        """One page, for the sequence in a row."""
        self._pages.setdefault(tag, []).append((row, src, dst))

    def add_all(self, row: int, tags: Sequence[str], src: Sequence[int], dst: Sequence[int]) -> None:
        """A page of each group, but of those that have none here."""
        for tag, source, target in zip(tags, src, dst):
            if target != NULL:
                self.add(row, tag, source, target)

    def includes(self, rows: Sequence[int]) -> bool:
        """Whether there are any for the sequences in these rows."""
        return any(row in rows for pages in self._pages.values() for row, _, _ in pages)

    def targets(self, row: int) -> set[tuple[str, int]]:
        """The pages that are written for the sequence in a row."""
        return {(tag, page[2]) for tag, pages in self._pages.items() for page in pages if page[0] == row}

    def drop(self, row: int) -> None:
        """The sequence in a row is closed: nothing is copied for it any more."""
        kept = {tag: [page for page in pages if page[0] != row] for tag, pages in self._pages.items()}
        self._pages = {tag: pages for tag, pages in kept.items() if pages}

    def __iter__(self) -> Iterator[Copy]:
        self.taken = True
        return iter(self._all())

    def _all(self) -> list[Copy]:
        return [Copy(tag, *np.array(pages, np.int32).T[1:]) for tag, pages in self._pages.items()]

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return repr(self._all())


NO_COPIES = Copies()

"""What became of members of some classes, counted by class and octave of age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_HITS: Final = 4096.0
"""Beyond so many, all counts are halved: what was long ago is forgotten."""


def add(row: list[float], octave: int, share: float) -> None:
    """Add a share of a member to the count of an octave."""
    row[octave] = row[octave] + share  # compiled, += makes an object of the share first


class AgeCounts:
    """Counts of numbered classes; `priors` are what classes are believed to be worth at first, by one another."""

    def __init__(self, priors: Sequence[float], octaves: int) -> None:
        self.priors = priors
        self.hits = [[0.0] * octaves for _ in priors]
        self.began = [[0.0] * octaves for _ in priors]
        """Members whose time has ended, by their age when it began to be counted, ..."""
        self.ended = [[0.0] * octaves for _ in priors]
        """... and when it ended."""
        self.num_hits = 0.0

    def forget(self) -> bool:
        """Halve all counts, if there are many; whether there were."""
        if self.num_hits <= MOST_HITS:
            return False
        self.num_hits /= 2
        for table in (self.hits, self.began, self.ended):
            for row in table:
                row[:] = [count / 2 for count in row]
        return True

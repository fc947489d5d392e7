"""What keeping an entry of a tier is worth: the default policy of the core (docs/reuse-policy.md), on entries.

The value of an entry is that of what was evicted last when the entry was touched, plus a weight that is learned for
entries by their number of hits (`ClassWeights`). The entry of the least value is evicted first, and of equal values
the least recently touched one. A tier knows neither what a blob is nor which others it needs, so hits are all there is
to tell entries apart by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.policy import ClassWeights
from kvweave.policy.age_counts import OCTAVES

Integers = NDArray[np.int64]
CLASS_OF = np.array([0, 1, 2, 2, 3])
"""By hits: none, one, two or three, four or more."""
MOST_HITS = len(CLASS_OF) - 1
"""Hits of an entry are counted up to here."""
MOST_WEIGHT = 2.0
"""Less than in the core: a tier learns from few hits, for what is used most is in an engine's memory."""
PRIORS = (1.0, MOST_WEIGHT, MOST_WEIGHT, MOST_WEIGHT)
RECENT = 32
"""The number of entries of a hit is an average over about this many hits."""


class EntryValues:
    """Values by numbers of hits. All state: a table of four classes and three numbers."""

    def __init__(self) -> None:
        self._classes = ClassWeights(PRIORS, MOST_WEIGHT)
        self._floor = 0.0
        """The value of what was evicted last."""
        self._together = 1.0
        """Entries of a hit: an entry counts as its part of one, so that what is learned does not depend on how a prompt
        is cut into blobs."""

    def of(self, hits: Integers) -> NDArray[np.float64]:
        """The values of entries that are touched now."""
        weights: NDArray[np.float64] = np.array(self._classes.weights)[CLASS_OF[hits]]
        return self._floor + weights

    def of_one(self, hits: int) -> float:
        return self._floor + self._classes.weights[int(CLASS_OF[hits])]

    def hit(self, hits: Integers, ages: Integers) -> None:
        """Entries are hit together: the earlier hits and the age of each."""
        self._together += (len(hits) - self._together) / RECENT
        octaves = np.minimum(np.log2(ages + 1).astype(np.int64), OCTAVES - 1)
        counts = np.bincount(CLASS_OF[hits] * OCTAVES + octaves)
        for cell in np.flatnonzero(counts).tolist():
            number, age, share = cell // OCTAVES, (1 << cell % OCTAVES) - 1, int(counts[cell]) / self._together
            self._classes.hit(number, age, share)
            self._end(number, age, share)

    def evicted(self, value: float, hits: int, age: int) -> None:
        """An entry of this value is evicted."""
        self._floor = max(self._floor, value)
        share = 1 / self._together
        self._end(int(CLASS_OF[hits]), age, share)
        self._classes.evicted(age, share)

    def _end(self, number: int, age: int, share: float) -> None:
        self._classes.end(number, 0, age, share)
        if self._classes.is_due:
            self._classes.fit()

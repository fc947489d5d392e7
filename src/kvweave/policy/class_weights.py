"""What is learned of classes of cached things: how much likelier one of a class is to be used next than another.

The weight of a class is counted: hits, over the time that evictable members of the class were there to be hit, a moment
at age `a` counting `1 / a`. Eviction ends the time of a member, it does not distort the count, so nothing has to be
remembered of what is gone. Ages are in any unit of time that does not pass more slowly for some than for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Final

from kvweave.policy.age_counts import AgeCounts, add

OCTAVES: Final = 40
BELIEF: Final = 8.0
"""A weight is its prior at first; so many hits are worth as much as that belief."""
OLD: Final = 2
"""Ages are great that are twice that of eviction: so many octaves above the first one that counts."""
PROOF: Final = 24.0
"""So many hits at great ages are worth as much as the belief that no weight is above the most."""
FIT: Final = 64
"""Weights are worked out anew after so many hits and evictions."""
RECENT: Final = 64.0
"""The age of eviction is a moving average over about so many hits and evictions."""


class ClassWeights(AgeCounts):
    """The weights of numbered classes, from what is believed at first (`priors`) to `most`; to `most_proven` for a
    class whose members are still hit at great ages: a weight says nothing of ages that no member reached."""

    def __init__(self, priors: Sequence[float], most: float, most_proven: float = 0.0) -> None:
        super().__init__(priors, OCTAVES)
        self.most = most
        self.most_proven = most_proven
        self.weights = [*priors]
        self._num_ended = 0.0
        self._next_fit = float(FIT)
        self._octaves = 0
        """Up to the greatest age that a member reached."""
        self.log_age = 0.0
        """Moving average of log2 of the age at which members are evicted."""

    def hit(self, number: int, age: int, share: float) -> None:
        """A member of a class, or a share of it, was hit. Its time is to be ended (`end`)."""
        add(self.hits[number], octave(age), share)
        self.num_hits += share

    def end(self, number: int, began: int, age: int, share: float = 1.0) -> None:
        """The time of a member, which came to wait at the age `began`, ends."""
        last = octave(age)
        add(self.began[number], octave(began), share)
        add(self.ended[number], last, share)
        self._octaves = max(self._octaves, last + 1)
        self._num_ended += share
        if self._num_ended >= self._next_fit:
            self._next_fit += FIT
            self._fit()

    def evicted(self, age: int, share: float = 1.0) -> None:
        """A member was evicted at an age; its time was ended before (`end`)."""
        self.log_age += (log2(age + 1) - self.log_age) * share / min(self._num_ended, RECENT)

    def _fit(self) -> None:
        """Weights from the counts at ages about that of eviction, in proportion to what is believed at first."""
        first = max(0, round(self.log_age) - 1)
        hits = [sum(row[first : self._octaves]) for row in self.hits]
        times = [self._time(number, first) for number in range(len(self.priors))]
        scale = (sum(hits) + 1) / (sum([prior * time for prior, time in zip(self.priors, times)]) + 1)
        for number, prior in enumerate(self.priors):
            belief = BELIEF / (prior * scale)
            weight = (hits[number] + BELIEF) / (times[number] + belief) / scale
            if weight > self.most:
                weight = min(weight, max(self.most, self._proven(number, first + OLD, scale)))
            self.weights[number] = weight
        self.forget()

    def _proven(self, number: int, first: int, scale: float) -> float:
        """The weight of a class by what happened from an octave on, `most` before anything did."""
        hits, time = sum(self.hits[number][first : self._octaves]), self._time(number, first)
        return min(self.most_proven, (hits + PROOF) / (time + PROOF / (self.most * scale)) / scale)

    def _time(self, number: int, first: int) -> float:
        """How many octaves of age members of a class have waited, from one on; half of the one in which they began or
        ended."""
        began, ended = self.began[number], self.ended[number]
        waiting, time = 0.0, 0.0
        for at in range(self._octaves):
            change = began[at] - ended[at]
            if at >= first:
                time += waiting + change / 2
            waiting += change
        return max(0.0, time)


def octave(age: int) -> int:
    return min(OCTAVES, (age + 1).bit_length()) - 1

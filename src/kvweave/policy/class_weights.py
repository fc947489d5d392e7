"""What is learned of classes of cached things: how much likelier one of a class is to be used next than another.

The weight of a class is counted: hits, over the time that evictable members of the class were there to be hit, a moment
at age `a` counting `1 / a`. Eviction ends the time of a member, it does not distort the count, so nothing has to be
remembered of what is gone. Members that still wait count up to the age that they have reached, where they are given
(`fit`). Ages are in any unit of time that does not pass more slowly for some than for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Final

from kvweave.policy.age_counts import FIT, OCTAVES, AgeCounts, GoingOn, add, octave_of

BELIEF: Final = 8.0
"""A weight is its prior at first; so many hits are worth as much as that belief, ..."""
SMALL: Final = 0.5
"""... times a small prior (below 1) to this power: few hits are enough to show that more are to be expected."""
OLD: Final = 2
"""Ages are great that are twice that of eviction: so many octaves above the first one that counts."""
PROOF: Final = 24.0
"""So many hits at great ages are worth as much as the belief that no weight is above the most, and as the belief that
the weight at an age is that of the octave before."""
MOST_RISE: Final = 1.5
"""A weight at a great age is so many times that of an average age at most."""
MOST_FIT: Final = 256
"""Where members that wait are looked at, weights are worked out anew after so many hits and evictions at most: it takes
as long as some of them."""
RECENT: Final = 64.0
"""The age of eviction is a moving average over about so many hits and evictions."""


class ClassWeights(AgeCounts):
    """The weights of numbered classes, from what is believed at first (`priors`) to `most`; to `most_proven` for a
    class whose members are still hit at great ages: a weight says nothing of ages that no member reached."""

    def __init__(self, priors: Sequence[float], most: float, most_proven: float = 0.0) -> None:
        super().__init__(priors)
        self.most = most
        self.most_proven = most_proven
        self.weights = [*priors]
        """At the ages about that of eviction and beyond."""
        self.weights_from = [[prior] * OCTAVES for prior in priors]
        """By class: at the ages from an octave on, for octaves from `_first` on."""
        self._first = 0
        self._reached = 0
        """Octaves up to the greatest age that a member reached."""
        self.log_age = 0.0
        """Moving average of log2 of the age at which members are evicted, ..."""
        self._log_unit = 0.0
        """... and of this age for each unit of their gain."""

    def hit(self, number: int, age: int, share: float) -> None:
        """A member of a class, or a share of it, was hit. Its time is to be ended (`end`)."""
        add(self.hits[number], octave_of(age), share)
        self.num_hits += share

    def end(self, number: int, began: int, age: int, share: float = 1.0) -> None:
        """The time of a member, which came to wait at the age `began`, ends."""
        self.count(number, began, age, share)
        self._reached = max(self._reached, octave_of(age) + 1)
        self.num_ended += share

    def gain(self, number: int, density: float) -> float:
        """Of a member of a class: a weight x its density, the weight being that at the age up to which the gain keeps
        it. A member is kept through an octave of age while its gain by what is known of this octave is above it."""
        weights, at = self.weights_from[number], self._first
        gain = weights[at] * density
        while at + 1 < self._reached and gain > (start := 2.0 ** (at + 1 - self._log_unit)):
            at += 1
            gain = max(weights[at] * density, start)
        return gain

    def evicted(self, age: int, share: float = 1.0, gain: float = 1.0) -> None:
        """A member with a gain was evicted at an age; its time was ended before (`end`)."""
        part, log_age = share / min(self.num_ended, RECENT), log2(age + 1)
        self.log_age += (log_age - self.log_age) * part
        self._log_unit += (log_age - log2(gain) - self._log_unit) * part

    def fit(self, waiting: Sequence[GoingOn] = ()) -> None:
        """Weights from the counts at ages about that of eviction and beyond, in proportion to what is believed at
        first. How many octaves of age members waited is the sum of their lives; `waiting` are some that still do."""
        each = min(MOST_FIT, max(FIT, self.num_ended // 8)) if waiting else FIT
        self.next_fit = max(self.next_fit, self.num_ended - each) + each
        first = self._first = max(0, round(self.log_age) - 1)
        self._reached = max([self._reached, *[octave_of(age) + 1 for _, _, age, _ in waiting]])
        all_times = [_sums_from(row) for row in self.lives(waiting)]
        all_hits = [_sums_from(row) for row in self.hits]
        total = sum([hits[first] for hits in all_hits])
        scale = (total + 1) / (sum([prior * times[first] for prior, times in zip(self.priors, all_times)]) + 1)
        for number, prior in enumerate(self.priors):
            hits, times, worth = all_hits[number], all_times[number], BELIEF * min(1.0, prior) ** SMALL
            weight = (hits[first] + worth) / (times[first] + worth / (prior * scale)) / scale
            if weight > self.most:  # of ages that no member reached nothing is known
                old = min(first + OLD, OCTAVES - 1)
                proven = (hits[old] + PROOF) / (times[old] + PROOF / (self.most * scale)) / scale
                weight = min(weight, max(self.most, min(self.most_proven, proven)))
            self.weights[number] = self.weights_from[number][first] = weight
            if not waiting:  # nobody asks for a gain
                continue
            most = weight * MOST_RISE
            for at in range(first + 1, min(self._reached + 1, OCTAVES)):
                weight = min(most, (hits[at] + PROOF) / (times[at] + PROOF / (weight * scale)) / scale)
                self.weights_from[number][at] = weight
        self.forget()


def _sums_from(row: list[float]) -> list[float]:
    """The sum of a row from each octave on."""
    sums, total = [0.0] * len(row), 0.0
    for at in range(len(row) - 1, -1, -1):
        total += row[at]
        sums[at] = total
    return sums

"""How many hits keeping a member of a class brings for its time, by its age.

Lives are counted: one begins when a member is used and ends when it is used again, or when nothing is known of it any
more. Those that go on are counted up to the age that they have reached: without them it would seem that everything is
hit at some time. Hits over the lives that reached an age are the hazard at this age. The density at an age is the most
hits for the time that keeping a member from then on brings, whenever one stops. It falls with age where hits become
rarer, and rises at first where they take a while to come, as the next turn of a conversation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, expm1
from typing import Final

from kvweave.policy.age_counts import FIT, OCTAVES, AgeCounts, GoingOn, add, octave_of

BELIEF: Final = 4.0
"""So many hits of a class are worth as much as what all classes have in common, ..."""
COMMON: Final = 1.0
"""... and so many of all classes as what all octaves of age have in common."""
MOST_FIT: Final = 512
"""Densities are worked out anew after so many lives at most: it takes as long as some hundred lives."""
MOST_HALVED: Final = 8
"""A life that began before so many halvings counts next to nothing."""
MOST_HAZARD: Final = 4.0
UNKNOWN_TIME: Final = 20.0
"""One hit in so many octaves is believed in before any was seen."""


class Life:
    """Of a member of class `number`: when it was used, and the ages from which on and up to which it is known."""

    def __init__(self, number: int, last_used: int, began: int, age: int) -> None:
        self.number = number
        self.last_used = last_used
        self.began = began
        self.age = age

    def going_on(self, now: int, share: float) -> GoingOn:
        """What is known of it now."""
        return self.number, self.began, max(self.began, now - self.last_used), share


class HitDensity(AgeCounts):
    """Densities of numbered classes."""

    def __init__(self, priors: Sequence[float]) -> None:
        super().__init__(priors)
        self.densities: list[list[float]] = []
        """By class, at the start of each octave; empty until something is known."""
        self._halved: list[int] = []
        """When all counts were halved, the last times: a life that began before counts half."""

    def end(self, life: Life, share: float) -> None:
        """A life ends; `share` of the member was hit."""
        weight = self._weight(life)
        add(self.hits[life.number], octave_of(life.age), share * weight)
        self.count(life.number, life.began, life.age, weight)
        self.num_hits += share * weight
        self.num_ended += 1.0

    def _weight(self, life: Life) -> float:
        weight = 1.0
        for moment in self._halved:
            if life.last_used < moment:
                weight /= 2
        return weight

    def at(self, number: int, age: int) -> float:
        """Hits for a unit of time, of a member of a class at an age."""
        octave, row = octave_of(age), self.densities[number]
        part = min(1.0, (age + 1) / (1 << octave) - 1.0)
        return row[octave] + (row[octave + 1] - row[octave]) * part

    def fit(self, going_on: list[Life], each: int, now: int) -> None:
        """The hazards of a class are believed to be those of all classes, times a weight. `going_on` are lives that did
        not end yet, one for `each` of them, and reached the age that they have `now`: what is never asked for again is
        among them."""
        self.next_fit = self.num_ended + min(MOST_FIT, max(FIT, self.num_ended // 8))
        lives = self.lives([life.going_on(now, self._weight(life) * each) for life in going_on])
        hits, weighted = [0.0] * OCTAVES, [0.0] * OCTAVES
        for prior, mine, reached in zip(self.priors, self.hits, lives):
            hits = [total + count for total, count in zip(hits, mine)]
            weighted = [total + prior * count for total, count in zip(weighted, reached)]
        mean = (sum(hits) + 1.0) / (sum(weighted) + UNKNOWN_TIME)
        common = [(count + COMMON) / (reached + COMMON / mean) for count, reached in zip(hits, weighted)]
        self.densities = []
        for number, prior in enumerate(self.priors):
            mine, reached = self.hits[number], lives[number]
            expected = sum([hazard * count for hazard, count in zip(common, reached)])
            weight = (sum(mine) + BELIEF * prior) / (expected + BELIEF)
            hazards = [
                min(MOST_HAZARD, (count + BELIEF) / (lived + BELIEF / (weight * hazard)))
                for count, lived, hazard in zip(mine, reached, common)
            ]
            self.densities.append(densities_of(hazards))
        if self.forget():
            self._halved = [*self._halved[-MOST_HALVED + 1 :], now]


def densities_of(hazards: list[float]) -> list[float]:
    """From the hazard of each octave of age: at the start of each, the greatest of (chance of a hit until then) /
    (mean time until the hit, or until then), over the ends of all octaves to come; the last one twice.

    It is worth going on as long as what comes next is denser than what there is so far.
    """
    found = [0.0] * (len(hazards) + 1)
    all_hits, all_times, all_left = list[float](), list[float](), list[float]()
    """From the last stretch to the first: hits and time of one that enters it, and its chance to leave it without a
    hit."""
    for octave in range(len(hazards) - 1, -1, -1):
        hits, left = -expm1(-hazards[octave]), exp(-hazards[octave])
        time = (1 << octave) * hits / hazards[octave]
        while all_hits and all_hits[-1] * time >= hits * all_times[-1]:
            hits, time, left = hits + left * all_hits.pop(), time + left * all_times.pop(), left * all_left.pop()
        all_hits.append(hits)
        all_times.append(time)
        all_left.append(left)
        found[octave] = hits / time
    found[-1] = found[-2]
    return found

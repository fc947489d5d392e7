"""What became of members of some classes, counted by class and octave of age."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

OCTAVES: Final = 32
"""Octaves of age that are told apart; the last one has all ages beyond."""
MOST_HITS: Final = 4096.0
"""Beyond so many, all counts are halved: what was long ago is forgotten."""
FIT: Final = 64
"""What follows from the counts is worked out anew after so many members have ended, or more."""

GoingOn = tuple[int, int, int, float]
"""A member whose time has not ended: its class, its age when that began to be counted, its age now, and for how many it
stands."""


def add(row: list[float], at: int, share: float) -> None:
    """Add a share of a member to the count of an octave."""
    row[at] = row[at] + share  # compiled, += makes an object of the share first


def octave_of(age: int) -> int:
    return min(OCTAVES, (age + 1).bit_length()) - 1


class AgeCounts:
    """Counts of numbered classes; `priors` are what classes are believed to be worth at first, by one another."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.priors = priors
        self.hits = [[0.0] * OCTAVES for _ in priors]
        self.began = [[0.0] * OCTAVES for _ in priors]
        """Members whose time has ended, by their age when it began to be counted, ..."""
        self.ended = [[0.0] * OCTAVES for _ in priors]
        """... and when it ended."""
        self.num_hits = 0.0
        self.num_ended = 0.0
        self.next_fit = float(FIT)
        """It is worked out when so many have ended."""

    def count(self, number: int, began: int, age: int, share: float) -> None:
        """The time of a member, or of a share of it, that began to be counted at one age ended at another."""
        add(self.began[number], octave_of(began), share)
        add(self.ended[number], octave_of(age), share)

    def lives(self, going_on: Iterable[GoingOn]) -> list[list[float]]:
        """By class and octave: how many members went through it, and half of those that began or ended in it."""
        began, ended = [[*row] for row in self.began], [[*row] for row in self.ended]
        for number, start, age, share in going_on:
            add(began[number], octave_of(start), share)
            add(ended[number], octave_of(age), share)
        return [_lives(first, last) for first, last in zip(began, ended)]

    @property
    def is_due(self) -> bool:
        """Whether what follows from the counts is to be worked out anew."""
        return self.num_ended >= self.next_fit

    def forget(self) -> bool:
        """Halve all counts, if there are many; whether there were."""
        if self.num_hits <= MOST_HITS:
            return False
        self.num_hits /= 2
        for table in (self.hits, self.began, self.ended):
            for row in table:
                row[:] = [count / 2 for count in row]
        return True


def _lives(began: list[float], ended: list[float]) -> list[float]:
    lives, waiting = list[float](), 0.0
    for first, last in zip(began, ended):
        lives.append(max(0.0, waiting + (first - last) / 2))
        waiting += first - last
    return lives

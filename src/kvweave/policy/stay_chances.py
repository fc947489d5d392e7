"""Which points stay when they are used, and which are the next to go: for caches of rows alone (docs/reuse-policy.md).

In a cache of a few prompts everything may be evicted shortly before it is asked for. Then it is better to keep some
points for long than all of them for a short time. Whether that is so is seen from what is asked for after it was
evicted (`EvictedRuns`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, log
from typing import Final

from kvweave.policy.evicted_runs import EvictedRun
from kvweave.policy.hit_density import HitDensity, Life
from kvweave.prefix.node import Point

YOUNG: Final = 4
"""A new point's density is taken so many octaves below the age of eviction: at younger ages little is known, and little
is evicted."""
GAIN: Final = 0.5
"""A chance is multiplied by the ratio of the two densities to this power, each time it is worked out."""
LEAST: Final = 1 / 16
"""So many points of a class always stay, so that what is kept in vain is replaced."""
UPDATE: Final = 32
"""Chances are worked out anew after so many evictions."""
COUNTED: Final = 128
"""Where more points than so many wait, the lives of so many of them are counted."""
LOOKED_AT: Final = 1024
"""Of more evicted runs than so many that nobody has asked for, each of these stands for several."""
GOLDEN: Final = 0.6180339887498949
SILVER: Final = 0.41421356237309503
"""Multiples of them, without their whole part, are spread evenly over [0, 1)."""


class StayChances:
    """A point of class `number` stays with the chance `chances[number]`: 1 unless a new one is worth less than those
    that would be evicted for it."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.chances = [1.0] * len(priors)
        self.density = HitDensity(priors)
        self._share = 1.0
        """Of the lives, so many are counted: which, follows from the time of the last use."""
        self._num_cut = 0
        self._now = 0

    def stays(self, number: int, last_used: int) -> bool:
        """Whether a point stays that was used then: the same answer for all that is left of it when it is cut."""
        chance = self.chances[number]
        return chance >= 1.0 or (last_used * GOLDEN) % 1.0 < chance

    def is_counted(self, last_used: int) -> bool:
        """Whether the life of a point that was used then is counted."""
        return self._share >= 1.0 or (last_used * SILVER) % 1.0 < self._share

    def hit(self, number: int, point: Point, now: int, share: float) -> None:
        if self.is_counted(point.last_used):
            born = point.last_used
            self.density.end(Life(number, born, point.queued - born, now - born), share)

    @property
    def is_due(self) -> bool:
        """Whether chances are to be worked out anew (`update`)."""
        return self._num_cut >= UPDATE

    def update(
        self, next_to_go: list[tuple[int, int]], log_age: float, num_waiting: int, gone: Collection[EvictedRun]
    ) -> None:
        """Class and age of the next points to go of those that were to stay, which are evicted at about `log_age`;
        `gone` are evicted runs that nobody has asked for since."""
        self._num_cut = 0
        self._share = min(1.0, COUNTED / num_waiting)
        if self.density.is_due:
            each = 1 + len(gone) // LOOKED_AT
            runs: list[Life] = [run for run in list(gone)[::each] if self.is_counted(run.last_used)]
            self.density.fit(runs, each, self._now)
        if not next_to_go or not self.density.densities:
            return
        price = exp(sum([log(self.density.at(number, age)) for number, age in next_to_go]) / len(next_to_go))
        young = 1 << max(0, round(log_age) - YOUNG)
        for number in range(len(self.chances)):
            chance = self.chances[number] * (self.density.at(number, young) / price) ** GAIN
            self.chances[number] = min(1.0, max(LEAST, chance))

    # ---- what became of evicted rows

    def evicted(self, now: int, forgotten: list[EvictedRun]) -> None:
        """Rows were evicted, and nothing is known any more of those before."""
        self._now = now
        self._num_cut += 1
        for run in forgotten:
            self.missed(run, 0.0)

    def missed(self, run: EvictedRun, share: float) -> None:
        """A share of a run that was evicted would have been hit."""
        if self.is_counted(run.last_used):
            run.age = max(run.began, self._now - run.last_used)
            self.density.end(run, share)

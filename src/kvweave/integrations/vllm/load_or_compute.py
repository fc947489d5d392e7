"""Whether a hit is worth loading: by the speeds of loading and of computing that were measured while running."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.2
"""Of the newest measurement in a running mean."""
LEAST_TOKENS = 32
"""Steps and loads of fewer tokens say more of their overhead than of a speed."""
TRY_EVERY = 32
"""Of the loads that would be slower by what is known, one in so many is done all the same: speeds change."""


@dataclass(slots=True)
class RunningMean:
    value: float | None = None

    def add(self, number: float) -> None:
        self.value = number if self.value is None else self.value + WEIGHT * (number - self.value)


@dataclass(slots=True)
class Speeds:
    """Seconds a token, of loads by where they come from, and of prefills."""

    loads: dict[str, RunningMean] = field(default_factory=dict)
    computing: RunningMean = field(default_factory=RunningMean)
    _refused: int = 0

    def observe_load(self, source: str, num_tokens: int, seconds: float) -> None:
        if num_tokens >= LEAST_TOKENS:
            self.loads.setdefault(source, RunningMean()).add(seconds / num_tokens)

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= LEAST_TOKENS:
            self.computing.add(seconds / num_tokens)

    def is_load_faster(self, source: str) -> bool:
        """True where either speed is not known yet."""
        loading, computing = self.loads.get(source, RunningMean()).value, self.computing.value
        if loading is None or computing is None or loading <= computing:
            return True
        self._refused += 1
        return self._refused % TRY_EVERY == 0

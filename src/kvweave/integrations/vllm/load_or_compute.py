"""Whether a hit is worth loading: by the speeds of loading and of computing that were measured while running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvweave.store.results import GroupLoad

WEIGHT = 0.2
"""Of the newest measurement in a running mean."""
LEAST_TOKENS = 32
"""Steps and loads of fewer tokens say more of their overhead than of a speed."""
TRY_EVERY = 32
"""Of the loads that are expected to be slower than computing, one in this many is done, to notice a change of speed."""


@dataclass(slots=True)
class RunningMean:
    value: float | None = None

    def add(self, number: float) -> None:
        self.value = number if self.value is None else self.value + WEIGHT * (number - self.value)


@dataclass(slots=True)
class Speeds:
    """Of loads, seconds a byte, by tier and group: a state is as large for a long prompt as for a short one. Of
    prefills, seconds a token."""

    loads: dict[tuple[str, str], RunningMean] = field(default_factory=dict)
    computing: RunningMean = field(default_factory=RunningMean)
    _refused: int = 0

    def observe_load(self, sizes: Mapping[str, GroupLoad], num_tokens: int, seconds: Mapping[str, float]) -> None:
        """A load of `num_tokens`: what it read of each group, and how long that took."""
        for tag, (tier, num_bytes) in sizes.items():
            if num_tokens >= LEAST_TOKENS and tag in seconds:
                self.loads.setdefault((tier, tag), RunningMean()).add(seconds[tag] / num_bytes)

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= LEAST_TOKENS:
            self.computing.add(seconds / num_tokens)

    def load_seconds(self, sizes: Mapping[str, GroupLoad]) -> float | None:
        """How long a load will take; None: a group was never loaded from its tier."""
        total = 0.0
        for tag, (tier, num_bytes) in sizes.items():
            each = self.loads.get((tier, tag), RunningMean()).value
            if each is None:
                return None
            total += each * num_bytes
        return total

    def is_load_faster(self, sizes: Mapping[str, GroupLoad], num_tokens: int) -> bool:
        """True where either speed is not known yet."""
        loading, computing = self.load_seconds(sizes), self.computing.value
        if loading is None or computing is None or loading <= computing * num_tokens:
            return True
        self._refused += 1
        return self._refused % TRY_EVERY == 0

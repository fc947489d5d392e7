"""The result of a simulation: frozen records, one for each policy and memory, with the hits of the oracles."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvweave.sim.foresight import Foresight
from kvweave.sim.replay import Counts, Occupancy, Replay
from kvweave.sim.tiers import TierUse
from kvweave.sim.trace import Trace

BUCKETS = 60
PLAIN = (
    "trace",
    "policy",
    "memory",
    "requests",
    "refused",
    "output_tokens",
    "saved_seconds",
    "evicted_bytes",
    "computed_bytes",
    "hit_with_tiers",
    "saved_seconds_with_tiers",
)
"""Fields of a cell that JSON has as they are."""


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Prompt tokens, divided into hits and kinds of misses, which add up to `prompt`."""

    prompt: int
    hit: int
    evicted: int
    """Seen before, and their rows not kept: evicted, or never cached, because no resume point followed them."""
    no_point: int
    """Rows were there, but no point from which to go on."""
    never_seen: int
    """No earlier request had them; the last tokens of a prompt, which are always computed, among them."""

    @property
    def hit_rate(self) -> float:
        return self.hit / max(1, self.prompt)

    @property
    def overlap(self) -> int:
        """What an infinite cache that can go on from anywhere would have hit."""
        return self.prompt - self.never_seen


@dataclass(frozen=True, slots=True)
class Bucket:
    """The requests that arrived in one stretch of time."""

    start: float
    requests: int
    split: TokenSplit


@dataclass(frozen=True, slots=True)
class OracleHits:
    """Tokens hit with the same bytes by oracles (oracles.py), by the cache itself with foresight of places, and the
    bound that nothing exceeds."""

    placement: int
    belady: int
    both: int
    bound: int
    cache_with_placement: int


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One policy with one memory on one trace."""

    trace: str
    policy: str
    memory: int
    requests: int
    refused: int
    split: TokenSplit
    output_tokens: int
    kinds: dict[str, tuple[int, int]]
    """Requests and tokens that hit, by the kind of point."""
    saved_seconds: float
    evicted_bytes: int
    computed_bytes: int
    """Rows written: of all prompt and output tokens that were computed, those of refused requests not among them."""
    oracles: OracleHits | None
    tiers: tuple[TierUse, ...]
    timeline: tuple[Bucket, ...]
    occupancy: tuple[Occupancy, ...]
    groups: tuple[str, ...]
    replay: Replay = field(repr=False)

    @property
    def hit_with_tiers(self) -> int:
        return self.split.hit + sum(use.loaded_tokens for use in self.tiers)

    @property
    def saved_seconds_with_tiers(self) -> float:
        return self.saved_seconds + sum(use.saved_seconds for use in self.tiers)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as JSON has them; the requests apart."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            **asdict(self.split),
            "hit_rate": self.split.hit_rate,
            "overlap": self.split.overlap,
            "replay_seconds": self.replay.seconds,
            "hits_by_kind": {name: {"requests": n, "tokens": tokens} for name, (n, tokens) in self.kinds.items()},
            "oracles": None if self.oracles is None else asdict(self.oracles),
            "tiers": [asdict(use) for use in self.tiers],
            "timeline": [
                {"start": bucket.start, "requests": bucket.requests, **asdict(bucket.split)} for bucket in self.timeline
            ],
            "occupancy": [
                {"request": at.request, **dict(zip(self.groups, at.cached_bytes, strict=True))} for at in self.occupancy
            ],
        }


@dataclass(frozen=True, slots=True)
class Simulation:
    """All cells of one trace on one model."""

    trace: Trace
    model: str
    cells: tuple[Cell, ...]
    advice: str
    assumptions: tuple[str, ...]


def splits(foresight: Foresight, replay: Replay) -> Counts:
    """By request: the columns of `TokenSplit`."""
    prompt = np.array([placed.prompt_tokens for placed in foresight.requests], np.int64)
    overlap = np.array([placed.overlap for placed in foresight.requests], np.int64) * foresight.grid
    rows = np.clip(replay.rows, replay.hits, overlap)
    return np.stack([prompt, replay.hits, overlap - rows, rows - replay.hits, prompt - overlap], axis=1)


def total(columns: Counts) -> TokenSplit:
    return TokenSplit(*(int(number) for number in columns.sum(axis=0)))


def timeline(trace: Trace, columns: Counts) -> tuple[Bucket, ...]:
    """At most `BUCKETS` stretches of equal length."""
    arrivals = np.array([request.arrival for request in trace.requests])
    width = max(trace.seconds / BUCKETS, 1e-9)
    number = np.minimum(((arrivals - arrivals[0]) / width).astype(np.int64), BUCKETS - 1)
    return tuple(
        Bucket(float(arrivals[0]) + int(at) * width, int((number == at).sum()), total(columns[number == at]))
        for at in np.unique(number)
    )

"""Tiers below the device's memory: what of the prompts would come from host, disk or network, and whether loading it
is faster than computing it.

The model is inclusive and simple: every tier sees every request, and holds what a cache of its size under the same
policy and retention would hold. What a tier has beyond the levels above it is loaded if bytes / bandwidth + latency is
less than tokens / prefill speed, else computed. Tiers are asked in order; writing to them costs no time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.errors import BadOption
from kvweave.sim.geometry import Geometry
from kvweave.sim.replay import Counts
from kvweave.units import parse_bytes

BANDWIDTHS = {"host": 20e9, "disk": 5e9, "network": 2.5e9}
"""Bytes a second of a rank, unless given: a share of PCIe, an NVMe, 20 Gbit/s."""
LATENCIES = {"host": 50e-6, "disk": 200e-6, "network": 2e-3}
PREFILL_SPEED = 10_000.0
"""Tokens a second, unless given."""


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """`bandwidth` in bytes a second, `latency` in seconds a load."""

    name: str
    memory: int
    bandwidth: float
    latency: float

    @classmethod
    def parse(cls, text: str) -> SimulatedTier:
        """`host=256GB`, `disk=2TB@5GB/s`."""
        match = re.fullmatch(r"(\w+)=([^@]+?)(?:@([^/]+)(?:/s)?)?", text.strip())
        if match is None or (match[3] is None and match[1] not in BANDWIDTHS):
            raise BadOption(
                f"--tier: expected NAME=SIZE or NAME=SIZE@BANDWIDTH/s, got {text!r}; a bandwidth is known for"
                f" {', '.join(BANDWIDTHS)}"
            )
        bandwidth = float(parse_bytes(match[3], what="bandwidth")) if match[3] else BANDWIDTHS[match[1]]
        return cls(match[1], parse_bytes(match[2], what="a tier"), bandwidth, LATENCIES.get(match[1], 0.0))


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a tier had beyond all above it, what of that was loaded, and what loading it took and saved."""

    name: str
    memory: int
    found_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    load_seconds: float
    saved_seconds: float


def tier_uses(
    device: Counts, tiers: Sequence[tuple[SimulatedTier, Counts]], geometry: Geometry, prefill_speed: float
) -> list[TierUse]:
    """`device` and each tier's counts are the tokens that every request finds there."""
    there, uses = device.copy(), []
    for tier, hits in tiers:
        more = np.maximum(hits - there, 0)
        sizes = np.array(
            [geometry.bytes_to_load(int(there[i]), int(hits[i])) if more[i] else 0 for i in range(len(more))], np.int64
        )
        seconds = np.where(more > 0, sizes / tier.bandwidth + tier.latency, 0.0)
        worth = (more > 0) & (seconds < more / prefill_speed)
        loaded, took = int(more[worth].sum()), float(seconds[worth].sum())
        use = (int(more.sum()), loaded, int(sizes[worth].sum()), took, loaded / prefill_speed - took)
        uses.append(TierUse(tier.name, tier.memory, *use))
        there = np.where(worth, hits, there)
    return uses

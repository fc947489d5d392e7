"""What a daemon is: its terms, its tiers, and the models that were registered. Nothing here is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvweave.server.settings import Limits
from kvweave.store import Quota


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """What is stored under one key a chunk: a part of a group, its roles with their rows, shapes and dtypes."""

    id: str
    part: int
    parts: int
    blob_bytes: int
    """Header included."""
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group of a registered model."""

    tag: str
    reach: str
    layers: tuple[int, ...]
    rows: tuple[ShardDescription, ...]

    @property
    def chunk_bytes(self) -> int:
        return sum(row.blob_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A registration: what equal ones share."""

    model: str
    schema: str
    chunk_tokens: int
    groups: tuple[GroupDescription, ...]


@dataclass(frozen=True, slots=True)
class TierDescription:
    """A tier, the nearest first. `write`: whether a save waits for it (through), queues (back), or passes by (off)."""

    name: str
    kind: str
    capacity_bytes: int | None
    write: str
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Description:
    """All of it. What may be reserved and pinned, and `limits`, are for each connection."""

    version: str
    protocol: int
    arena_bytes: int
    lease_s: float
    drain_s: float
    reserve_bytes: int
    pin_bytes: int
    limits: Limits
    tiers: tuple[TierDescription, ...]
    quotas: Mapping[str, Quota]
    models: tuple[ModelDescription, ...]

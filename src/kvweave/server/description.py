"""The description of a daemon: its settings, its tiers, and the registered models. It has no counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvweave.server.settings import Limits
from kvweave.store import Quota


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """What is stored under one key for each chunk: a part of a group, with the rows, shapes and dtypes of its roles."""

    id: str
    part: int
    parts: int
    blob_bytes: int
    """Including the header."""
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
    """A registered schema, shared by all connections that registered the same."""

    model: str
    schema: str
    chunk_tokens: int
    groups: tuple[GroupDescription, ...]


@dataclass(frozen=True, slots=True)
class TierDescription:
    """A tier. `write`: whether a save waits for it (through), queues for it (back), or skips it (off)."""

    name: str
    kind: str
    capacity_bytes: int | None
    write: str
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Description:
    """The whole description. `inbox_bytes`, `reserve_bytes`, `pin_bytes` and `limits` are for each connection."""

    version: str
    protocol: int
    arena_bytes: int
    lease_s: float
    drain_s: float
    inbox_bytes: int
    """0: clients map the arena writable, and write to it themselves."""
    reserve_bytes: int
    pin_bytes: int
    limits: Limits
    tiers: tuple[TierDescription, ...]
    quotas: Mapping[str, Quota]
    models: tuple[ModelDescription, ...]

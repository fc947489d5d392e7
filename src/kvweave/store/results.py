"""Results of lookups and saves, statistics of stores, and saves that are copied but not yet visible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvweave.store.histogram import HistogramStats
from kvweave.store.keys import HashedPrompt
from kvweave.store.operations import ChunkRef
from kvweave.store.tier_executor import TierExecutorStats


class BaseHit(Protocol):
    """The tokens before `position` can be loaded; 0: nothing was found."""

    @property
    def prompt(self) -> HashedPrompt: ...

    @property
    def position(self) -> int: ...

    @property
    def present(self) -> NDArray[np.bool_]:
        """`[shards, chunks]`"""
        ...

    def __enter__(self) -> Self:
        """As a context it releases at the end what it holds."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def ticket(self, valid_s: float | None = None) -> bytes:
        """The hit as bytes for another process, which redeems it at a store of the same schema (`BaseStore.redeem`):
        32 bytes for each chunk, and some more. Valid for `valid_s`; by default for a minute, or as long as a lease."""
        ...


class GroupLoad(NamedTuple):
    """What a load reads of one group: from how far, and how much."""

    tier: str
    """The kind of the farthest tier."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save: blobs that were stored (or queued), that were present already, and that were dropped."""

    stored: int = 0
    present: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Requests and tokens since the store was opened, and the statistics of every tier."""

    lookups: int
    tokens_asked: int
    tokens_found: int
    loads: int
    shortened: int
    """Loads that ended before the position of their hit, because a blob was lost, damaged or late."""
    unanswered: int
    """Requests that the store, or one of its tiers, did not answer in time: what was not found may be stored all the
    same."""
    refused_tickets: int
    """Tickets that were damaged, of another schema, or too old."""
    tiers: tuple[TierExecutorStats, ...]
    latency: Mapping[str, HistogramStats]
    """Of lookups, loads and saves, as measured by their callers."""
    operations: int
    """Operations that were submitted, and not yet reported by `poll` or waited for."""


class SaveOutcome(NamedTuple):
    """The result of a save, and the pieces that were dropped."""

    saved: Saved
    failed: list[ChunkRef]


class GatheredSave(ABC):
    """A save whose payloads were copied: the source's memory may be reused. They become visible with `commit`.

    `failed`: the pieces that were not copied, for lack of room or time; save them again, with `start`.
    As a context it is abandoned at the end, unless it was committed.
    """

    failed: tuple[ChunkRef, ...] = ()

    @abstractmethod
    def commit(self, *, budget_s: float | None = None) -> Saved:
        """Store everything that was gathered; the other pieces count as `dropped`. May be called once."""

    @abstractmethod
    def abandon(self) -> None:
        """Free the copies; calling it twice is fine. After `commit` it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

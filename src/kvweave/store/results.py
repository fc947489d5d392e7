"""What lookups, saves and stores come to: frozen records, and a save of which only the first half is done."""

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


class AnyHit(Protocol):
    """From `position` on there is work to do; what lies before can be loaded. 0: nothing was found."""

    @property
    def prompt(self) -> HashedPrompt: ...

    @property
    def position(self) -> int: ...

    @property
    def present(self) -> NDArray[np.bool_]:
        """`[shards, chunks]`"""
        ...

    def __enter__(self) -> Self:
        """As a context it lets go at the end whatever it holds."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def ticket(self, valid_s: float | None = None) -> bytes:
        """The hit for another process, which redeems it at a store of the same schema (`AnyStore.redeem`): 32 bytes for
        each chunk, and some more. Good for `valid_s`; by default for a minute, or as long as a lease holds."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save: blobs that are stored (or queued), that were there already, and that had no place."""

    stored: int = 0
    present: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Requests and tokens since the store was opened, and every tier's own."""

    lookups: int
    tokens_asked: int
    tokens_found: int
    loads: int
    shortened: int
    """Loads that ended before their hit: something was lost, damaged or late in between."""
    unanswered: int
    """Questions that were not answered in time, in whole or by some tier: what they did not find may be there."""
    refused_tickets: int
    """Tickets that were damaged, of another schema, or too old."""
    tiers: tuple[TierExecutorStats, ...]
    latency: Mapping[str, HistogramStats]
    """Of lookups, loads and saves, as their callers saw them."""
    operations: int
    """Submitted, and not reported or waited for yet."""


class SaveOutcome(NamedTuple):
    """What became of a save, and the pieces that had no place."""

    saved: Saved
    failed: list[ChunkRef]


class GatheredSave(ABC):
    """A save whose payloads were copied: the source's memory may be used again. Nobody sees them before `commit`.

    `failed` are the pieces for which there was no room to gather, or no time: save them again, from where they start.
    As a context it is abandoned at the end, unless it was committed.
    """

    failed: tuple[ChunkRef, ...] = ()

    @abstractmethod
    def commit(self, *, budget_s: float | None = None) -> Saved:
        """Keep it, all that was gathered; what it lacks is `dropped`. Once."""

    @abstractmethod
    def abandon(self) -> None:
        """Give it up; may be called twice, and after `commit`, where it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

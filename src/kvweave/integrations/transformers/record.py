"""Records: what a request found, what it computed, and how long that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.cache.stats import Stats


@dataclass(frozen=True, slots=True)
class Record:
    """One `generate`. Tokens are summed over its rows, padding apart; `first_token_seconds` is until the model has
    computed the logits of the first new token."""

    rows: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float
    stored_tokens: int = 0
    """Of those reused, the ones that came from the store."""
    save_seconds: float = 0.0
    """Of all, what it took to hand the store what it lacked."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompts that were not found."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What was asked of a store, and what came of it."""

    lookups: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    shortened: int = 0
    """Loads that broke off: something was lost, damaged or late. What was left of the hit was tried once more."""
    no_room: int = 0
    """Hits for which memory had no pages: they were computed."""
    saves: int = 0
    stored: int = 0
    """Blobs that were new to the store."""
    dropped: int = 0
    late: int = 0
    failed: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WeaveStats:
    """All requests so far, the books of the core, and what the store was used for, where there is one.

    `store_declined` says why a model that was given one takes nothing from it.
    """

    requests: int
    prompt_tokens: int
    reused_tokens: int
    stored_tokens: int
    new_tokens: int
    core: Stats
    store: StoreUse | None = None
    store_declined: str = ""

    @classmethod
    def of(cls, records: Sequence[Record], core: Stats, store: StoreUse | None, declined: str) -> WeaveStats:
        return cls(
            len(records),
            sum(record.prompt_tokens for record in records),
            sum(record.reused_tokens for record in records),
            sum(record.stored_tokens for record in records),
            sum(record.new_tokens for record in records),
            core,
            store,
            declined,
        )

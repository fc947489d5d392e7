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

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompts that were not found."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class WeaveStats:
    """All requests so far, and the books of the core."""

    requests: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    core: Stats

    @classmethod
    def of(cls, records: Sequence[Record], core: Stats) -> WeaveStats:
        return cls(
            len(records),
            sum(record.prompt_tokens for record in records),
            sum(record.reused_tokens for record in records),
            sum(record.new_tokens for record in records),
            core,
        )

"""What the scheduler's side knows of a request: its prompt's keys, the hit, what is saved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvweave.integrations.vllm.connector_settings import RequestSettings
from kvweave.integrations.vllm.request_lookups import RequestLookup
from kvweave.store import BaseHit, HashedPrompt
from kvweave.store.results import GroupLoad

HIT_S = 5.0
"""Seconds after which a hit that was not used is looked up again: by then its lease may be over."""


@dataclass(slots=True)
class RequestState:
    """One request, from its arrival to its end."""

    settings: RequestSettings
    tokens: Sequence[int]
    """All tokens, prompt and generated: grows."""
    num_prompt_tokens: int
    prompt: HashedPrompt
    block_hashes: Sequence[bytes] = ()
    """The engine's own block hashes, for consumers of its events; the list grows."""
    adapter: str | None = None
    lookup: RequestLookup | None = None
    hit: BaseHit | None = None
    found_at: float = 0.0
    start: int = 0
    """What the engine itself had when it last asked."""
    limit: int | None = None
    """After a load that fell short: no hit beyond what it reached."""
    loading: BaseHit | None = None
    num_loading: int = 0
    sizes: dict[str, GroupLoad] = field(default_factory=dict)
    """By group: what a load of the hit reads."""
    saved: int = 0
    """Up to here everything is stored, or being saved."""

    @property
    def is_hit_old(self) -> bool:
        return self.hit is not None and time.monotonic() - self.found_at > HIT_S

    def hash_up_to(self, num_tokens: int) -> HashedPrompt:
        """The prompt with at least this many tokens hashed."""
        if self.prompt.num_tokens < num_tokens:
            self.prompt = self.prompt.extend(list(self.tokens[self.prompt.num_tokens : num_tokens]))
        return self.prompt

    def hashed(self, position: int) -> HashedPrompt:
        """As few digests as a save up to `position` needs; for other processes."""
        chunks = position // self.prompt.chunk_tokens
        return replace(self.prompt, prefixes=self.prompt.prefixes[:chunks], num_tokens=position, unfinished=None)

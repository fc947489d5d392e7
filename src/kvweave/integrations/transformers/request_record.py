"""Records: what a request found, what it computed, and how long that took."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from kvweave.cache.stats import Stats


@dataclass(frozen=True, slots=True)
class RequestRecord:
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
    fallback: str = ""
    """Why pages did not serve it, and transformers' own cache did."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompts that were not found."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class StoreUsage:
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
    fallback: int
    """Requests that pages did not serve: `RequestRecord.fallback` says why."""
    core: Stats
    store: StoreUsage | None = None
    store_declined: str = ""


class RequestRecords(Sequence[RequestRecord]):
    """The last KEPT requests, and the sums of all."""

    KEPT = 1024

    def __init__(self) -> None:
        self._last: deque[RequestRecord] = deque(maxlen=self.KEPT)
        self._sums: Counter[str] = Counter()
        self._lock = threading.Lock()

    def append(self, record: RequestRecord) -> None:
        names = ("prompt_tokens", "reused_tokens", "stored_tokens", "new_tokens")
        with self._lock:
            self._last.append(record)
            self._sums.update({"requests": 1, "aside": bool(record.fallback), **{n: getattr(record, n) for n in names}})

    def __len__(self) -> int:
        return len(self._last)

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestRecord]: ...
    def __getitem__(self, index: int | slice) -> RequestRecord | list[RequestRecord]:
        return list(self._last)[index] if isinstance(index, slice) else self._last[index]

    def stats(self, core: Stats, store: StoreUsage | None, declined: str) -> WeaveStats:
        sums = {name: self._sums[name] for name in ("requests", "prompt_tokens", "reused_tokens", "stored_tokens")}
        return WeaveStats(
            **sums, new_tokens=self._sums["new_tokens"], fallback=self._sums["aside"], core=core, store=store,
            store_declined=declined,
        )  # fmt: skip

"""Records of requests: tokens found, tokens computed, and times."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from kvweave.cache.stats import Stats


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One `generate`. Tokens are summed over its rows, without padding; `first_token_seconds` is the time until the
    logits of the first new token were computed."""

    rows: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float
    stored_tokens: int = 0
    """Those of the reused tokens that came from the store."""
    save_seconds: float = 0.0
    """The part of `seconds` spent on saving to the store."""
    fallback: str = ""
    """Why transformers' own cache served the request instead of pages; "" if pages did."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompts that were not found."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How a store was used."""

    chunk_tokens: int
    """Only whole chunks of this many tokens are stored."""
    lookups: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    shortened: int = 0
    """Loads that stopped early, because a blob was lost, damaged or late. The rest of the hit was tried once more."""
    no_room: int = 0
    """Hits for which there were no free pages: these tokens were computed."""
    saves: int = 0
    stored: int = 0
    """Blobs that the store did not have."""
    dropped: int = 0
    late: int = 0
    failed: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WeaveStats:
    """Sums over all requests, the statistics of the core, and the use of the store, if there is one.

    `store_declined` says why a model does not use the store it was given.
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
    """The last `KEPT` requests, and sums over all."""

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

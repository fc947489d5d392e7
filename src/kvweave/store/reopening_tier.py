"""A tier that may be unavailable: opened at the first use, and opened again after its files were removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import TierError, Vanished
from kvweave.store.closeable import Closeable
from kvweave.store.keys import Bytes
from kvweave.store.removals import RemovalLog, follow
from kvweave.store.tier import ALL, Blob, ChecksumObserver, KeyFilter, Tier, TierStats

log = logging.getLogger("kvweave.store")


class ReopeningTier(Closeable):
    """Wraps the tier that `open_tier` opens. While opening fails with `TierError`, every request raises it.

    The circuit breaker limits how often opening is tried. Any other error is a mistake in the configuration and is
    raised at once.
    """

    def __init__(self, name: str, kind: str, open_tier: Callable[[], Tier]) -> None:
        self.name, self.kind, self._open = name, kind, open_tier
        self._tier: Tier | None = None
        self._removals: RemovalLog | None = None
        self._lock, self._closed = threading.Lock(), False
        try:
            self._opened()
        except TierError as error:
            log.warning("serving without %s for now: %s", name, error)

    def _opened(self) -> Tier:
        with self._lock:
            if self._closed:
                raise TierError(f"tier {self.name!r} is closed")
            if self._tier is None:
                self._tier = self._open()
                if self._removals:
                    follow(self._tier, self._removals)
            return self._tier

    def follow_removals(self, log: RemovalLog) -> None:
        with self._lock:
            self._removals = log
            if self._tier:
                follow(self._tier, log)

    @contextmanager
    def _in_use(self) -> Iterator[Tier]:
        tier = self._opened()
        try:
            yield tier
        except Vanished as error:
            log.warning("%s; it is opened anew", error)
            with self._lock:
                if self._tier is tier:
                    self._tier = None
            tier.close()
            raise

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        with self._in_use() as tier:
            return tier.contains(keys)

    def contains_now(self, keys: Sequence[bytes]) -> NDArray[np.bool_] | None:
        """As `contains`, but None if the tier is not open, or cannot answer without waiting."""
        ask = getattr(self._tier, "contains_now", None)
        found: NDArray[np.bool_] | None = ask(keys) if ask else None
        return found

    def touch(self, keys: Sequence[bytes], *, is_hit: bool = False) -> None:
        """Does not open the tier for that."""
        tell = getattr(self._tier, "touch", None)
        if tell:
            tell(keys, is_hit=is_hit)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        with self._in_use() as tier:
            return tier.get(keys, into, observer)

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        with self._in_use() as tier:
            return tier.put(keys, blobs)

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._in_use() as tier:
            return tier.delete(keys)

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        with self._in_use() as tier:
            return tier.clear(key_filter)

    def stats(self) -> TierStats:
        """Does not wait; a tier that is not open has no statistics."""
        tier = self._tier
        return TierStats(self.name) if tier is None else tier.stats()

    def close(self) -> None:
        with self._lock:
            tier, self._tier, self._closed = self._tier, None, True
        if tier is not None:
            tier.close()

"""Tiers: where blobs are kept. One small protocol, in batches; `DictTier` is its twin in a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.store import checksums
from kvweave.store.closing import ClosedAtEnd
from kvweave.store.keys import SHARD_ID_BYTES, Bytes

ABSENT, UNREADABLE = -1, -2


@dataclass(frozen=True, slots=True)
class Blob:
    """A value: a payload, and before it a head of whole sectors (4096 bytes) that says what it is, made of the
    payload's sum (`sums`) by whoever has the bytes in the cache. Neither changes until it is kept.
    """

    payload: Bytes
    head_bytes: int
    head: Callable[[int], bytes]

    @property
    def num_bytes(self) -> int:
        return self.head_bytes + self.payload.nbytes


def whole(data: bytes | Bytes) -> Blob:
    """Bytes that say themselves what they are."""
    return Blob(np.frombuffer(data, np.uint8), 0, lambda _: b"")


class ChecksumObserver(Protocol):
    """Wants to know the sum (`sums`) of what a blob has behind `head_bytes`, if it is made on the way."""

    head_bytes: int

    def observe(self, payload_sum: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Keys of a tenant, of some rows, or of both; by default all."""

    tenant: bytes = b""
    shards: frozenset[bytes] | None = None

    def __contains__(self, key: bytes) -> bool:
        return key.startswith(self.tenant) and (self.shards is None or key[-SHARD_ID_BYTES:] in self.shards)


ALL = KeyFilter()


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what was done with it since it was opened. Quantities it cannot know are None."""

    name: str
    entries: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted: int = 0
    refused: int = 0


class Tier(Protocol):
    """Keeps blobs under keys of 48 bytes. All methods block, may be called from any thread, and raise `TierError`
    when the tier is in trouble. Keys come in order of worth: where recency decides, earlier ones stay longer."""

    name: str
    kind: str

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which keys are here; asking counts as use."""
        ...

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        """Fill `into[i]` with the blob of `keys[i]` if it is exactly as long; returns lengths, `ABSENT` for none,
        `UNREADABLE` for one that is there and cannot be read. That is no reason to fail at the others.

        A tier that has the bytes in the processor's cache tells `observer[i]` their sum: of exactly what it wrote.
        """
        ...

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        """Keep these; a key that is here already stays as it is. False: there was no room that could be made.

        All of a blob or nothing of it is visible, whatever happens on the way.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these; returns how many were here."""
        ...

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        """Forget what is here of `key_filter`, and nothing that is not ours; returns how many. May take long."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Give back everything; may be called twice."""
        ...


class DictTier(ClosedAtEnd):
    """The twin: everything in a dictionary, no quota."""

    kind = "dict"

    def __init__(self, name: str = "dict") -> None:
        self.name = name
        self.blobs: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.fromiter(map(self.blobs.__contains__, keys), bool, len(keys))

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:  # noqa: ARG002
        return [fill(target, self.blobs.get(key)) for key, target in zip(keys, into, strict=True)]

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        with self._lock:
            for key, blob in zip(keys, blobs, strict=True):
                self.blobs.setdefault(key, joined(blob))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self.blobs.pop(key, None) is not None for key in keys)

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        return self.delete([key for key in [*self.blobs] if key in key_filter])

    def stats(self) -> TierStats:
        return TierStats(self.name, len(self.blobs), sum(map(len, self.blobs.values())))

    def close(self) -> None:
        self.blobs.clear()


def joined(blob: Blob) -> bytes:
    """A blob in one piece, for stores that take no pieces."""
    head = blob.head(checksums.checksum(blob.payload)) if blob.head_bytes else b""
    return b"".join((head, blob.payload.data))


def fill(target: Bytes, blob: bytes | memoryview | None) -> int:
    """Copy a blob where it fits exactly; its length, or `ABSENT`."""
    if blob is None:
        return ABSENT
    if len(blob) == len(target):
        np.copyto(target, np.frombuffer(blob, np.uint8))
    return len(blob)

"""Tiers: where blobs are stored. One small protocol, in batches; `DictTier` is its in-memory twin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.store import checksums
from kvweave.store.closeable import Closeable
from kvweave.store.keys import SHARD_ID_BYTES, Bytes

ABSENT, UNREADABLE = -1, -2


@dataclass(frozen=True, slots=True)
class Blob:
    """A payload, preceded by a header of whole sectors (4096 bytes), which is made from the payload's checksum
    (`checksums`) by the code that computes that while copying. Neither changes until the blob is stored."""

    payload: Bytes
    head_bytes: int
    head: Callable[[int], bytes]

    @property
    def num_bytes(self) -> int:
        return self.head_bytes + self.payload.nbytes


def whole(data: bytes | Bytes) -> Blob:
    """Bytes that contain their own header."""
    return Blob(np.frombuffer(data, np.uint8), 0, lambda _: b"")


class ChecksumObserver(Protocol):
    """Receives the checksum (`checksums`) of what follows the first `head_bytes` of a blob, if the tier computes it
    while reading."""

    head_bytes: int

    def observe(self, payload_sum: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Keys of a tenant, of some shards, or both; by default all."""

    tenant: bytes = b""
    shards: frozenset[bytes] | None = None

    def __contains__(self, key: bytes) -> bool:
        return key.startswith(self.tenant) and (self.shards is None or key[-SHARD_ID_BYTES:] in self.shards)


ALL = KeyFilter()


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and counts since it was opened. None where the tier cannot know."""

    name: str
    entries: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted: int = 0


class Tier(Protocol):
    """Stores blobs under keys of 48 bytes. All methods block, may be called from any thread, and raise `TierError`
    on failure. Keys come in order of worth: of those that are used together, earlier ones are kept longer.

    A tier that chooses itself what to evict has `touch(keys, *, is_hit=False)` too: these keys were used just now;
    `is_hit`: a lookup found them, and its hit needs them."""

    name: str
    kind: str

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which keys are stored. Being asked for does not count as a use."""
        ...

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        """Fill `into[i]` with the blob of `keys[i]` if its length matches; returns lengths, `ABSENT` for keys that are
        not stored, `UNREADABLE` for blobs that cannot be read. The other keys are still read.

        A tier that computes checksums while reading passes them to `observer[i]`: of exactly the bytes that it wrote to
        `into[i]`.
        """
        ...

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        """Store blobs; a key that is stored already keeps its blob. False: there was no room, even after eviction.

        Atomic: a blob becomes visible completely or not at all.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete keys; returns how many were stored."""
        ...

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        """Delete the keys of `key_filter`, and nothing that is not kvweave's; returns how many. May take long."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Free all resources; calling it twice is fine."""
        ...


class DictTier(Closeable):
    """The in-memory twin: a dictionary without a limit."""

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
    """A blob as bytes, for clients that take a single buffer."""
    head = blob.head(checksums.checksum(blob.payload)) if blob.head_bytes else b""
    return b"".join((head, blob.payload.data))


def fill(target: Bytes, blob: bytes | memoryview | None) -> int:
    """Copy a blob into `target` if the lengths match; returns its length, or `ABSENT`."""
    if blob is None:
        return ABSENT
    if len(blob) == len(target):
        np.copyto(target, np.frombuffer(blob, np.uint8))
    return len(blob)

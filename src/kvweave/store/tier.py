"""Tiers: where blobs are kept. One small protocol, in batches; `DictTier` is its twin in a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.store.keys import Bytes

Blob = Sequence[bytes | memoryview]
"""A value in pieces (header, payload) of plain bytes, stored one after the other."""
Watch = Callable[[Bytes], None]
PIECE_BYTES = 256 << 10
"""What a tier reads before it shows it: fits the processor's second cache beside what it came from."""
ABSENT = -1


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

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which keys are here; asking counts as use."""
        ...

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], watch: Sequence[Watch] = ()) -> list[int]:
        """Fill `into[i]` with the blob of `keys[i]` if it is exactly as long; returns lengths, `ABSENT` for none.

        A tier that reads piece by piece shows each to `watch[i]`, in order, while it is still in the processor's cache.
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

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Give back everything; may be called twice."""
        ...


def blob_length(blob: Blob) -> int:
    return sum(map(len, blob))


class DictTier:
    """The twin: everything in a dictionary, no quota."""

    def __init__(self, name: str = "dict") -> None:
        self.name = name
        self.blobs: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.fromiter(map(self.blobs.__contains__, keys), bool, len(keys))

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], watch: Sequence[Watch] = ()) -> list[int]:  # noqa: ARG002
        return [fill(target, self.blobs.get(key)) for key, target in zip(keys, into, strict=True)]

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        with self._lock:
            for key, blob in zip(keys, blobs, strict=True):
                self.blobs.setdefault(key, joined(blob))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self.blobs.pop(key, None) is not None for key in keys)

    def stats(self) -> TierStats:
        return TierStats(self.name, len(self.blobs), sum(map(len, self.blobs.values())))

    def close(self) -> None:
        self.blobs.clear()


def joined(blob: Blob) -> bytes:
    """A blob in one piece, for stores that take no pieces."""
    return b"".join(blob)


def fill(target: Bytes, blob: bytes | memoryview | None) -> int:
    """Copy a blob where it fits exactly; its length, or `ABSENT`."""
    if blob is None:
        return ABSENT
    if len(blob) == len(target):
        np.copyto(target, np.frombuffer(blob, np.uint8))
    return len(blob)

"""The memory tier: extents of one host buffer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvweave.errors import StoreError
from kvweave.host_memory import check_memory
from kvweave.store import checksums
from kvweave.store.arena_tier import ArenaTier
from kvweave.store.catalog import Quota
from kvweave.store.keys import Bytes
from kvweave.store.tier import Blob, ChecksumObserver
from kvweave.units import parse_bytes

ALIGN = 64


class MemoryTier(ArenaTier):
    """Blobs in host memory: `capacity` bytes allocated here, or a buffer of the caller's (shared, pinned)."""

    kind = "memory"

    def __init__(
        self,
        capacity: int | str = 0,
        *,
        buffer: Bytes | None = None,
        quotas: Mapping[str, Quota] | None = None,
        name: str = "memory",
        align: int = ALIGN,
    ) -> None:
        memory = _allocated(name, parse_bytes(capacity)) if buffer is None else _checked(name, buffer)
        super().__init__(name, _Memory(memory), memory.nbytes, align=align, quotas=quotas)


def _allocated(name: str, num_bytes: int) -> Bytes:
    check_memory(f"tier {name!r}", num_bytes)
    return np.empty(num_bytes, np.uint8)


def _checked(name: str, buffer: Bytes) -> Bytes:
    flags = buffer.flags
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not (flags.c_contiguous and flags.writeable):
        raise StoreError(
            f"tier {name!r}: a buffer is a run of bytes that can be written (uint8, one axis), not {buffer.dtype} of"
            f" shape {buffer.shape}, strides {buffer.strides}{'' if flags.writeable else ', read-only'}"
        )
    return buffer


class _Memory:
    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def write(self, start: int, blob: Blob) -> None:
        place = self.memory[start : start + blob.num_bytes]
        payload_sum = checksums.copy(place[blob.head_bytes :], blob.payload)
        assert payload_sum is not None, "a copy without a deadline was late"
        place[: blob.head_bytes] = np.frombuffer(blob.head(payload_sum), np.uint8)

    def read(self, start: int, into: Bytes, observer: ChecksumObserver | None = None) -> bool:
        source, head = self.memory[start : start + into.nbytes], observer.head_bytes if observer else 0
        np.copyto(into[:head], source[:head])
        payload_sum = checksums.copy(into[head:], source[head:])
        if observer and payload_sum is not None:
            observer.observe(payload_sum)
        return True

    def close(self) -> None:
        self.memory = np.empty(0, np.uint8)

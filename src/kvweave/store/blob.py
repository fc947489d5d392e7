"""Blobs: values that describe themselves and detect damage.

    0   magic "KVWV"      4   version   6   0     8   length of meta   12  0
    16  length of payload 24  checksum: XXH3, 64 bits, of the header with these 8 bytes zero and the payload's own
                              checksum (see `checksums`)
    32  key (48: tenant, digest of namespace and tokens, shard)   80  first token   88  end token
    96  meta: JSON of the shard (group, layers, roles, shapes, dtypes, part), blanks up to a multiple of 4096
        payload, in the shard's order; it starts at a sector, as O_DIRECT requires

A reader knows every byte of the header in advance, except the checksum. Any difference is a miss.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import xxhash

from kvweave.errors import StoreError
from kvweave.store import checksums
from kvweave.store.keys import KEY_BYTES, Bytes
from kvweave.store.shards import Shard, ShardHeader
from kvweave.store.tier import Blob

MAGIC, VERSION = b"KVWV", 3
HEADER = struct.Struct(f"<4sHHIIQQ{KEY_BYTES}sQQ")
CHECKSUM = slice(24, 32)
ALIGN = 4096
COUNTS_LOCALS = sys.version_info < (3, 14)
"""Whether every local variable counts as a reference. From 3.14 on the interpreter leaves some out: a payload to which
its source still has a reference looks like one without another reference."""


def blob_bytes(shard: Shard) -> int:
    """Bytes of a shard's blobs: header and payload."""
    return header_bytes(shard) + shard.payload_bytes


def header_bytes(shard: ShardHeader) -> int:
    return HEADER.size + len(_padded(shard.meta))


@lru_cache(maxsize=1024)
def _padded(meta: bytes) -> bytes:
    """With blanks up to where the payload begins."""
    return meta.ljust(-(-(HEADER.size + len(meta)) // ALIGN) * ALIGN - HEADER.size)


def header(shard: ShardHeader, chunk: int, key: bytes) -> bytes:
    """The header of the blob that holds one chunk of a shard, with zeros for its checksum."""
    meta = _padded(shard.meta)
    start = 0 if shard.is_keyed else chunk * shard.chunk_tokens
    stop = start + shard.chunk_tokens
    fixed = HEADER.pack(MAGIC, VERSION, 0, len(meta), 0, shard.payload_bytes, 0, key, start, stop)
    return fixed + meta


def owned_payload(payload: Bytes) -> Bytes:
    """The payload of a source as bytes that no other code can change: itself if there is certainly no other reference
    to it, else a copy.

    A source may return memory that it reuses, whether read-only or not. A blob in a write queue must not be such
    memory.
    """
    base = payload.base
    if isinstance(base, bytes):
        return payload
    # The references of this function and of the call to `getrefcount`.
    alone = COUNTS_LOCALS and sys.getrefcount(payload) <= 2
    if alone and base is not None:
        # and that of the view
        alone = isinstance(base, np.ndarray) and base.base is None and sys.getrefcount(base) <= 3
    mine = payload if alone else payload.copy()
    mine.flags.writeable = False
    return mine


def flat_payload(shard: Shard, payload: Bytes) -> Bytes:
    """What a source returned, as bytes in a row: itself if it is. Raises `StoreError`."""
    if not _is_memory(payload) or payload.nbytes != shard.payload_bytes:
        raise StoreError(
            f"shard of {shard.tag!r}: the source gave {_said(payload)}, an array of {shard.payload_bytes} is needed"
        )
    if payload.dtype == np.uint8 and payload.ndim == 1 and payload.flags.c_contiguous:
        return payload
    return np.ascontiguousarray(payload).reshape(-1).view(np.uint8)


def flat_target(shard: Shard, memory: Bytes) -> Bytes:
    """The bytes of what a target returned, which a payload is written to. Raises `StoreError`."""
    is_fine = _is_memory(memory) and memory.flags.c_contiguous and memory.flags.writeable
    if not is_fine or memory.nbytes < shard.payload_bytes:
        raise StoreError(
            f"shard of {shard.tag!r}: the target gave {_said(memory)}, an array of {shard.payload_bytes} at"
            " least, in a row, that can be written is needed"
        )
    return memory.reshape(-1).view(np.uint8)[: shard.payload_bytes]


def _is_memory(given: object) -> bool:
    return isinstance(given, np.ndarray) and not given.dtype.hasobject


def _said(given: object) -> str:
    if not isinstance(given, np.ndarray):
        return f"a {type(given).__name__}"
    return "objects" if given.dtype.hasobject else f"{given.nbytes} bytes"


def seal(shard: Shard, chunk: int, key: bytes, payload: Bytes) -> Blob:
    """The payload with a header that is made when its checksum is known: now, if the payload could still be changed."""
    make = partial(sealed, shard, chunk, key)
    if payload.flags.writeable:
        made = make(checksums.checksum(payload))
        return Blob(payload, header_bytes(shard), lambda _: made)
    return Blob(payload, header_bytes(shard), make)


def sealed(shard: ShardHeader, chunk: int, key: bytes, payload_sum: int) -> bytes:
    """The header for a payload with this checksum."""
    head = header(shard, chunk, key)
    return head[: CHECKSUM.start] + _checksum(head, payload_sum).to_bytes(8, "little") + head[CHECKSUM.stop :]


class BlobCheck:
    """Checks that bytes are exactly the blob of a shard, chunk and key."""

    def __init__(self, shard: ShardHeader, chunk: int, key: bytes) -> None:
        self._shard, self._chunk, self._key = shard, chunk, key
        self.head_bytes = header_bytes(shard)
        self._payload_sum: int | None = None

    def observe(self, payload_sum: int) -> None:
        """The checksum of the bytes after the header, from the code that computed it while copying them."""
        self._payload_sum = payload_sum

    def passes(self, blob: Bytes) -> bool:
        """Whether the blob is intact; computes the checksum of the payload if it was not observed."""
        if blob.nbytes != self.head_bytes + self._shard.payload_bytes:
            return False
        if self._payload_sum is None:
            self.observe(checksums.checksum(blob[self.head_bytes :]))
        return self.matches_header(blob)

    def copied(self, blob: Bytes, payload: Bytes) -> Bytes | None:
        """Copy the blob's payload to `payload`; returns its header if the copy is intact. Others may write to the blob
        meanwhile: the copy is checked, not the blob."""
        head = blob[: self.head_bytes].copy()
        payload_sum = checksums.copy(payload, blob[self.head_bytes :])
        assert payload_sum is not None, "a copy without an end ended early"
        self.observe(payload_sum)
        return head if self.matches_header(head) else None

    def matches_header(self, head: Bytes) -> bool:
        """Whether the header is the one for the observed checksum; False if none was observed."""
        return self._payload_sum is not None and self.expected(head)(self._payload_sum)

    def expected(self, head: Bytes) -> Callable[[int], bool]:
        """What says whether a payload of some checksum is the one of this header. All else is compared now."""
        found, wanted = head[: self.head_bytes].tobytes(), header(self._shard, self._chunk, self._key)
        known, before, behind = found[CHECKSUM], slice(CHECKSUM.start), slice(CHECKSUM.stop, None)
        is_alike = found[before] == wanted[before] and found[behind] == wanted[behind]
        return lambda payload_sum: is_alike and _checksum(wanted, payload_sum).to_bytes(8, "little") == known


def _checksum(head: bytes, payload_sum: int) -> int:
    return xxhash.xxh3_64_intdigest(head + payload_sum.to_bytes(8, "little"))

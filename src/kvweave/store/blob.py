"""Blobs: values that say what they are, and can tell that they are damaged.

    0   magic "KVWV"      4   version   6   0     8   length of meta   12  0
    16  length of payload 24  checksum: XXH3, 64 bits, of the header with these 8 bytes zero and the payload's own XXH3
    32  key (48: tenant, digest of namespace and tokens, row)   80  first token   88  end token
    96  meta: JSON of the row (group, layers, roles, shapes, dtypes, part), blanks up to a multiple of 4096
        payload, in the row's order: from a sector on, as disks take it

A reader knows what it wants, so it knows every byte of the header but the checksum: whatever differs is a miss.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from kvweave.store import checksums
from kvweave.store.keys import KEY_BYTES, Bytes
from kvweave.store.shards import Shard, ShardHeader
from kvweave.store.tier import Blob

MAGIC, VERSION = b"KVWV", 2
HEADER = struct.Struct(f"<4sHHIIQQ{KEY_BYTES}sQQ")
CHECKSUM = slice(24, 32)
ALIGN = 4096


def blob_bytes(shard: Shard) -> int:
    """Bytes of a row's blobs, header and payload."""
    return header_bytes(shard) + shard.payload_bytes


def header_bytes(shard: ShardHeader) -> int:
    return -(-(HEADER.size + len(shard.meta)) // ALIGN) * ALIGN


def header(shard: ShardHeader, chunk: int, key: bytes, checksum: int = 0) -> bytes:
    """The header of the blob that holds chunk `chunk` of a row."""
    meta = shard.meta.ljust(header_bytes(shard) - HEADER.size)
    start = chunk * shard.chunk_tokens
    stop = start + shard.chunk_tokens
    fixed = HEADER.pack(MAGIC, VERSION, 0, len(meta), 0, shard.payload_bytes, checksum, key, start, stop)
    return fixed + meta


def owned_payload(payload: Bytes) -> Bytes:
    """What a source gave, as bytes that nobody else can change: itself if nobody else has it, else a copy.

    A source may hand out memory that it uses again, read-only or not; what is queued to be written must not be that.
    """
    base = payload.base
    if isinstance(base, bytes):
        return payload
    alone = sys.getrefcount(payload) <= 2  # this function's, and that of the question itself
    if alone and base is not None:
        alone = isinstance(base, np.ndarray) and base.base is None and sys.getrefcount(base) <= 3  # ... the view's, too
    mine = payload if alone else payload.copy()
    mine.flags.writeable = False
    return mine


def seal(shard: Shard, chunk: int, key: bytes, payload: Bytes) -> Blob:
    """The payload, with a header that is made when its sum is known: now, if somebody could still write to it."""
    if payload.nbytes != shard.payload_bytes:
        raise ValueError(f"row {shard.tag!r}: payload has {payload.nbytes} bytes, {shard.payload_bytes} expected")
    make = partial(sealed, shard, chunk, key)
    if payload.flags.writeable:
        made = make(checksums.checksum(payload))
        return Blob(payload, header_bytes(shard), lambda _: made)
    return Blob(payload, header_bytes(shard), make)


def sealed(shard: ShardHeader, chunk: int, key: bytes, payload_sum: int) -> bytes:
    """The header over a payload of which only the sum is known."""
    return header(shard, chunk, key, _checksum(header(shard, chunk, key), payload_sum))


class BlobCheck:
    """Whether bytes are exactly what was sealed for a row, chunk and key."""

    def __init__(self, shard: ShardHeader, chunk: int, key: bytes) -> None:
        self._row, self._chunk, self._key = shard, chunk, key
        self.head_bytes = header_bytes(shard)
        self._payload_sum: int | None = None

    def observe(self, payload_sum: int) -> None:
        """The sum of what stands behind the header, by whoever had it in the cache."""
        self._payload_sum = payload_sum

    def passes(self, blob: Bytes) -> bool:
        """The verdict on all bytes; a payload whose sum nobody saw is summed."""
        if blob.nbytes != self.head_bytes + self._row.payload_bytes:
            return False
        if self._payload_sum is None:
            self.observe(checksums.checksum(blob[self.head_bytes :]))
        return self.matches_header(blob)

    def matches_header(self, head: Bytes) -> bool:
        """The verdict when the payload's sum was seen, of a blob whose first bytes are `head`."""
        if self._payload_sum is None:
            return False
        return head[: self.head_bytes].tobytes() == sealed(self._row, self._chunk, self._key, self._payload_sum)


def _checksum(head: bytes, payload_sum: int) -> int:
    return xxhash.xxh3_64_intdigest(head + payload_sum.to_bytes(8, "little"))


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a blob says of itself."""

    key: bytes
    start: int
    stop: int
    payload_bytes: int
    meta: dict[str, Any]


def blob_info(blob: bytes) -> BlobInfo | None:
    """Read a blob that nobody knows anything about; None if it is damaged, or none of ours."""
    if len(blob) < HEADER.size or blob[:4] != MAGIC:
        return None
    _, version, _, meta_bytes, _, payload_bytes, checksum, key, start, stop = HEADER.unpack_from(blob)
    size = HEADER.size + meta_bytes
    if version != VERSION or len(blob) != size + payload_bytes:
        return None
    head = blob[: CHECKSUM.start] + bytes(8) + blob[CHECKSUM.stop : size]
    if _checksum(head, xxhash.xxh3_64_intdigest(blob[size:])) != checksum:
        return None
    return BlobInfo(key, start, stop, payload_bytes, json.loads(blob[HEADER.size : size]))

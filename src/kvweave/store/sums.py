"""Checksums (XXH3, 64 bits) of bytes while they pass: each is read once. In C where that could be built.

Without it, pieces are hashed while they are in the processor's cache, and the numbers are the same.
"""

from __future__ import annotations

import time
from math import inf

import numpy as np
import xxhash

from kvweave.store.compiled import native
from kvweave.store.keys import Bytes
from kvweave.store.stripes import Stripes

PIECE_BYTES = 256 << 10
"""Fits the processor's second cache beside what it came from."""
SHORTEST_BYTES = 4096
"""Below this a call to C gains nothing."""
STREAMED_BYTES = 1 << 20
"""From here on a copy is written past the cache: whoever reads it comes later."""


def checksum(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def copy(to: Bytes, source: Bytes, until: float = inf) -> int | None:
    """Copy bytes in one piece, and sum what was written; None if `until` (of `time.monotonic`) came before the end.

    Others may write to either side meanwhile: each byte is read once, and the sum is of that.
    """
    if native and to.nbytes >= SHORTEST_BYTES:
        return native.copy(to, source, to.nbytes >= STREAMED_BYTES, until)
    digest = xxhash.xxh3_64()
    for at in range(0, source.nbytes, PIECE_BYTES):
        if time.monotonic() >= until:
            return None
        piece = source[at : at + PIECE_BYTES].copy()
        np.copyto(to[at : at + PIECE_BYTES], piece)
        digest.update(piece.data)
    return digest.intdigest()


def read(files: Stripes, start: int, to: Bytes, head: int, bounce: Bytes, sector: int = 1) -> int | None:
    """Fill `to` from files by way of `bounce`, in whole sectors, and sum what stands behind `head` bytes; None if they
    end. Raises `OSError`."""
    aligned = not ((to.ctypes.data + head) % 32 or start % sector or head % sector)
    if native and aligned and to.nbytes >= head + SHORTEST_BYTES and bounce.nbytes >= head + PIECE_BYTES:
        return native.read(files.fds, files.stripe_bytes, start, to, head, bounce, sector)
    digest, step = xxhash.xxh3_64(), bounce.nbytes // sector * sector
    for at in range(0, to.nbytes, step):
        piece = to[at : at + step]
        sectors = bounce[: -(-piece.nbytes // sector) * sector]
        if not files.read(start + at, sectors):
            return None
        np.copyto(piece, sectors[: piece.nbytes])
        digest.update(piece[max(0, head - at) :].data)
    return digest.intdigest()

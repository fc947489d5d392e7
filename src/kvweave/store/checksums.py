"""Checksums (XXH3, 64 bits) computed while bytes are copied, so that memory is read once. In C where that was built.

Without C, pieces are hashed while they are in the processor's cache; the checksums are the same.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from math import inf

import numpy as np
import xxhash

from kvweave.store.compiled import native
from kvweave.store.keys import Bytes
from kvweave.store.striped_file import StripedFile

PIECE_BYTES = 256 << 10
"""Fits into the second-level cache together with the source."""
SHORTEST_BYTES = 4096
"""Below this size, Python is as fast as the call to C."""
SPAN_BYTES = 1024
"""XXH3 consumes this many bytes at a time."""
IO_BUFFER_BYTES = 4 << 20
STREAMED_BYTES = 1 << 20
"""From this size on a copy bypasses the processor's cache: the copy is read later, if at all."""


def checksum(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def copy(to: Bytes, source: Bytes, until: float = inf) -> int | None:
    """Copy bytes and return the checksum of what was written; None if `until` (of `time.monotonic`) passed before the
    end.

    Other processes may write to either side meanwhile: each byte is read once, and the checksum is of the bytes that
    were read.
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


class IOBuffers:
    """A thread's buffers for file I/O, and its queue of requests in flight.

    The buffers are small, so that they stay in the processor's cache. Through the page cache one request is in flight
    at a time, and is read directly to its destination and written directly from its source.
    """

    def __init__(self, *, direct: bool) -> None:
        slots = 8 if direct else 0
        self.piece_bytes = (512 if direct else 256) << 10
        memory = mmap.mmap(-1, IO_BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # without huge pages, which let the kernel split requests less
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(memory, np.uint8)
        self.bounce = self.memory[: slots * self.piece_bytes]
        self.queue = native.queue(direct) if native else None


def read(files: StripedFile, start: int, to: Bytes, head: int, io_buffers: IOBuffers) -> int | None:
    """Fill `to` from files; returns the checksum of what follows the first `head` bytes, None if the files end.
    Raises `OSError`."""
    is_bounced = bool(io_buffers.bounce.nbytes)  # whose bytes are copied to `to`, past the cache
    fits = not (head % SPAN_BYTES or _is_odd(files, start) or (is_bounced and (to.ctypes.data + head) % 32))
    if native and io_buffers.queue and fits and to.nbytes >= head + SHORTEST_BYTES:
        where = files.fds, files.stripe_bytes, files.sector, start
        return native.read(*where, to, head, io_buffers.bounce, io_buffers.piece_bytes, io_buffers.queue)
    digest = xxhash.xxh3_64()
    for at in range(0, to.nbytes, io_buffers.piece_bytes):
        piece = to[at : at + io_buffers.piece_bytes]
        sectors = io_buffers.memory[: files.in_sectors(piece.nbytes)]
        if files.read(start + at, sectors) < piece.nbytes:
            return None
        np.copyto(piece, sectors[: piece.nbytes])
        digest.update(piece[max(0, head - at) :].data)
    return digest.intdigest()


def write(files: StripedFile, start: int, source: Bytes, io_buffers: IOBuffers) -> int:
    """Write to files, in whole sectors; returns the checksum of what was written. Raises `OSError`."""
    if native and io_buffers.queue and source.nbytes >= SHORTEST_BYTES and not _is_odd(files, start):
        where = files.fds, files.stripe_bytes, files.sector, start
        return native.write(*where, source, io_buffers.bounce, io_buffers.piece_bytes, io_buffers.queue)
    digest = xxhash.xxh3_64()
    for at in range(0, source.nbytes, io_buffers.piece_bytes):
        piece = source[at : at + io_buffers.piece_bytes]
        sectors = io_buffers.memory[: files.in_sectors(piece.nbytes)]
        np.copyto(sectors[: piece.nbytes], piece)
        sectors[piece.nbytes :] = 0
        digest.update(sectors[: piece.nbytes].data)
        files.write(start + at, [sectors.data])
    return digest.intdigest()


def _is_odd(files: StripedFile, start: int) -> bool:
    """Whether the position is not aligned to sectors."""
    return bool(start % files.sector or files.stripe_bytes % files.sector)

"""Checksums computed while bytes are copied, so that memory is read once. In C where that was built.

A checksum is the XXH3 (64 bits) of the XXH3s of all parts of `PART_BYTES`; what is left over belongs to the last part.
So a GPU can sum the parts of a payload side by side. Without C, pieces are hashed while they are in the processor's
cache; the checksums are the same.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from math import inf

import numpy as np
import xxhash

from kvweave.copying import PART_BYTES, PartChecksums
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


def num_parts(num_bytes: int) -> int:
    return max(1, num_bytes // PART_BYTES)


def combined(part_sums: bytes) -> int:
    """The checksum of bytes whose parts have these, 8 bytes each, one after the other."""
    return xxhash.xxh3_64_intdigest(part_sums)


def of_parts(parts: PartChecksums) -> int:
    last = b"" if parts.last is None else xxhash.xxh3_64_intdigest(parts.last.data).to_bytes(8, "little")
    return combined(parts.checksums + last)


def checksum(data: Bytes) -> int:
    if native and data.nbytes >= SHORTEST_BYTES:
        return combined(native.sums(data))
    running = _Checksum(data.nbytes)
    running.update(data)
    return running.value()


class _Checksum:
    """The checksum of `num_bytes` bytes that come one after the other."""

    def __init__(self, num_bytes: int) -> None:
        self._last = num_parts(num_bytes) - 1
        self._digest, self._left = xxhash.xxh3_64(), PART_BYTES
        self._sums: list[bytes] = []

    def update(self, data: Bytes) -> None:
        while data.nbytes:
            some = data if len(self._sums) == self._last else data[: self._left]
            self._digest.update(some.data)
            data, self._left = data[some.nbytes :], self._left - some.nbytes
            if not self._left and len(self._sums) < self._last:
                self._close_part()

    def _close_part(self) -> None:
        self._sums.append(self._digest.intdigest().to_bytes(8, "little"))
        self._digest, self._left = xxhash.xxh3_64(), PART_BYTES

    def value(self) -> int:
        self._close_part()
        return combined(b"".join(self._sums))


def copy(to: Bytes, source: Bytes, until: float = inf) -> int | None:
    """Copy bytes and return the checksum of what was written; None if `until` (of `time.monotonic`) passed before the
    end.

    Other processes may write to either side meanwhile: each byte is read once, and the checksum is of the bytes that
    were read.
    """
    if native and to.nbytes >= SHORTEST_BYTES:
        sums = native.copy(to, source, to.nbytes >= STREAMED_BYTES, until)
        return None if sums is None else combined(sums)
    running = _Checksum(source.nbytes)
    for at in range(0, source.nbytes, PIECE_BYTES):
        if time.monotonic() >= until:
            return None
        piece = source[at : at + PIECE_BYTES].copy()
        np.copyto(to[at : at + PIECE_BYTES], piece)
        running.update(piece)
    return running.value()


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
        sums = native.read(*where, to, head, io_buffers.bounce, io_buffers.piece_bytes, io_buffers.queue)
        return None if sums is None else combined(sums)
    running = _Checksum(to.nbytes - head)
    for at in range(0, to.nbytes, io_buffers.piece_bytes):
        piece = to[at : at + io_buffers.piece_bytes]
        sectors = io_buffers.memory[: files.in_sectors(piece.nbytes)]
        if files.read(start + at, sectors) < piece.nbytes:
            return None
        np.copyto(piece, sectors[: piece.nbytes])
        running.update(piece[max(0, head - at) :])
    return running.value()


def write(files: StripedFile, start: int, source: Bytes, io_buffers: IOBuffers) -> int:
    """Write to files, in whole sectors; returns the checksum of what was written. Raises `OSError`."""
    if native and io_buffers.queue and source.nbytes >= SHORTEST_BYTES and not _is_odd(files, start):
        where = files.fds, files.stripe_bytes, files.sector, start
        return combined(native.write(*where, source, io_buffers.bounce, io_buffers.piece_bytes, io_buffers.queue))
    running = _Checksum(source.nbytes)
    for at in range(0, source.nbytes, io_buffers.piece_bytes):
        piece = source[at : at + io_buffers.piece_bytes]
        sectors = io_buffers.memory[: files.in_sectors(piece.nbytes)]
        np.copyto(sectors[: piece.nbytes], piece)
        sectors[piece.nbytes :] = 0
        running.update(sectors[: piece.nbytes])
        files.write(start + at, [sectors.data])
    return running.value()


def _is_odd(files: StripedFile, start: int) -> bool:
    """Whether the position is not aligned to sectors."""
    return bool(start % files.sector or files.stripe_bytes % files.sector)

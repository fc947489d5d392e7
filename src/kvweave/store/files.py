"""A file as a medium: through the page cache, or past it (O_DIRECT, by way of aligned buffers)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from kvweave.errors import Busy, ReadOnly, TierError, TierFull
from kvweave.store.keys import Bytes
from kvweave.store.tier import PIECE_BYTES, Blob, Watch

SECTOR = 4096
BOUNCE_BYTES = 8 << 20


def failure(where: str, error: OSError) -> TierError:
    """An operating-system error in our words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TierFull(f"{where}: the disk is full ({error.strerror}); what is stored is still served")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(f"{where}: cannot be written ({error.strerror}); what is stored is still served")
    return TierError(f"{where}: {error.strerror or error}")


class File:
    """Bytes of a file, in the page cache."""

    flags = 0

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._path = str(path)
        mode = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._fd = os.open(path, mode | os.O_CLOEXEC | self.flags, 0o600)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, start: int, blob: Blob) -> None:
        pieces = [memoryview(piece) for piece in blob]
        try:
            while pieces:
                written = os.pwritev(self._fd, pieces, start)
                start += written
                pieces = _rest(pieces, written)
        except OSError as error:
            raise failure(self._path, error) from error

    def read(self, start: int, into: Bytes, watch: Watch | None = None) -> bool:
        for at in range(0, into.nbytes, PIECE_BYTES):
            piece = into[at : at + PIECE_BYTES]
            if not self._read(start + at, piece.data):
                return False
            if watch:
                watch(piece)
        return True

    def _read(self, start: int, left: memoryview) -> bool:
        try:
            while left and (count := os.preadv(self._fd, [left], start)):
                left, start = left[count:], start + count
        except OSError as error:
            raise failure(self._path, error) from error
        return not left

    def close(self) -> None:
        os.close(self._fd)


def _rest(pieces: list[memoryview], written: int) -> list[memoryview]:
    """What is left of `pieces` when so many bytes of them were written."""
    while pieces and written >= len(pieces[0]):
        written -= len(pieces.pop(0))
    return [pieces[0][written:], *pieces[1:]] if pieces else []


class DirectFile(File):
    """The same past the page cache: memory stays free for others, and speed is the disk's."""

    flags = os.O_DIRECT

    def __init__(self, path: Path, *, writable: bool) -> None:
        super().__init__(path, writable=writable)
        self._local = threading.local()

    def _bounce(self) -> Bytes:
        """This thread's aligned buffer."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        buffer: Bytes = self._local.buffer
        return buffer

    def write(self, start: int, blob: Blob) -> None:
        buffer, filled = self._bounce(), 0
        for piece in blob:
            source = np.frombuffer(piece, np.uint8)
            if not (filled % SECTOR or source.ctypes.data % SECTOR):  # it can go as it lies
                straight = source[: source.nbytes // SECTOR * SECTOR]
                super().write(start, [buffer[:filled].data, straight.data])
                start, filled, source = start + filled + straight.nbytes, 0, source[straight.nbytes :]
            while source.nbytes:
                count = min(source.nbytes, BOUNCE_BYTES - filled)
                np.copyto(buffer[filled : filled + count], source[:count])
                source, filled = source[count:], filled + count
                if filled == BOUNCE_BYTES:
                    super().write(start, [buffer.data])
                    start, filled = start + BOUNCE_BYTES, 0
        if filled:
            super().write(start, [buffer[: -(-filled // SECTOR) * SECTOR].data])

    def read(self, start: int, into: Bytes, watch: Watch | None = None) -> bool:
        """Straight into memory that is aligned, as far as whole sectors go."""
        straight = 0 if into.ctypes.data % SECTOR else into.nbytes // SECTOR * SECTOR
        for at in range(0, straight, BOUNCE_BYTES):
            part = into[at : min(at + BOUNCE_BYTES, straight)]
            if not self._read(start + at, part.data):
                return False
            if watch:
                watch(part)
        for at in range(straight, into.nbytes, BOUNCE_BYTES):
            if not self._read_bounced(start + at, into[at : at + BOUNCE_BYTES], watch):
                return False
        return True

    def _read_bounced(self, start: int, into: Bytes, watch: Watch | None) -> bool:
        buffer = self._bounce()
        if not self._read(start, buffer[: -(-into.nbytes // SECTOR) * SECTOR].data):
            return False
        np.copyto(into, buffer[: into.nbytes])
        if watch:
            watch(into)
        return True


def aligned(num_bytes: int) -> Bytes:
    """Memory that starts at a sector, so that nothing is copied on the way from the disk."""
    memory = np.empty(num_bytes + SECTOR, np.uint8)
    start = -memory.ctypes.data % SECTOR
    return memory[start : start + num_bytes]


class Lock:
    """A directory's owner: held while the process lives, released by the kernel when it dies."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise Busy(f"{path.parent} belongs to process {owner}; let it serve both, or take another one") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)

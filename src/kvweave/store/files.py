"""Files as a medium: through the page cache, or past it (O_DIRECT, by way of aligned buffers)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import Busy, ReadOnly, TierError, TierFull
from kvweave.store import sums
from kvweave.store.keys import Bytes
from kvweave.store.stripes import Stripes
from kvweave.store.tier import Blob, Watch

SECTOR = 4096
BOUNCE_BYTES = 8 << 20
HEAD_BYTES = 128 << 10
"""Room for a header beside the first piece of a read."""


def failure(where: str, error: OSError) -> TierError:
    """An operating-system error in our words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TierFull(f"{where}: the disk is full ({error.strerror}); what is stored is still served")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(f"{where}: cannot be written ({error.strerror}); what is stored is still served")
    return TierError(f"{where}: {error.strerror or error}")


class File:
    """Bytes of some files as if of one (`Stripes`), in the page cache.

    They are read by way of a buffer that stays in the processor's cache, where they are summed.
    """

    flags, sector, bounce_bytes = 0, 1, (256 << 10) + HEAD_BYTES

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._path = str(path)
        self._stripes = Stripes(path, (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | self.flags)
        self._local = threading.local()

    def hold(self, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._stripes.hold(ends)

    def write(self, start: int, blob: Blob) -> None:
        try:
            self._write(start, blob)
        except OSError as error:
            raise failure(self._path, error) from error

    def _write(self, start: int, blob: Blob) -> None:
        self._stripes.write(start, blob)

    def read(self, start: int, into: Bytes, watch: Watch | None = None) -> bool:
        try:
            payload_sum = self._read(start, into, watch.head_bytes if watch else 0)
        except OSError as error:
            raise failure(self._path, error) from error
        if watch and payload_sum is not None:
            watch.saw(payload_sum)
        return payload_sum is not None

    def _read(self, start: int, into: Bytes, head: int) -> int | None:
        """The sum of what stands behind `head` bytes; None if the file ends."""
        return sums.read(self._stripes, start, into, head, self._bounce()[: self.bounce_bytes], self.sector)

    def _bounce(self) -> Bytes:
        """This thread's aligned buffer."""
        if not hasattr(self._local, "buffer"):
            memory = mmap.mmap(-1, BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages, of which the disk takes fewer pieces
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._local.buffer = np.frombuffer(memory, np.uint8)
        buffer: Bytes = self._local.buffer
        return buffer

    def close(self) -> None:
        self._stripes.close()


class DirectFile(File):
    """The same past the page cache: memory stays free for others, and speed is the disk's."""

    flags, sector, bounce_bytes = os.O_DIRECT, SECTOR, (2 << 20) + HEAD_BYTES

    def _write(self, start: int, blob: Blob) -> None:
        buffer, filled = self._bounce(), 0
        for piece in blob:
            source = np.frombuffer(piece, np.uint8)
            if not (filled % SECTOR or source.ctypes.data % SECTOR):  # it can go as it lies
                straight = source[: source.nbytes // SECTOR * SECTOR]
                self._stripes.write(start, [buffer[:filled].data, straight.data])
                start, filled, source = start + filled + straight.nbytes, 0, source[straight.nbytes :]
            while source.nbytes:
                count = min(source.nbytes, BOUNCE_BYTES - filled)
                np.copyto(buffer[filled : filled + count], source[:count])
                source, filled = source[count:], filled + count
                if filled == BOUNCE_BYTES:
                    self._stripes.write(start, [buffer.data])
                    start, filled = start + BOUNCE_BYTES, 0
        if filled:
            self._stripes.write(start, [buffer[: -(-filled // SECTOR) * SECTOR].data])


def aligned(num_bytes: int) -> Bytes:
    """Memory that starts at a sector, so that nothing is copied on the way to the disk."""
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

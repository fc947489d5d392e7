"""Files as a medium: through the page cache, or with O_DIRECT through aligned buffers."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import Busy, ReadOnly, TierError, TierFull, Unreadable
from kvweave.store import checksums
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.striped_file import SECTOR, StripedFile, open_regular
from kvweave.store.tier import Blob, ChecksumObserver, joined, whole

SMALL_BYTES = 512 << 10
"""Up to this size, one request for header and payload is worth copying them together."""

LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ)
"""Error codes for a sector that cannot be read, or whose contents are damaged."""


def failure(where: str, error: OSError) -> TierError:
    """The `TierError` for an operating-system error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TierFull(f"{where}: the disk is full ({error.strerror}); what is stored is still served")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(f"{where}: cannot be written ({error.strerror}); what is stored is still served")
    return TierError(f"{where}: {error.strerror or error}")


class BufferedFile:
    """A `StripedFile` through the page cache."""

    flags = 0

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._path = str(path)
        self._stripes = StripedFile(path, (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | self.flags)
        self._local = threading.local()

    def hold(self, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._stripes.hold(ends)

    @property
    def stripes(self) -> StripedFile:
        return self._stripes

    def write(self, start: int, blob: Blob) -> None:
        try:
            (self._write_sealed if blob.head_bytes else self._write_whole)(start, blob)
        except OSError as error:
            raise failure(self._path, error) from error

    def _write_whole(self, start: int, blob: Blob) -> None:
        self._stripes.write(start, [blob.payload.data])

    def _write_sealed(self, start: int, blob: Blob) -> None:
        """Write the payload, then the header, which needs the payload's checksum."""
        payload_sum = checksums.write(self._stripes, start + blob.head_bytes, blob.payload, self._io_buffers)
        checksums.write(self._stripes, start, np.frombuffer(blob.head(payload_sum), np.uint8), self._io_buffers)

    def read(self, start: int, into: Bytes, observer: ChecksumObserver | None = None) -> bool:
        try:
            payload_sum = checksums.read(
                self._stripes, start, into, observer.head_bytes if observer else 0, self._io_buffers
            )
        except OSError as error:
            if error.errno in LOST:
                raise Unreadable(f"{self._path}: {error.strerror}") from error
            raise failure(self._path, error) from error
        if observer and payload_sum is not None:
            observer.observe(payload_sum)
        return payload_sum is not None

    @property
    def _io_buffers(self) -> checksums.IOBuffers:
        """The I/O buffers of this thread."""
        if not hasattr(self._local, "io_buffers"):
            self._local.io_buffers = checksums.IOBuffers(direct=bool(self.flags))
        io_buffers: checksums.IOBuffers = self._local.io_buffers
        return io_buffers

    def close(self) -> None:
        self._local = threading.local()
        self._stripes.close()


class DirectFile(BufferedFile):
    """The same with O_DIRECT: the page cache is left to others, and the speed is the disk's."""

    flags = os.O_DIRECT

    def _write_whole(self, start: int, blob: Blob) -> None:
        checksums.write(self._stripes, start, blob.payload, self._io_buffers)

    def _write_sealed(self, start: int, blob: Blob) -> None:
        if blob.num_bytes > SMALL_BYTES:
            super()._write_sealed(start, blob)
        else:
            self._write_whole(start, whole(joined(blob)))


def aligned(num_bytes: int) -> Bytes:
    """Memory that starts at a multiple of the sector size, as O_DIRECT requires."""
    memory = np.empty(num_bytes + SECTOR, np.uint8)
    start = -memory.ctypes.data % SECTOR
    return memory[start : start + num_bytes]


class DirectoryLock:
    """The lock of a directory, held while the process lives; the kernel releases it when the process dies."""

    def __init__(self, path: Path) -> None:
        self._fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        if os.fstat(self._fd).st_nlink > 1:
            os.close(self._fd)
            raise OSError(errno.EMLINK, "The file has another name, too, under which it may be precious", str(path))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise Busy(f"{path.parent} belongs to process {owner}; let it serve both, or take another one") from None
        with suppress(OSError):  # on a full disk the owner's process id is not recorded
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        register_after_fork(self)

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed from its directory: another process may have locked a new one."""
        return self._fd >= 0 and not os.fstat(self._fd).st_nlink

    def release(self) -> None:
        """Release the lock; calling it twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def after_fork(self) -> None:
        """In a forked child: the lock belongs to the parent, and the child must not keep it after the parent ends."""
        self.release()

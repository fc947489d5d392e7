"""Several files used as one, in stripes. The kernel lets one writer at a time into a file, so writers of a single file
would queue.

    file 0   stripe 0   stripe 8   ...
    file 1   stripe 1   stripe 9
    ...
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.store.keys import Bytes

FILES = 32
STRIPE_BYTES = 4 << 20
SECTOR = 4096
PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file that is no link and no pipe, which could lead anywhere, or wait for ever. Raises `OSError`."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{Path(path).name} is not a regular file", str(path))
    return fd


class StripedFile:
    """Files `path-0`, `path-1` and so on, opened with `flags`; with O_DIRECT, in whole sectors. All methods raise
    `OSError`."""

    def __init__(self, path: Path, flags: int) -> None:
        self.stripe_bytes, self.fds, self._looked = STRIPE_BYTES, array("i"), 0
        self.sector = SECTOR if flags & os.O_DIRECT else 1
        try:
            for number in range(FILES):
                self.fds.append(open_regular(f"{path}-{number}", flags))
        except OSError:
            self.close()
            raise

    def place(self, start: int) -> tuple[int, int, int]:
        """The file of a byte, its position there, and how many bytes follow in that stripe."""
        stripe, within = divmod(start, self.stripe_bytes)
        turn, number = divmod(stripe, len(self.fds))
        return self.fds[number], turn * self.stripe_bytes + within, self.stripe_bytes - within

    def hold(self, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which runs of bytes that end here may exist: their last byte is within its file."""
        sizes = np.array([os.fstat(fd).st_size for fd in self.fds])
        stripes, within = np.divmod(ends - 1, self.stripe_bytes)
        turns, numbers = np.divmod(stripes, len(self.fds))
        there: NDArray[np.bool_] = turns * self.stripe_bytes + within < sizes[numbers]
        return there

    def end(self) -> int:
        """One past the last byte of all files."""
        ends = [0]
        for number, fd in enumerate(self.fds):
            if size := os.fstat(fd).st_size:
                turn, within = divmod(size - 1, self.stripe_bytes)
                ends.append((turn * len(self.fds) + number) * self.stripe_bytes + within + 1)
        return max(ends)

    def finds_removed(self) -> bool:
        """Whether a file was removed from its directory. Looks at one of them, the next one each time: to ask all of
        them before each write takes as long as to write."""
        self._looked = (self._looked + 1) % len(self.fds)
        return not os.fstat(self.fds[self._looked]).st_nlink

    def write(self, start: int, pieces: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(piece) for piece in pieces]
        while left:
            fd, at, room = self.place(start)
            written = os.pwritev(fd, _first(left, room), at)
            start, left = start + written, _rest(left, written)

    def discard(self, start: int, num_bytes: int) -> None:
        """Give the blocks of these bytes, which are zeros from now on, back to the file system."""
        while num_bytes > 0:
            fd, at, room = self.place(start)
            if _fallocate()(fd, PUNCH_HOLE, at, min(room, num_bytes)):
                raise OSError(code := ctypes.get_errno(), os.strerror(code))
            start, num_bytes = start + room, num_bytes - room

    def in_sectors(self, num_bytes: int) -> int:
        return -(-num_bytes // self.sector) * self.sector

    def read(self, start: int, to: Bytes) -> int:
        """The number of bytes read; fewer than asked for if the files end."""
        done, count = 0, self.sector
        while done < to.nbytes and count and not count % self.sector:
            fd, at, room = self.place(start + done)
            count = os.preadv(fd, [to.data[done : done + room]], at)
            done += count
        return done

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@cache
def _fallocate() -> Any:
    """The C library's: Python's own does not free blocks."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    return call


def _first(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Pieces up to `count` bytes."""
    first = []
    for piece in pieces:
        first.append(piece[:count])
        count -= len(first[-1])
        if not count:
            break
    return first


def _rest(pieces: list[memoryview], written: int) -> list[memoryview]:
    """What is left of `pieces` after `written` bytes."""
    while pieces and written >= len(pieces[0]):
        written -= len(pieces.pop(0))
    return [pieces[0][written:], *pieces[1:]] if pieces else []

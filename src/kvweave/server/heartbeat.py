"""A heartbeat in shared memory: the daemon's event loop increments a counter, which clients read without a message.

A slow daemon goes on counting; one that is stopped, or whose loop hangs, does not. Clients compare the counter with its
last value on their own clocks, so that the clocks need not agree.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import struct
import time
from contextlib import suppress

from kvweave.server.shared_arena import FUTURE_WRITE, SIZE_SEALS

PAGE_BYTES = 4096
BEAT_S = 0.2
FROZEN_S = 3.0
"""A daemon whose counter has not changed for this long is frozen. On a machine with five times more to do than cores a
daemon was seen without a processor for 1.4 s; calls with a budget do not wait for this."""
UNSEEN_S = 2 * BEAT_S
"""Of the time between two looks at the counter, no more counts: who does not look may have been paused as well, as are
all processes of a machine or a container, and is not the first to wake up."""
_COUNT = struct.Struct("<Q")


class Heartbeat:
    """The daemon's side: counts in an anonymous file, from the event loop."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvweave-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, PAGE_BYTES)
        self._page = mmap.mmap(self.fd, PAGE_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        with suppress(OSError):  # a kernel before 5.1: clients could write to the page, and are trusted not to
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FUTURE_WRITE)
        self._count = 0
        self._next: asyncio.TimerHandle | None = None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Increment now and every `BEAT_S`, until closed."""
        self._count += 1
        _COUNT.pack_into(self._page, 0, self._count)
        self._next = loop.call_later(BEAT_S, self.run, loop)

    def close(self) -> None:
        if self._next:
            self._next.cancel()
        self._page.close()
        os.close(self.fd)


class HeartbeatReader:
    """A client's side: for how long it has looked at the counter without a change."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._page = None if descriptor is None else mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)
        self._count, self._at, self._silent_s = -1, time.monotonic(), 0.0

    @property
    def silent_s(self) -> float:
        """Seconds without a change; 0 for a daemon over TCP, whose counter cannot be read."""
        if self._page is None:
            return 0.0
        (count,) = _COUNT.unpack_from(self._page)
        since, self._at = self._at, time.monotonic()
        self._silent_s += min(UNSEEN_S, self._at - since)
        if count != self._count:
            self._count, self._silent_s = count, 0.0
        return self._silent_s

    @property
    def is_frozen(self) -> bool:
        return self.silent_s > FROZEN_S

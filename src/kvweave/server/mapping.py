"""The daemon's arena mapped into a client: once for each daemon, however often the client reconnects."""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvweave.server import protocol
from kvweave.server.dma import DMARegistration, device_in_use
from kvweave.server.protocol import VERSION
from kvweave.store.keys import Bytes

POPULATE_READ, POPULATE_WRITE = 22, 23
"""madvise: create the page tables now, instead of at the first access to each page."""
NO_BYTES = np.empty(0, np.uint8)
WARM_BYTES = 8 << 20


class MappedArena(NamedTuple):
    """The state of a connection: its generation, the daemon's welcome, the arena, and the inbox, if there is one. Both
    may be registered for DMA."""

    generation: int
    welcome: protocol.Welcome
    arena: Bytes
    dma: DMARegistration
    inbox: Bytes
    inbox_dma: DMARegistration


def unmapped() -> MappedArena:
    """The state before the first connection."""
    welcome = protocol.Welcome(VERSION, b"", 0, 0.0, 0, 0, 0)
    nothing = NO_BYTES, DMARegistration(NO_BYTES)
    return MappedArena(0, welcome, *nothing, *nothing)


def map_arena(mapped: MappedArena, descriptor: int) -> MappedArena:
    """Map the arena that the daemon passed, read-only where there are inboxes. Page tables are created, and CUDA
    registration is done, in the background."""
    access = mmap.PROT_READ if mapped.welcome.inbox_bytes else mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(descriptor, mapped.welcome.arena_bytes, prot=access)
    arena = np.frombuffer(memory, np.uint8)
    dma = DMARegistration(arena)
    _start_to_warm(arena, POPULATE_WRITE if arena.flags.writeable else POPULATE_READ, dma)
    return mapped._replace(arena=arena, dma=dma)


def map_inbox(mapped: MappedArena, descriptor: int | None) -> MappedArena:
    """Map the inbox that the daemon passed, if it did: each connection has another one."""
    if descriptor is None:
        return mapped._replace(inbox=NO_BYTES, inbox_dma=DMARegistration(NO_BYTES))
    memory = mmap.mmap(descriptor, mapped.welcome.inbox_bytes)
    inbox = np.frombuffer(memory, np.uint8)
    dma = DMARegistration(inbox)
    _start_to_warm(inbox, POPULATE_WRITE, dma)
    return mapped._replace(inbox=inbox, inbox_dma=dma)


def _start_to_warm(memory: Bytes, advice: int, dma: DMARegistration) -> None:
    what = memory, advice, dma, device_in_use()
    threading.Thread(target=_warm, args=what, name="kvweave-warm", daemon=True).start()


def _warm(memory: Bytes, advice: int, dma: DMARegistration, device: int | None) -> None:
    populate(memory, advice)
    if device is not None:
        dma.register(device)


def populate(memory: Bytes, advice: int) -> None:
    """Create page tables, a second for some GiB, while other threads run: `mmap.madvise` would not let them."""
    for start in range(0, memory.nbytes, WARM_BYTES):
        if _madvise()(memory.ctypes.data + start, min(WARM_BYTES, memory.nbytes - start), advice):
            return  # an older kernel: pages are mapped at their first access


@cache
def _madvise() -> Any:
    call = ctypes.CDLL(None).madvise
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return call

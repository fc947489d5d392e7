"""The daemon's arena mapped into a client: once for each daemon, however often the client reconnects."""

from __future__ import annotations

import mmap
import threading
from typing import NamedTuple

import numpy as np

from kvweave.server import protocol
from kvweave.server.dma import DMARegistration, device_in_use
from kvweave.server.protocol import VERSION
from kvweave.store.keys import Bytes

POPULATE_WRITE = 23
"""madvise: create the page tables now, instead of at the first access to each page."""
WARM_BYTES = 8 << 20


class MappedArena(NamedTuple):
    """The state of a connection: its generation, the daemon's welcome, and the arena, which may be registered for
    DMA."""

    generation: int
    welcome: protocol.Welcome
    arena: Bytes
    dma: DMARegistration


def unmapped() -> MappedArena:
    """The state before the first connection."""
    nothing = np.empty(0, np.uint8)
    return MappedArena(0, protocol.Welcome(VERSION, b"", 0, 0.0, 0, 0, 0), nothing, DMARegistration(nothing))


def map_arena(mapped: MappedArena, descriptor: int) -> MappedArena:
    """Map the arena that the daemon passed. Page tables are created, and CUDA registration is done, in the
    background."""
    memory = mmap.mmap(descriptor, mapped.welcome.arena_bytes)
    arena = np.frombuffer(memory, np.uint8)
    dma = DMARegistration(arena)
    threading.Thread(target=_warm, args=(memory, dma, device_in_use()), name="kvweave-warm", daemon=True).start()
    return mapped._replace(arena=arena, dma=dma)


def _warm(memory: mmap.mmap, dma: DMARegistration, device: int | None) -> None:
    _populate(memory)
    if device is not None:
        dma.register(device)


def _populate(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), WARM_BYTES):
        try:
            memory.madvise(POPULATE_WRITE, start, min(WARM_BYTES, len(memory) - start))
        except OSError:  # an older kernel: pages are mapped at their first access
            return

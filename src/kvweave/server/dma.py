"""Registration of the arena with CUDA, so that copies to and from a GPU need no bounce buffer. It affects speed
only."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from typing import Any

from kvweave.store.keys import Bytes
from kvweave.units import format_bytes

log = logging.getLogger("kvweave.server")
PORTABLE, READ_ONLY = 1, 8
"""cudaHostRegisterPortable: for every GPU of the process, not only the current one. cudaHostRegisterReadOnly: memory
that is mapped read-only must be registered so."""


class DMARegistration:
    """Memory that may be registered, until `close` or until it is garbage-collected.

    torch is not imported for this: a process that has not loaded it has no GPU tensors. If CUDA refuses, the log says
    so, and the memory stays unregistered.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = weakref.ref(memory)
        self._undo: weakref.finalize[[int], Bytes] | None = None
        self._lock, self._closed = threading.Lock(), False

    def register(self, device: int) -> bool:
        """Register; returns whether it is registered. Blocks, about a second for four GiB; calling it twice is fine."""
        memory, cuda = self._memory(), _cuda()
        with self._lock:
            if self.is_registered or self._closed or memory is None or not memory.nbytes or cuda is None:
                return self.is_registered
            flags = PORTABLE if memory.flags.writeable else PORTABLE | READ_ONLY
            with cuda.device(device):
                code = int(cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, flags))
            if code:
                log.warning("CUDA cannot register memory (code %d): copies to GPUs take a way round", code)
                return False
            self._undo = weakref.finalize(memory, _unregister, memory.ctypes.data)
            self._undo.atexit = False  # CUDA is shut down before exit handlers run
        log.info("%s are registered for DMA", format_bytes(memory.nbytes))
        return True

    @property
    def is_registered(self) -> bool:
        return self._undo is not None and self._undo.alive

    @property
    def is_closed(self) -> bool:
        return self._closed

    def disown(self) -> None:
        """In a forked child, which cannot use CUDA: the registration belongs to the parent."""
        self._lock = threading.Lock()
        if self._undo is not None:
            self._undo.detach()
            self._undo = None

    def close(self) -> None:
        """Unregister; later calls of `register` do nothing."""
        with self._lock:
            self._closed = True
            if self._undo is not None:
                self._undo()


def device_in_use() -> int | None:
    """The GPU that this thread uses; None in a process that has not initialised CUDA through torch."""
    cuda = _cuda()
    return cuda.current_device() if cuda is not None and cuda.is_initialized() else None


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _unregister(address: int) -> None:
    cuda = _cuda()
    cuda.synchronize()
    cuda.cudart().cudaHostUnregister(address)

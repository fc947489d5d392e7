"""The arena registered with CUDA, so that copies between it and a GPU go straight. A matter of speed alone."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from typing import Any

from kvweave.store.keys import Bytes
from kvweave.units import format_bytes

log = logging.getLogger("kvweave.server")
PORTABLE = 1
"""cudaHostRegisterPortable: for every GPU of the process, not only for the one that is current."""


class DMARegistration:
    """Memory that may be registered, until `close`, or until nobody has it any more.

    torch is not imported for it: a process that has not loaded it has nothing to copy to. Where CUDA refuses, the log
    says so, and memory is what it was.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = weakref.ref(memory)
        self._undo: weakref.finalize[[int], Bytes] | None = None
        self._lock, self._closed = threading.Lock(), False

    def register(self, device: int) -> bool:
        """Whether it is registered now. Blocks, for about a second in four GiB; may be called twice."""
        memory, cuda = self._memory(), _cuda()
        with self._lock:
            if self.is_registered or self._closed or memory is None or cuda is None:
                return self.is_registered
            with cuda.device(device):
                code = int(cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, PORTABLE))
            if code:
                log.warning("CUDA cannot register the arena (code %d): copies to GPUs take a way round", code)
                return False
            self._undo = weakref.finalize(memory, _unregister, memory.ctypes.data)
            self._undo.atexit = False  # CUDA is gone by then
        log.info("%s of the arena are registered for DMA", format_bytes(memory.nbytes))
        return True

    @property
    def is_registered(self) -> bool:
        return self._undo is not None and self._undo.alive

    @property
    def is_closed(self) -> bool:
        return self._closed

    def disown(self) -> None:
        """In a forked child, which has no CUDA: what is registered is the parent's."""
        self._lock = threading.Lock()
        if self._undo is not None:
            self._undo.detach()
            self._undo = None

    def close(self) -> None:
        """Undo it; nothing is registered afterwards."""
        with self._lock:
            self._closed = True
            if self._undo is not None:
                self._undo()


def device_in_use() -> int | None:
    """The GPU that this thread works with; None in a process that does not use CUDA through torch (yet)."""
    cuda = _cuda()
    return cuda.current_device() if cuda is not None and cuda.is_initialized() else None


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _unregister(address: int) -> None:
    cuda = _cuda()
    cuda.synchronize()
    cuda.cudart().cudaHostUnregister(address)

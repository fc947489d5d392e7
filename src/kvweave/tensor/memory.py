"""The allocator for tensors: the only place that allocates and frees, and that knows what the machine supports."""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvweave.errors import NoDevice, OutOfMemory
from kvweave.host_memory import check_memory
from kvweave.plan import Place
from kvweave.units import format_bytes

log = logging.getLogger(__name__)

SHORTAGE = ("allocate", "out of memory", "overflow", "too large")
"""Substrings by which allocators report a shortage; any other error is raised as it is."""

HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Bytes at a fixed address until they are released; `given` is the place they were allocated in."""

    tensor: torch.Tensor
    asked: Place
    given: Place


class Memory:
    """Allocates and frees buffers on one device and its host, and counts the live ones.

    Pinned memory is ordinary memory registered with CUDA, and so has exactly the bytes asked for (torch's pinned
    allocator rounds up to a power of two). Without CUDA it stays unpinned, which is logged once.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = _checked(device)
        self.can_pin = torch.cuda.is_available()
        self._live: set[Buffer] = set()
        self._said = False

    @property
    def num_live(self) -> int:
        """Number of buffers that were taken and not released."""
        return len(self._live)

    @property
    def live_bytes(self) -> int:
        return sum(buffer.tensor.numel() for buffer in self._live)

    def take(self, num_bytes: int, place: Place, where: str) -> Buffer:
        """Allocate `num_bytes` zeros; `where` names the buffer in errors. Host memory that is not pinned is taken from
        the machine page by page, as it is touched."""
        given = self._given(place, where)
        self.check(num_bytes, place, where)
        device = self.device if place is Place.DEVICE else torch.device("cpu")
        try:
            tensor = _zeros(num_bytes, device, huge_pages=place is Place.DEVICE)
            if given is Place.PINNED:
                _register(tensor)
        except (RuntimeError, TypeError, OSError, OverflowError) as error:
            if not any(word in str(error).lower() for word in SHORTAGE):
                raise
            reason = f"{format_bytes(num_bytes)} of {self.device if place is Place.DEVICE else place} memory"
            raise OutOfMemory(where, wanted_bytes=num_bytes, reason=reason) from error
        buffer = Buffer(tensor, place, given)
        self._live.add(buffer)
        return buffer

    def check(self, num_bytes: int, place: Place, where: str) -> None:
        """Raise `OutOfMemory` for more than the host has available: otherwise the OOM killer would end the process
        later."""
        if place is not Place.DEVICE or self.device.type == "cpu":
            check_memory(where, num_bytes)

    def release(self, buffer: Buffer) -> None:
        """Free a buffer; calling it twice is fine. Tensors over it keep its bytes alive."""
        if buffer not in self._live:
            return
        self._live.discard(buffer)
        if buffer.given is Place.PINNED:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(buffer.tensor.data_ptr())

    def _given(self, place: Place, where: str) -> Place:
        if place is not Place.PINNED or self.can_pin:
            return place
        if not self._said:
            log.warning("%s: no CUDA here, so pinned memory is ordinary host memory", where)
            self._said = True
        return Place.HOST


def _checked(device: str | torch.device) -> torch.device:
    """The device, checked to exist."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise NoDevice(f"unknown device {device!r}; take 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise NoDevice(
            f"device {device!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices; take 'cpu'"
        )
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _zeros(num_bytes: int, device: torch.device, huge_pages: bool) -> torch.Tensor:
    """On a host the kernel's zero pages, of 2 MiB if asked for: rows of keys lie far apart, and a processor finds few
    pages without a walk. (torch.zeros would write all of it now.)"""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _register(tensor: torch.Tensor) -> None:
    code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(code):
        raise RuntimeError(f"out of memory that may be pinned (CUDA error {int(code)})")

"""What the CUDA driver is asked directly: contexts and events, with few microseconds of the host's time for each.

torch's own take several times as long, and a small transfer is over in half a millisecond.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from functools import cache
from typing import Any

import torch

from kvweave.errors import TransferFailed

NOT_READY = 600
NO_TIMING = 2
MEMORY_TYPE, HOST = 2, 1
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
CALLS: dict[str, list[Any]] = {
    "cuMemcpyAsync": [POINTER, POINTER, SIZE, POINTER],
    "cuMemcpy2DAsync_v2": [POINTER, POINTER],
    "cuMemcpyBatchAsync_v2": [POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER],
    "cuDevicePrimaryCtxRetain": [POINTER, ctypes.c_int],
    "cuCtxGetCurrent": [POINTER],
    "cuCtxSetCurrent": [POINTER],
    "cuCtxPushCurrent_v2": [POINTER],
    "cuCtxPopCurrent_v2": [POINTER],
    "cuEventCreate": [POINTER, ctypes.c_uint],
    "cuEventRecord": [POINTER, POINTER],
    "cuEventQuery": [POINTER],
    "cuEventSynchronize": [POINTER],
    "cuStreamQuery": [POINTER],
    "cuStreamWaitEvent": [POINTER, POINTER, ctypes.c_uint],
    "cuStreamIsCapturing": [POINTER, POINTER],
    "cuStreamBeginCapture_v2": [POINTER, ctypes.c_uint],
    "cuStreamEndCapture": [POINTER, POINTER],
    "cuGraphInstantiateWithFlags": [POINTER, POINTER, ctypes.c_ulonglong],
    "cuGraphLaunch": [POINTER, POINTER],
    "cuGraphDestroy": [POINTER],
    "cuGraphExecDestroy": [POINTER],
    "cuLaunchKernel": [POINTER, *[ctypes.c_uint] * 7, POINTER, POINTER, POINTER],
    "cuPointerGetAttribute": [POINTER, ctypes.c_uint, POINTER],
}

SPARE: defaultdict[int, list[Any]] = defaultdict(list)
"""Handles of events that nobody uses, by device."""


@cache
def cuda() -> ctypes.CDLL:
    """The driver, its calls declared as far as it has them."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in CALLS.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = arguments
    return library


def check(code: int) -> None:
    if code:
        raise TransferFailed(f"the CUDA driver refused: error {code}")


def is_pinned(address: int) -> bool:
    """Whether the device can reach this memory of the host."""
    kind = ctypes.c_uint(0)
    return cuda().cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, address) == 0 and kind.value == HOST


def is_idle(stream: int) -> bool:
    """Whether a stream has done all that it was given."""
    code = cuda().cuStreamQuery(stream)
    if code != NOT_READY:
        check(code)
    return bool(code == 0)


def is_recording(stream: int) -> bool:
    """Whether what is put on a stream becomes part of a graph."""
    state = ctypes.c_uint(0)
    check(cuda().cuStreamIsCapturing(stream, ctypes.byref(state)))
    return bool(state.value)


class Context:
    """A device made current for the calls within, whatever thread they are made by."""

    def __init__(self, device: int) -> None:
        self._device, self._handle = device, POINTER()
        check(cuda().cuDevicePrimaryCtxRetain(ctypes.byref(self._handle), device))
        self._threads = threading.local()

    def __enter__(self) -> None:
        if not getattr(self._threads, "has_context", False):
            current = POINTER()
            check(cuda().cuCtxGetCurrent(ctypes.byref(current)))
            if not current:
                check(cuda().cuCtxSetCurrent(self._handle))
            self._threads.has_context = True
        self._threads.pushed = torch.cuda.current_device() != self._device
        if self._threads.pushed:
            check(cuda().cuCtxPushCurrent_v2(self._handle))

    def __exit__(self, *_: object) -> None:
        if self._threads.pushed:
            cuda().cuCtxPopCurrent_v2(ctypes.byref(POINTER()))


class Event:
    """A point on a stream: where it was when the event was made. A `Mark`.

    Handles are kept for the next event of the same device: to make one takes longer than to record it.
    """

    __slots__ = ("_device", "_handle", "stream")

    def __init__(self, stream: int, device: int) -> None:
        self._device, self.stream = device, stream
        spare = SPARE[device]
        if spare:
            self._handle = spare.pop()
        else:
            self._handle = POINTER()
            check(cuda().cuEventCreate(ctypes.byref(self._handle), NO_TIMING))
        self.record(stream)

    def record(self, stream: int) -> None:
        """The point that `stream` has come to now, for those who ask from now on."""
        self.stream = stream
        check(cuda().cuEventRecord(self._handle, stream))

    def is_over(self) -> bool:
        code = cuda().cuEventQuery(self._handle)
        if code != NOT_READY:
            check(code)
        return bool(code == 0)

    def wait(self) -> None:
        """Block until it is over."""
        check(cuda().cuEventSynchronize(self._handle))

    def before(self, stream: int) -> None:
        """What is put on `stream` from now on comes after it; on its own stream it does anyway."""
        if stream != self.stream:
            check(cuda().cuStreamWaitEvent(stream, self._handle, 0))

    def hold(self, stream: Any) -> None:
        self.before((stream or torch.cuda.current_stream()).cuda_stream)

    def __del__(self) -> None:
        if self._handle:
            SPARE[self._device].append(self._handle)

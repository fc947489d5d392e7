"""Direct calls to the CUDA driver, for contexts and events: each takes at most a microsecond of the host's time.

torch's own calls take several times as long, which counts: a small transfer is done in half a millisecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvweave.copying import Bytes, Numbers
from kvweave.errors import NotBuilt, TransferFailed
from kvweave.transfer.command_buffer import CommandBuffer

try:
    import kvweave.transfer._native as native
except ImportError as error:
    raise NotBuilt("a copy to a GPU", error) from error

NOT_READY = 600
LIBRARY = "libcuda.so.1"

SPARE: defaultdict[int, list[int]] = defaultdict(list)
"""Handles of events that are not in use, by context."""


def check(code: int) -> None:
    if code:
        raise TransferFailed(f"the CUDA driver refused: error {code}")


@cache
def has_batches() -> bool:
    """Whether the driver can copy many runs of bytes in one call (CUDA 13 and later). Loads the driver library."""
    return native.load(LIBRARY)


@cache
def context_of(device: int) -> int:
    """The primary context of a device, which torch uses too."""
    has_batches()
    code, context = native.context(device)
    check(code)
    return context


def is_pinned(address: int) -> bool:
    """Whether devices can access this host memory directly."""
    return native.is_pinned(address)


def addresses(arrays: Sequence[Bytes]) -> Numbers:
    """Of the memory of contiguous arrays; `ctypes.data` takes ten times as long."""
    return np.frombuffer(native.addresses(arrays), np.int64)


def is_idle(context: int, stream: int) -> bool:
    """Whether a stream has finished all its work."""
    code = native.query_stream(context, stream)
    if code and code != NOT_READY:
        check(code)
    return not code


class Event:
    """A CUDA event, used as a `Completion`: done when the stream has reached it, and before it was recorded.

    Handles are reused for later events: creating an event takes longer than recording it.
    """

    __slots__ = ("_context", "handle")

    def __init__(self, context: int) -> None:
        self._context, self.handle = context, 0
        try:
            self.handle = SPARE[context].pop()
        except IndexError:
            code, self.handle = native.event(context)
            check(code)

    def record(self, stream: int) -> None:
        """Record the event at the current end of `stream`."""
        check(native.record(self._context, self.handle, stream))

    def is_done(self) -> bool:
        code = native.query(self._context, self.handle)
        if code and code != NOT_READY:
            check(code)
        return not code

    def spin(self, seconds: float) -> None:
        native.watch(self._context, self.handle, seconds)  # an error is raised by `is_done`, which the caller asks next

    def wait(self) -> None:
        """Block until the event is done."""
        check(native.finish(self._context, self.handle))

    def block_stream(self, stream: Any) -> None:
        stream = stream or torch.cuda.current_stream()
        check(native.hold(self._context, self.handle, stream.cuda_stream))

    def __del__(self) -> None:
        if self.handle:
            SPARE[self._context].append(self.handle)


def submit(commands: CommandBuffer, context: int, caller: int = 0, completion: Event | None = None) -> None:
    """Make the calls of a command buffer. If one fails, this raises, and the calls before it stay made."""
    check(native.play(commands.rows, context, caller, completion.handle if completion else 0))


class ImmediateCommands(CommandBuffer):
    """A command buffer whose commands are submitted by `flush`."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self._context = context

    def flush(self) -> None:
        submit(self, self._context)
        del self.rows[:]

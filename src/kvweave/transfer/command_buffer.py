"""Command buffers: calls to the CUDA driver, recorded as rows of integers and submitted without Python between them.

A row is a command, its stream, and the arguments of the call. Recording a row takes less than a microsecond; submitting
it takes what the driver takes.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Protocol

import numpy as np

from kvweave.transfer.copy_plan import Numbers

NUMBERS = 16
"""Integers in a row."""


class Command(IntEnum):
    """Numbered as in `native.c`."""

    LAUNCH = 0
    COPY = 1
    COPY_ROWS = 2
    COPY_MANY = 3
    RECORD = 4
    WAIT = 5
    AFTER_CALLER = 6
    SIGNAL = 7


class Handle(Protocol):
    """A CUDA event, by its handle."""

    handle: int


class CommandBuffer:
    """Driver calls in order. Nothing happens until they are submitted (`driver.submit`), which may be done
    repeatedly."""

    def __init__(self) -> None:
        self.rows = array("q")
        self._kept: list[object] = []

    def keep(self, memory: object) -> None:
        """Keep an object alive as long as the command buffer, which holds an address inside of it."""
        self._kept.append(memory)

    def launch(
        self, function: int, grid: tuple[int, int], threads: int, shared: int, arguments: tuple[int, ...], stream: int
    ) -> None:
        """Launch a kernel. Triton's kernels take two more addresses than they declare, for scratch memory that ours
        do not use: zeros."""
        self._add(Command.LAUNCH, stream, function, *grid, threads, shared, *arguments)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy one run of bytes. Submitting blocks if the host memory is not pinned."""
        self._add(Command.COPY, stream, target, source, num_bytes)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy `height` rows of `width` bytes that are a pitch apart on either side."""
        self._add(Command.COPY_ROWS, stream, target, target_pitch, source, source_pitch, width, height)

    def copy_many(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Copy runs of bytes, in any order, without pauses between them."""
        if len(sizes) == 1:
            self.copy(int(targets[0]), int(sources[0]), int(sizes[0]), stream)
            return
        arrays = [np.ascontiguousarray(numbers) for numbers in (targets, sources, sizes)]
        self.keep(arrays)
        self._add(Command.COPY_MANY, stream, *(numbers.ctypes.data for numbers in arrays), len(targets))

    def record(self, event: Handle, stream: int) -> None:
        """Record the event: it is done when `stream` has reached this point."""
        self._add(Command.RECORD, stream, event.handle)

    def wait(self, event: Handle, stream: int) -> None:
        """Make later work of `stream` wait for the event, as it was last recorded."""
        self._add(Command.WAIT, stream, event.handle)

    def chain_streams(self, event: Handle, done: int, following: int) -> None:
        """Make later work of the stream `following` wait for all work of the stream `done`. The event can be reused
        at once."""
        self.record(event, done)
        self.wait(event, following)

    def after_caller(self, event: Handle, first: int, second: int) -> None:
        """Make later work of two streams wait for the caller's stream, as it is when this is submitted."""
        self._add(Command.AFTER_CALLER, first, event.handle, second)

    def flush(self) -> None:
        """Submit what was recorded so far, if commands are submitted at once (`driver.ImmediateCommands`); here, do
        nothing."""

    def signal(self, stream: int) -> None:
        """Record, on `stream`, the event that is passed to `driver.submit`."""
        self._add(Command.SIGNAL, stream)

    def _add(self, *row: int) -> None:
        self.rows.extend(row)
        self.rows.extend(BLANK[len(row)])


BLANK = [array("q", [0] * (NUMBERS - count)) for count in range(NUMBERS + 1)]
"""By the length of a row, the zeros that fill it up."""

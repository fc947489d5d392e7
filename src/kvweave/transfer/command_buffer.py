"""Tapes: calls to the CUDA driver, recorded as rows of numbers and played without the interpreter between them.

A row is a kind, the stream it is for, and what the call takes. To record one takes less than a microsecond, to play one
what the driver takes.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Protocol

import numpy as np

from kvweave.transfer.copy_plan import Numbers

NUMBERS = 16
"""Of a row."""


class Command(IntEnum):
    """As `native.c` has them."""

    LAUNCH = 0
    COPY = 1
    COPY_ROWS = 2
    COPY_MANY = 3
    RECORD = 4
    WAIT = 5
    AFTER_CALLER = 6
    SIGNAL = 7


class Handle(Protocol):
    """An event, as the driver knows it."""

    handle: int


class CommandBuffer:
    """Calls in their order. Nothing happens before it is played (`driver.submit`), which may be often."""

    def __init__(self) -> None:
        self.rows = array("q")
        self._kept: list[object] = []

    def keep(self, memory: object) -> None:
        """Have it live as long as the tape, which knows its address."""
        self._kept.append(memory)

    def launch(
        self, function: int, grid: tuple[int, int], threads: int, shared: int, arguments: tuple[int, ...], stream: int
    ) -> None:
        """A kernel. Triton's take two more addresses than they say, for memory that ours do not use: blanks."""
        self._add(Command.LAUNCH, stream, function, *grid, threads, shared, *arguments)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """One run of bytes. Blocks in playing where the host's memory is not pinned."""
        self._add(Command.COPY, stream, target, source, num_bytes)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """`height` rows of `width` bytes, so many bytes apart."""
        self._add(Command.COPY_ROWS, stream, target, target_pitch, source, source_pitch, width, height)

    def copy_many(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Runs of bytes, in any order, without a pause between them."""
        if len(sizes) == 1:
            self.copy(int(targets[0]), int(sources[0]), int(sizes[0]), stream)
            return
        arrays = [np.ascontiguousarray(numbers) for numbers in (targets, sources, sizes)]
        self.keep(arrays)
        self._add(Command.COPY_MANY, stream, *(numbers.ctypes.data for numbers in arrays), len(targets))

    def record(self, event: Handle, stream: int) -> None:
        """The event is over when `stream` has come here."""
        self._add(Command.RECORD, stream, event.handle)

    def wait(self, event: Handle, stream: int) -> None:
        """What comes next on `stream` comes after the event, as it is then."""
        self._add(Command.WAIT, stream, event.handle)

    def chain_streams(self, event: Handle, done: int, following: int) -> None:
        """What comes next on one stream comes after what is on the other; the event may be used again at once."""
        self.record(event, done)
        self.wait(event, following)

    def after_caller(self, event: Handle, first: int, second: int) -> None:
        """What comes next on two streams comes after what the caller's stream has to do when this is played."""
        self._add(Command.AFTER_CALLER, first, event.handle, second)

    def flush(self) -> None:
        """What was recorded so far could go now, if this were not for later (`driver.ImmediateCommands`)."""

    def signal(self, stream: int) -> None:
        """Here the event is recorded that the player gives."""
        self._add(Command.SIGNAL, stream)

    def _add(self, *row: int) -> None:
        self.rows.extend(row)
        self.rows.extend(BLANK[len(row)])


BLANK = [array("q", [0] * (NUMBERS - count)) for count in range(NUMBERS + 1)]
"""What fills up a row of so many numbers."""

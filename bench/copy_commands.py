"""On a GPU: does it matter by how many commands bytes go between a device and pinned memory?

128 pieces of 4 MiB, which are dense on the device and 4 KiB apart on the host, as payloads behind their headers: by one
copy each, by batches of eight (one by one with drivers before CUDA 13), by copies of eight rows, and of 128. The
ceiling is one copy of as many bytes without gaps. Lines: GB/s, and how long the host takes to submit.

Run: PYTHONPATH=src:. python3 -m bench.copy_commands [rounds]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.driver import Event, context_of, submit

PIECE, GAP, PIECES, TOGETHER = 4 << 20, 4 << 10, 128, 8


class Copies:
    """Records copies between two memories, in one direction."""

    def __init__(self, *, to_host: bool) -> None:
        self._host = torch.empty(PIECES * (PIECE + GAP), dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(PIECES * PIECE, dtype=torch.uint8, device="cuda")
        self._order = 1 if to_host else -1
        self.stream = int(torch.cuda.Stream().cuda_stream)

    def _ends(self, first: int) -> list[int]:
        """The addresses of a piece: where it goes, and where it is."""
        there, here = self._host.data_ptr() + first * (PIECE + GAP), self._device.data_ptr() + first * PIECE
        return [there, here][:: self._order]

    def flat(self, commands: CommandBuffer) -> None:
        target, source = self._ends(0)
        commands.copy(target, source, PIECES * PIECE, self.stream)

    def singles(self, commands: CommandBuffer) -> None:
        for number in range(PIECES):
            target, source = self._ends(number)
            commands.copy(target, source, PIECE, self.stream)

    def batches(self, commands: CommandBuffer) -> None:
        for first in range(0, PIECES, TOGETHER):
            ends = np.array([self._ends(number) for number in range(first, first + TOGETHER)], np.int64)
            commands.copy_many(ends[:, 0], ends[:, 1], np.full(TOGETHER, PIECE), self.stream)

    def rows(self, commands: CommandBuffer, count: int = TOGETHER) -> None:
        to_pitch, source_pitch = [PIECE + GAP, PIECE][:: self._order]
        for first in range(0, PIECES, count):
            target, source = self._ends(first)
            commands.copy_rows(target, to_pitch, source, source_pitch, PIECE, count, self.stream)

    def all_rows(self, commands: CommandBuffer) -> None:
        self.rows(commands, PIECES)


def timed(record: Callable[[CommandBuffer], None], stream: int) -> tuple[float, float]:
    """Seconds until all is copied, and until it is submitted."""
    context, commands = context_of(0), CommandBuffer()
    record(commands)
    commands.signal(stream)
    done = Event(context)
    torch.cuda.synchronize()
    began = time.perf_counter()
    submit(commands, context, 0, done)
    submitted = time.perf_counter()
    done.wait()
    return time.perf_counter() - began, submitted - began


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    for to_host in (True, False):
        copies = Copies(to_host=to_host)
        for record in (copies.flat, copies.singles, copies.batches, copies.rows, copies.all_rows):
            taken, submitting = zip(*(timed(record, copies.stream) for _ in range(rounds)), strict=True)
            print(
                json.dumps({
                    "claim": f"{PIECES} pieces, {record.__name__}, to the {'host' if to_host else 'device'}",
                    "ours": round(PIECES * PIECE / statistics.median(taken) / 1e9, 2), "unit": "GB/s",
                    "submitted_us": round(1e6 * statistics.median(submitting)),
                }),
                flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()

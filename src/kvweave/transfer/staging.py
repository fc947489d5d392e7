"""Staging memory on the device: a few slots in turn, each with room for a piece and for the kernel's table."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvweave.transfer.driver import Event
from kvweave.transfer.kernel import Tabulator
from kvweave.transfer.program import Call
from kvweave.transfer.tables import TILE

SHEET_NUMBERS = 1 << 12
TABLE_NUMBERS = 1 << 15


class Slot:
    """A piece's memory: bytes and the kernel's table on the device, and on the host the sheet that it is made of. Free
    when its last event is over."""

    def __init__(self, device: torch.device, memory: torch.Tensor | None = None) -> None:
        self._device = device
        self.memory = _numbers(0, torch.uint8, device) if memory is None else memory
        self.address = self.memory.data_ptr()
        self._table, self._sheet = _numbers(0, torch.int64, device), _numbers(0, torch.int64)
        self.busy: Event | None = None

    def wait(self) -> None:
        """Block until nothing uses it any more."""
        if self.busy is not None:
            self.busy.wait()

    def reserve(self, num_bytes: int) -> None:
        """Have at least so many bytes; blocks only where it has less."""
        if self.memory.numel() < num_bytes:
            self.wait()
            self.memory = _numbers(num_bytes, torch.uint8, self._device)
            self.address = self.memory.data_ptr()

    def tabulate(self, call: Call, tabulator: Tabulator, stream: int) -> int:
        """Have the device make the table of a call; its address there. Blocks while the sheet before is in use.

        A kernel reads the sheet where it is: copy engines would bring it after all that they were given before.
        """
        self.wait()
        size, numbers = call.sheet.size, TILE * call.draft.num_tiles
        if self._sheet.numel() < size:
            self._sheet = _numbers(max(SHEET_NUMBERS, 2 * size), torch.int64)
        if self._table.numel() < numbers:
            self._table = _numbers(max(TABLE_NUMBERS, 2 * numbers), torch.int64, self._device)
        self._sheet.numpy()[:size] = call.sheet
        address: int = self._table.data_ptr()
        tabulator.tabulate(address, self._sheet.data_ptr(), call, stream)
        return address

    def release(self, stream: int) -> Event:
        """It is free when `stream` comes to this point: the event that says so."""
        self.busy = Event(stream, self._device.index)
        return self.busy


def _numbers(count: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Memory on a device, or pinned on the host; not initialised."""
    return torch.empty(count, dtype=dtype, device=device, pin_memory=device is None and count > 0)


class Staging:
    """Slots in turn. Whoever takes one gives it back with `release`."""

    def __init__(self, slots: Iterable[Slot], slot_bytes: int) -> None:
        self.slots, self._slot_bytes = list(slots), slot_bytes
        self._next = 0

    def take(self, num_bytes: int, stream: int) -> Slot:
        """A slot of at least `num_bytes`, free for what comes next on `stream`. Does not block."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        if slot.busy is not None:
            slot.busy.before(stream)
        if num_bytes:
            slot.reserve(max(num_bytes, self._slot_bytes))
        return slot

    def take_all(self, stream: int) -> None:
        """All slots are free for what comes next on `stream`."""
        for busy in {slot.busy for slot in self.slots if slot.busy is not None}:
            busy.before(stream)

    def release_all(self, stream: int) -> Event:
        event = Event(stream, self.slots[0].memory.device.index)
        for slot in self.slots:
            slot.busy = event
        return event

    def twin(self, num_bytes: int) -> Staging:
        """The same memory, of at least `num_bytes` a slot, with its own books: for graphs, which keep it alive."""
        for slot in self.slots:
            slot.reserve(max(num_bytes, self._slot_bytes))
        return Staging([Slot(slot.memory.device, slot.memory) for slot in self.slots], self._slot_bytes)

    def close(self) -> None:
        """Give the memory back, when nothing uses it any more."""
        for slot in self.slots:
            slot.wait()
        self.slots = [Slot(slot.memory.device) for slot in self.slots]

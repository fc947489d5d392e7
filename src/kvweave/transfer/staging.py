"""Staging memory on the device: a few slots in turn, each with room for a piece and for the kernel's table."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvweave.transfer.copies import Numbers
from kvweave.transfer.driver import Event
from kvweave.transfer.kernel import fetch

TABLE_NUMBERS = 1 << 15


class Slot:
    """A piece's memory: bytes on the device, and a table there and on the host. Free when its last event is over."""

    def __init__(self, device: torch.device, memory: torch.Tensor | None = None) -> None:
        self._device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device) if memory is None else memory
        self._table = torch.empty(0, dtype=torch.int64, device=device)
        self._host = torch.empty(0, dtype=torch.int64)
        self.busy: Event | None = None

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())

    def wait(self) -> None:
        """Block until nothing uses it any more."""
        if self.busy is not None:
            self.busy.wait()

    def reserve(self, num_bytes: int) -> None:
        """Have at least so many bytes; blocks only where it has less."""
        if self.memory.numel() < num_bytes:
            self.wait()
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def upload(self, tiles: Numbers, stream: int, device: int) -> int:
        """Bring a table to the device; its address there. By a kernel: copy engines would bring it after all that they
        have been given before, and the pages wait for it. Blocks while the table before is in use."""
        self.wait()
        count = tiles.size
        if self._host.numel() < count:
            room = max(TABLE_NUMBERS, 2 * count)
            self._host = torch.empty(room, dtype=torch.int64, pin_memory=True)
            self._table = torch.empty(room, dtype=torch.int64, device=self._device)
        self._host.numpy()[:count] = tiles.ravel()
        address = int(self._table.data_ptr())
        fetch(address, int(self._host.data_ptr()), count, stream, device)
        return address

    def release(self, stream: int) -> Event:
        """It is free when `stream` comes to this point: the event that says so."""
        self.busy = Event(stream, self._device.index)
        return self.busy


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

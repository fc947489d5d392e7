"""Staging memory on the device: a few slots in turn, each with room for a piece and for the kernel's table."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.transfer.driver import Event
from kvweave.transfer.kernel import fetch

TABLE_BYTES = 1 << 18


class Slot:
    """A piece's memory: bytes on the device, and a table there and on the host. Free when its last event is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._table = torch.empty(0, dtype=torch.int32, device=device)
        self._host = torch.empty(0, dtype=torch.int32)
        self._busy: Event | None = None

    @property
    def address(self) -> int:
        return int(self._bytes.data_ptr())

    @property
    def num_bytes(self) -> int:
        return int(self._bytes.numel())

    def wait(self) -> None:
        """Block until nothing uses it any more."""
        if self._busy is not None:
            self._busy.wait()

    def reserve(self, num_bytes: int) -> None:
        if self.num_bytes < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def upload(self, words: NDArray[np.int32], stream: int, device: int) -> int:
        """Bring a table to the device; its address there. By a kernel: copy engines would bring it after all that they
        have been given before, and the pages wait for it."""
        if self._host.numel() < len(words):
            room = max(TABLE_BYTES // 4, 2 * len(words))
            self._host = torch.empty(room, dtype=torch.int32, pin_memory=True)
            self._table = torch.empty(room, dtype=torch.int32, device=self._device)
        self._host.numpy()[: len(words)] = words
        address = int(self._table.data_ptr())
        fetch(address, int(self._host.data_ptr()), len(words), stream, device)
        return address

    def release(self, stream: int) -> Event:
        """It is free when `stream` comes to this point: the event that says so."""
        self._busy = Event(stream)
        return self._busy


class Staging:
    """Slots in turn. Whoever takes one gives it back with `release`; taking blocks until the next one is free."""

    def __init__(self, device: torch.device, slot_bytes: int, slots: int) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._slots = [Slot(device) for _ in range(slots)]
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Device bytes of all slots, tables apart."""
        return sum(slot.num_bytes for slot in self._slots)

    def take(self, num_bytes: int) -> Slot:
        """A free slot of at least `num_bytes`."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait()
        if num_bytes:
            slot.reserve(max(num_bytes, self._slot_bytes))
        return slot

    def close(self) -> None:
        """Give the memory back, when nothing uses it any more."""
        for slot in self._slots:
            slot.wait()
        self._slots = [Slot(self._device) for _ in self._slots]

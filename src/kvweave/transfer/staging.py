"""Staging memory on the device: a few slots used in turn, each with room for a piece and the kernel's table."""

from __future__ import annotations

import torch

from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.driver import Event, context_of
from kvweave.transfer.kernel import Tabulator
from kvweave.transfer.prepared_copy import TabulatedCopy
from kvweave.transfer.tiles import TILE

ADDRESS_TABLE_NUMBERS = 1 << 12
TABLE_NUMBERS = 1 << 15


class Slot:
    """Memory for a piece: its bytes and the kernel's table on the device, and the address table on the host. The
    event `free` is recorded by each user after its last command; the slot may be reused when the event is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory = _numbers(0, torch.uint8, device)
        self._table, self._address_table = _numbers(0, torch.int64, device), _numbers(0, torch.int64)
        self.free = Event(context_of(device.index))

    @property
    def address(self) -> int:
        address: int = self.memory.data_ptr()
        return address

    def reserve(self, num_bytes: int) -> None:
        """Have at least `num_bytes`; blocks only if it must be enlarged."""
        if self.memory.numel() < num_bytes:
            self.free.wait()
            self.memory = _numbers(num_bytes, torch.uint8, self._device)

    def tabulate(self, bound: TabulatedCopy, tabulator: Tabulator, commands: CommandBuffer, stream: int) -> int:
        """Record the commands that write the table of a copy; returns its address on the device. Blocks while the
        address table is still in use.

        A kernel reads the address table from pinned memory: a copy by a copy engine would queue behind all earlier
        copies.
        """
        self.free.wait()
        size, numbers = bound.address_table.size, TILE * bound.num_tiles
        if self._address_table.numel() < size:
            self._address_table = _numbers(max(ADDRESS_TABLE_NUMBERS, 2 * size), torch.int64)
        if self._table.numel() < numbers:
            self._table = _numbers(max(TABLE_NUMBERS, 2 * numbers), torch.int64, self._device)
        self._address_table.numpy()[:size] = bound.address_table
        address: int = self._table.data_ptr()
        tabulator.tabulate(commands, address, self._address_table.data_ptr(), bound, stream)
        return address


def _numbers(count: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Memory on a device, or pinned memory of the host; not initialised."""
    return torch.empty(count, dtype=dtype, device=device, pin_memory=device is None and count > 0)


class Staging:
    """Slots in turn. The user of a slot records its event `free` after its last command."""

    def __init__(self, device: torch.device, num_slots: int, slot_bytes: int) -> None:
        self._slots, self._slot_bytes = [Slot(device) for _ in range(num_slots)], slot_bytes
        self._device, self._next = device, 0

    def take(self, num_bytes: int, commands: CommandBuffer, stream: int) -> Slot:
        """A slot of at least `num_bytes`, which later work on `stream` may use."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if num_bytes:
            slot.reserve(max(num_bytes, self._slot_bytes))
        commands.wait(slot.free, stream)
        commands.keep((slot, slot.memory))
        return slot

    def close(self) -> None:
        """Free the memory; waits until nothing uses it."""
        for slot in self._slots:
            slot.free.wait()
        self._slots = [Slot(self._device) for _ in self._slots]

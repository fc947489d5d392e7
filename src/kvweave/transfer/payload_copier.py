"""Payloads of a store straight out of an engine's pages on a GPU, and back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvweave.copying import BlockCopy, Bytes, Landing
from kvweave.errors import BadCopy
from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.driver import Event, context_of, submit
from kvweave.transfer.kernel import Tabulator, current_stream, launch
from kvweave.transfer.payload_tables import PayloadTable
from kvweave.transfer.staging import Slot


class _Channel(NamedTuple):
    """A stream, and staging memory for one payload on its way."""

    stream: torch.cuda.Stream
    slot: Slot

    @property
    def number(self) -> int:
        """The stream, as the driver knows it."""
        return int(self.stream.cuda_stream)


class CUDAPayloadCopier:
    """Between pools on one GPU and payloads on the host, fast where these are pinned. A `StagedCopier`.

    A payload is gathered in staging memory in the order in which it is stored, and leaves by one copy; it comes by one,
    and is scattered. What was begun and what several threads do overlaps, and has staging memory each.
    """

    together_bytes = 16 << 20
    """To say what a call has to do takes the host as long as to copy some megabytes."""

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        devices = {pool.device for pool in pools.values()}
        if [device.type for device in devices] != ["cuda"]:
            names = ", ".join(sorted(map(str, devices))) or "(none)"
            raise BadCopy(f"pools must be on one GPU, not on {names}; describe the memory of each device apart")
        (self._device,), self._pools = devices, pools
        self._addresses = {name: int(pool.data_ptr()) for name, pool in pools.items()}
        self._sizes = {name: int(pool.nbytes) for name, pool in pools.items()}
        self._context, self._tabulator = context_of(self._device.index), Tabulator(self._device.index)
        self._idle: deque[_Channel] = deque()
        self._after: Event | None = None

    def after_caller(self) -> CUDAPayloadCopier:
        following = copy.copy(self)  # with the same channels
        following._after = Event(self._context)
        following._after.record(current_stream(self._device.index))
        return following

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        self.begin_gather(copies, payload)()

    def begin_gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> Callable[[], None]:
        table = self._table(copies, payload.nbytes)
        if not table.template.batches:
            return lambda: None
        commands, channel = CommandBuffer(), self._channel(payload.nbytes)
        self._launch(commands, channel, table, gather=True)
        commands.copy(payload.ctypes.data, channel.slot.address, payload.nbytes, channel.number)
        done = self._submit(commands, channel)

        def finish() -> None:
            done.wait()
            self._idle.append(channel)  # a channel on which something broke is not used again

        return finish

    def scatter(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        self.begin_landing(copies, [payload])(lambda: True)

    def begin_landing(self, copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
        num_bytes = sum(payload.nbytes for payload in payloads)
        table = self._table(copies, num_bytes)
        if not table.template.batches:
            return lambda is_intact: is_intact()
        copying, writing, channel = CommandBuffer(), CommandBuffer(), self._channel(num_bytes)
        target = channel.slot.address
        for payload in payloads:
            copying.copy(target, payload.ctypes.data, payload.nbytes, channel.number)
            target += payload.nbytes
        arrived = self._submit(copying, channel)
        self._launch(writing, channel, table, gather=False)

        def land(is_intact: Callable[[], bool]) -> bool:
            arrived.wait()
            fine = is_intact()
            if fine:
                self._submit(writing, channel).wait()
            self._idle.append(channel)
            return fine

        return land

    def _launch(self, commands: CommandBuffer, channel: _Channel, table: PayloadTable, *, gather: bool) -> None:
        if self._after is not None:
            commands.wait(self._after, channel.number)
        tiles = channel.slot.tabulate(table, self._tabulator, commands, channel.number)
        launch(
            commands, tiles, table.template.num_tiles, table.vector_bytes, channel.slot.address, channel.number,
            self._device.index, gather=gather,
        )  # fmt: skip

    def _submit(self, commands: CommandBuffer, channel: _Channel) -> Event:
        """Submit; the event is done when all commands are."""
        done = Event(self._context)
        commands.signal(channel.number)
        submit(commands, self._context, 0, done)
        return done

    def _table(self, copies: Iterable[BlockCopy], payload_bytes: int) -> PayloadTable:
        return PayloadTable(copies, self._addresses, self._sizes, payload_bytes)

    def _channel(self, num_bytes: int) -> _Channel:
        try:
            channel = self._idle.pop()
        except IndexError:  # all are in use
            channel = _Channel(torch.cuda.Stream(self._device), Slot(self._device))
        channel.slot.reserve(num_bytes)
        return channel


def payload_copier(pools: Mapping[str, Any]) -> CUDAPayloadCopier | None:
    """The copier for an engine's pools; None for memory of the host, for which the store has its own."""
    return CUDAPayloadCopier(pools) if any(isinstance(pool, torch.Tensor) for pool in pools.values()) else None

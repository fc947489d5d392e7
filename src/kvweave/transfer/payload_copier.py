"""Payloads of a store straight out of an engine's pages on a GPU, and back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvweave.copying import BlockCopy, Bytes, Gathering, Landing, PartChecksums
from kvweave.errors import BadCopy
from kvweave.transfer.checksum_kernel import ChecksumLayout
from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.driver import Event, addresses, context_of, submit
from kvweave.transfer.kernel import Tabulator, current_stream, launch
from kvweave.transfer.payload_tables import PayloadTable, PooledFields
from kvweave.transfer.staging import Slot

MOST_PITCH = (1 << 31) - 1
"""Bytes that the rows of one copy may be apart."""


class _Stream:
    """A stream; `number`: as the driver knows it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.number = int(self._stream.cuda_stream)


class _Channel(_Stream):
    """A stream for kernels, and staging memory for the payloads of one call on their way; what was found there is on
    the host. `handed` is recorded where the staging memory passes from a kernel to a copy, or back."""

    def __init__(self, device: torch.device, context: int) -> None:
        super().__init__(device)
        self.slot, self.handed = Slot(device), Event(context)
        self.found = np.empty(0, np.uint8)

    def reserve(self, num_bytes: int, found_bytes: int) -> None:
        self.slot.free.wait()  # a gather that was dropped may still write there
        self.slot.reserve(num_bytes + 7)  # the last bytes are read as a word
        if self.found.nbytes < found_bytes:
            self.found = torch.empty(2 * found_bytes, dtype=torch.uint8, pin_memory=True).numpy()


class _StagedPayloads:
    """`num_payloads` in the staging memory of a channel."""

    def __init__(self, copier: CUDAPayloadCopier, channel: _Channel, layout: ChecksumLayout, num_payloads: int) -> None:
        self._copier, self._channel, self._layout, self._num_payloads = copier, channel, layout, num_payloads

    def begin_copy(self, payloads: Sequence[Bytes]) -> Gathering:
        if (len(payloads), _length(payloads)) != (self._num_payloads, self._layout.payload_bytes):
            raise BadCopy(f"{len(payloads)} payloads of {_length(payloads)} bytes are not what was staged")
        return self._copier.begin_copy(self._channel, payloads, self._layout)

    def drop(self) -> None:
        self._copier.give_back(self._channel)


class CUDAPayloadCopier:
    """Between pools on one GPU and payloads on the host, fast where these are pinned. A `StagedCopier`.

    Payloads are gathered in staging memory in the order in which they are stored, and leave by one copy each; they come
    by one, and are scattered. Their parts are summed there. What was begun and what several threads do overlaps, and
    has staging memory each. All copies of one direction are on one stream, so that they follow each other in the order
    in which they were begun: the first to be begun is the first to be waited for.
    """

    together_bytes = 36 << 20
    """Fewer take the host longer to say than the device to copy; more delay the first and the last copy."""

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        devices = {pool.device for pool in pools.values()}
        if [device.type for device in devices] != ["cuda"]:
            names = ", ".join(sorted(map(str, devices))) or "(none)"
            raise BadCopy(f"pools must be on one GPU, not on {names}; describe the memory of each device apart")
        (self._device,), self._pools = devices, pools
        addresses = {name: int(pool.data_ptr()) for name, pool in pools.items()}
        self._pooled = PooledFields(addresses, {name: int(pool.nbytes) for name, pool in pools.items()})
        self._context, self._tabulator = context_of(self._device.index), Tabulator(self._device.index)
        self._stores, self._loads = _Stream(self._device), _Stream(self._device)
        self._idle: deque[_Channel] = deque()
        self._after: Event | None = None

    def after_caller(self) -> CUDAPayloadCopier:
        following = copy.copy(self)  # with the same channels
        following._after = Event(self._context)
        following._after.record(current_stream(self._device.index))
        return following

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        self.wait_for_caller()  # others' copies would wait for the caller's stream behind this one
        self.stage(copies, 1, payload.nbytes).begin_copy([payload])()

    def stage(self, copies: Iterable[BlockCopy], num_payloads: int, payload_bytes: int) -> _StagedPayloads:
        layout = _layout(num_payloads, payload_bytes)
        table = self._table(copies, num_payloads, layout)
        commands, channel = CommandBuffer(), self._channel(num_payloads, layout)
        self._launch(commands, channel, table, gather=True)
        submit(commands, self._context)
        return _StagedPayloads(self, channel, layout, num_payloads)

    def begin_copy(self, channel: _Channel, payloads: Sequence[Bytes], layout: ChecksumLayout) -> Gathering:
        """Start to copy payloads from staging memory to the host."""
        commands = CommandBuffer()
        commands.chain_streams(channel.handed, channel.number, self._stores.number)
        _copy(commands, channel, payloads, self._stores, to_host=True)
        self._compute_checksums(commands, channel, len(payloads), layout)  # during the copy
        commands.chain_streams(channel.handed, self._stores.number, channel.number)
        done = self._submit(commands, channel)

        def finish() -> Sequence[PartChecksums]:
            done.wait()
            found = layout.found(channel.found, len(payloads))
            self._idle.append(channel)
            return found

        return finish

    def give_back(self, channel: _Channel) -> None:
        """A channel whose last kernels may still run: its next user waits for them, so it is the last to be used."""
        channel.slot.free.record(channel.number)
        self._idle.appendleft(channel)

    def scatter(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        self.begin_landing(copies, [payload])(lambda _: True)

    def begin_landing(self, copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
        layout = _layout(len(payloads), _length(payloads))
        copying, writing, channel = CommandBuffer(), CommandBuffer(), self._channel(len(payloads), layout)
        _copy(copying, channel, payloads, self._loads, to_host=False)
        copying.chain_streams(channel.handed, self._loads.number, channel.number)
        self._compute_checksums(copying, channel, len(payloads), layout)
        arrived = self._submit(copying, channel)
        try:  # during the copy: to say where everything goes takes the host a tenth of a millisecond
            self._launch(writing, channel, self._table(copies, len(payloads), layout), gather=False)
        except BaseException:
            arrived.wait()
            self._idle.append(channel)
            raise

        def land(is_intact: Callable[[Sequence[PartChecksums]], bool]) -> bool:
            arrived.wait()
            fine = is_intact(layout.found(channel.found, len(payloads)))
            if fine:
                self._submit(writing, channel).wait()
            self._idle.append(channel)
            return fine

        return land

    def wait_for_caller(self) -> None:
        if self._after is not None:
            self._after.wait()

    def is_caller_done(self) -> bool:
        return self._after is None or self._after.is_done()

    def _table(self, copies: Iterable[BlockCopy], num_payloads: int, layout: ChecksumLayout) -> PayloadTable:
        return PayloadTable(copies, self._pooled, layout.payload_bytes * num_payloads)

    def _launch(self, commands: CommandBuffer, channel: _Channel, table: PayloadTable, *, gather: bool) -> None:
        if self._after is not None:
            commands.wait(self._after, channel.number)
        if not table.num_tiles:
            return
        tiles = channel.slot.tabulate(table, self._tabulator, commands, channel.number)
        launch(
            commands, tiles, table.num_tiles, table.vector_bytes, channel.slot.address, channel.number,
            self._device.index, gather=gather,
        )  # fmt: skip

    def _compute_checksums(
        self, commands: CommandBuffer, channel: _Channel, num_payloads: int, layout: ChecksumLayout
    ) -> None:
        """The kernel writes to memory of the host: a copy engine would queue its copy behind all earlier ones."""
        out, device = channel.found.ctypes.data, self._device.index
        layout.launch(commands, num_payloads, channel.slot.address, out, channel.number, device)

    def _submit(self, commands: CommandBuffer, stream: _Stream) -> Event:
        """Submit commands that end on this stream; the event is done when all are."""
        done = Event(self._context)
        commands.signal(stream.number)
        submit(commands, self._context, 0, done)
        return done

    def _channel(self, num_payloads: int, layout: ChecksumLayout) -> _Channel:
        try:
            channel = self._idle.pop()
        except IndexError:  # all are in use
            channel = _Channel(self._device, self._context)
        channel.reserve(num_payloads * layout.payload_bytes, 8 * layout.words * num_payloads)
        return channel


def _layout(num_payloads: int, payload_bytes: int) -> ChecksumLayout:
    if num_payloads > 1 and payload_bytes % 8:
        raise BadCopy(f"payloads of {payload_bytes} bytes: several must be of a multiple of 8")
    return ChecksumLayout(payload_bytes)


def _length(payloads: Sequence[Bytes]) -> int:
    """Of each."""
    sizes = {payload.nbytes for payload in payloads}
    if len(sizes) != 1:
        raise BadCopy(f"payloads of {sorted(sizes)} bytes: those of one call are of one length")
    return sizes.pop()


def _copy(
    commands: CommandBuffer, channel: _Channel, payloads: Sequence[Bytes], stream: _Stream, *, to_host: bool
) -> None:
    """Between staging memory, where payloads lie one after the other, and the host. Where they are equally far apart
    there, as those of a save mostly are, they are the rows of one copy: between two copies the engine pauses."""
    size, count = payloads[0].nbytes, len(payloads)
    host = addresses(payloads)
    steps = {*np.diff(host).tolist()}
    if not size:
        return
    staged, number = channel.slot.address, stream.number
    if len(steps) == 1 and size <= (pitch := steps.pop()) <= MOST_PITCH:
        (to, to_pitch), (source, source_pitch) = [(int(host[0]), pitch), (staged, size)][:: 1 if to_host else -1]
        commands.copy_rows(to, to_pitch, source, source_pitch, size, count, number)
        return
    targets, sources = [host, staged + size * np.arange(count)][:: 1 if to_host else -1]
    commands.copy_many(targets, sources, np.full(count, size), number)


def payload_copier(pools: Mapping[str, Any]) -> CUDAPayloadCopier | None:
    """The copier for an engine's pools; None for memory of the host, for which the store has its own."""
    return CUDAPayloadCopier(pools) if any(isinstance(pool, torch.Tensor) for pool in pools.values()) else None

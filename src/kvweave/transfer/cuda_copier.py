"""The CUDA copier: pages are gathered into staging memory and copied to the host as one, while the next ones are
gathered.

store   gather   |1|2 |3   |4   |                  load   copy     |1   |2   |3 |4|
        copy       |1|2 |3   |4   |                       scatter       |1   |2   |3 |4|
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvweave.plan import Place
from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.copier import CopyJob, CopyStep, Direction
from kvweave.transfer.copy_templates import CopyTuning, TemplateCache
from kvweave.transfer.cpu_copier import CPUCopier
from kvweave.transfer.driver import Event, ImmediateCommands, context_of, has_batches, is_idle, is_pinned, submit
from kvweave.transfer.kernel import Tabulator, current_stream, launch
from kvweave.transfer.prepared_copy import BoundCopy, PreparedCopy
from kvweave.transfer.staging import Slot, Staging
from kvweave.transfer.tiles import TILE


class CUDACopier:
    """Copies between pools on a GPU and chunks on the host (pinned, to be fast) or on that GPU.

    Staging memory is `tuning.slots` slots of a piece for each direction (larger only if one layer of one page is),
    allocated at the first use. Groups whose pools are on the host are copied by the CPU.
    """

    def __init__(self, device: Any = "cuda", tuning: CopyTuning | None = None) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.tuning = tuning or CopyTuning()
        if not has_batches():
            self.tuning = replace(self.tuning, direct_bytes=max(self.tuning.direct_bytes, self.tuning.single_bytes))
        self._context = context_of(self.device.index)
        self._tabulator = Tabulator(self.device.index)
        self._stores, self._loads = (
            _CopyStreams(self.device, self._tabulator, direction, self.tuning) for direction in Direction
        )
        self._templates = TemplateCache(self.tuning)
        self._cpu = CPUCopier()

    def prepare(self, job: CopyJob) -> CopyJob:
        hosted, here = _by_place(job)
        if hosted is not None or here is None:
            return job
        prepared = _resident(
            [BoundCopy(template, here) for template in self._templates.of(here)], self._tabulator, self.device
        )
        whole = job.layers is None and 0 < job.num_bytes <= self.tuning.recorded_bytes
        if whole and all(buffer.array is None or is_pinned(buffer.extent.start) for buffer in job.buffers):
            return replace(job, prepared=self._streams_for(job.direction).recorded(prepared), is_single=True)
        return replace(job, prepared=prepared)

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        prepared, streams = job.prepared, self._streams_for(job.direction)
        if job.is_single:
            return streams.started(prepared)
        stream, after = current_stream(self.device.index), None
        if not is_idle(self._context, stream):
            after = Event(self._context)
            after.record(stream)
        return self._steps(streams, job, after) if prepared is None else streams.steps(prepared.bound_copies, after)

    def close(self) -> None:
        self._stores.close()
        self._loads.close()
        self._tabulator.close()
        self._cpu.close()

    def _streams_for(self, direction: Direction) -> _CopyStreams:
        return self._stores if direction is Direction.STORE else self._loads

    def _steps(self, streams: _CopyStreams, job: CopyJob, after: Event | None) -> Iterator[CopyStep]:
        hosted, here = _by_place(job)
        if hosted is not None:
            for step in self._cpu.steps(hosted):
                yield step if here is None else step._replace(layers=0)
        if here is not None:
            bound_copies = (BoundCopy(template, here) for template in self._templates.of(here))
            yield from streams.steps(bound_copies, after)


def _by_place(job: CopyJob) -> tuple[CopyJob | None, CopyJob | None]:
    """The job of the groups whose pools are on the host, and the job of the others."""
    plan = job.arena.plan
    tags = [move.tag for move in job.copies.moves]
    hosted = [tag for tag in tags if plan.pool(plan.group(tag).pool).place is not Place.DEVICE]
    if not hosted:
        return None, job
    rest = [tag for tag in tags if tag not in hosted]
    return job.with_tags(hosted), job.with_tags(rest) if rest else None


def _resident(bound_copies: Sequence[BoundCopy], tabulator: Tabulator, device: torch.device) -> PreparedCopy:
    """The copies with their tables on the device; blocks until these are written."""
    address_tables = torch.from_numpy(
        np.concatenate([*(bound.address_table for bound in bound_copies), np.empty(0, np.int64)])
    ).pin_memory()
    tables = torch.empty(
        TILE * sum(bound.template.num_tiles for bound in bound_copies), dtype=torch.int64, device=device
    )
    stream, address_table, table = torch.cuda.current_stream(device), address_tables.data_ptr(), tables.data_ptr()
    commands, placed = CommandBuffer(), []
    for bound in bound_copies:
        tabulator.tabulate(commands, table, address_table, bound, stream.cuda_stream)
        placed.append(replace(bound, table_at=table))
        address_table, table = address_table + bound.address_table.nbytes, table + 8 * TILE * bound.template.num_tiles
    submit(commands, context_of(stream.device_index))
    stream.synchronize()
    return PreparedCopy(tuple(placed), tables)


class _CopyStreams:
    """One direction: a stream for copies, a stream for kernels, and the staging memory between them."""

    def __init__(self, device: torch.device, tabulator: Tabulator, direction: Direction, tuning: CopyTuning) -> None:
        self.tabulator, self.direction, self._number = tabulator, direction, device.index
        self.staging = Staging(device, tuning.slots, tuning.piece_bytes)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._copies, self._kernels = (int(stream.cuda_stream) for stream in self._streams)
        self._context = context_of(device.index)
        self._handed, self._asked, self._completion = (Event(self._context) for _ in range(3))
        self._under_way: deque[tuple[Event, object]] = deque()
        """What was submitted, with the objects that must live until it is done."""
        self._lock = threading.Lock()

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._under_way.clear()
        self.staging.close()

    def steps(self, bound_copies: Iterable[BoundCopy], after: Event | None) -> Iterator[CopyStep]:
        """Issue one copy after the other, each when the caller asks for the next step."""
        for bound in bound_copies:
            commands = ImmediateCommands(self._context)
            with self._lock:
                if after is not None:
                    commands.wait(after, self._copies)
                    commands.wait(after, self._kernels)
                    commands.keep(after)
                    after = None
                commands.signal(self._put(commands, bound))
                completion = self._submit(commands, (commands, bound))
            yield CopyStep(bound.template.num_bytes, bound.template.layers, completion)

    def started(self, prepared: PreparedCopy) -> Iterator[CopyStep]:
        """Submit a prepared copy, to run after the work of the caller's stream. It was submitted when this returns."""
        assert prepared.commands is not None
        with self._lock:
            completion = self._submit(prepared.commands, prepared, current_stream(self._number))
        return iter((CopyStep(prepared.num_bytes, prepared.bound_copies[-1].template.layers, completion),))

    def recorded(self, prepared: PreparedCopy) -> PreparedCopy:
        """The prepared copy with all commands recorded in one command buffer."""
        commands, ends = CommandBuffer(), dict[int, None]()
        with self._lock:
            commands.after_caller(self._asked, self._copies, self._kernels)
            for bound in prepared.bound_copies:
                end = self._put(commands, bound)
                ends.pop(end, None)
                ends[end] = None
        *others, last = ends
        for end in others:
            commands.chain_streams(self._handed, end, last)
        commands.signal(last)
        return replace(prepared, commands=commands)

    def _submit(self, commands: CommandBuffer, owner: object, caller: int = 0) -> Event:
        submit(commands, self._context, caller, self._completion)
        completion, self._completion = self._completion, Event(self._context)
        self._under_way.append((completion, owner))
        while self._under_way and self._under_way[0][0].is_done():
            self._under_way.popleft()
        return completion

    def _put(self, commands: CommandBuffer, bound: BoundCopy) -> int:
        """Record the commands of one piece; returns the stream on which it ends."""
        for direct in bound.direct:
            commands.copy_many(*direct, self._copies)
        if not bound.template.batches:
            return self._copies
        num_bytes = bound.template.staged_bytes
        if not num_bytes:
            slot = self.staging.take(0, commands, self._kernels)
            self._launch(commands, bound, slot, 0)
            commands.record(slot.free, self._kernels)
            return self._kernels
        if self.direction is Direction.STORE:
            slot = self.staging.take(num_bytes, commands, self._kernels)
            self._launch(commands, bound, slot, slot.address)
            commands.chain_streams(self._handed, self._kernels, self._copies)
            self._copy(commands, bound, slot)
            commands.record(slot.free, self._copies)
            return self._copies
        slot = self.staging.take(num_bytes, commands, self._copies)
        self._copy(commands, bound, slot)
        commands.flush()
        commands.chain_streams(self._handed, self._copies, self._kernels)
        self._launch(commands, bound, slot, slot.address)
        commands.record(slot.free, self._kernels)
        return self._kernels

    def _copy(self, commands: CommandBuffer, bound: BoundCopy, slot: Slot) -> None:
        template, starts, staging, stream = bound.template, bound.job.starts, slot.address, self._copies
        offsets, places, sizes, chunks = template.flat
        if len(sizes):
            here, there = staging + offsets, starts[chunks] + places
            commands.copy_many(*((there, here) if self.direction is Direction.STORE else (here, there)), sizes, stream)
        for copy in template.strided:
            here, there = staging + copy.offset, int(starts[copy.chunk]) + copy.place
            if self.direction is Direction.STORE:
                commands.copy_rows(there, copy.pitch, here, copy.width, copy.width, copy.height, stream)
            else:
                commands.copy_rows(here, copy.width, there, copy.pitch, copy.width, copy.height, stream)

    def _launch(self, commands: CommandBuffer, bound: BoundCopy, slot: Slot, flat: int) -> None:
        table, stream = bound.table_at, self._kernels
        if table is None:
            table = slot.tabulate(bound, self.tabulator, commands, stream)
        gather = self.direction is Direction.STORE
        launch(commands, table, bound.template.num_tiles, bound.vector_bytes, flat, stream, self._number, gather=gather)

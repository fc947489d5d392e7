"""The CUDA copier: pages are gathered into staging memory and leave by one copy; the next are gathered meanwhile.

store   gather   |1|2 |3   |4   |                  load   copy     |1   |2   |3 |4|
        copy       |1|2 |3   |4   |                       scatter       |1   |2   |3 |4|
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvweave.plan import Place
from kvweave.transfer.copier import Job, Step, Way
from kvweave.transfer.cpu import CPUCopier
from kvweave.transfer.driver import Context, Event, is_pinned
from kvweave.transfer.graph import Graph
from kvweave.transfer.kernel import current_stream, launch
from kvweave.transfer.program import Call, Program, Tuning, compiled
from kvweave.transfer.staging import Slot, Staging


class CUDACopier:
    """Copies between pools on a GPU and chunks on the host (pinned, to be fast) or on that GPU.

    Staging memory is so many slots of a piece for each way (more only where one layer of one page is larger), taken at
    the first use. Groups whose pools are on the host are copied by the CPU.
    """

    def __init__(self, device: Any = "cuda", tuning: Tuning | None = None) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.tuning = tuning or Tuning()
        self._context = Context(self.device.index)
        self._lanes = {way: _Lane(self.device, self._context, way, self.tuning) for way in Way}
        self._cpu = CPUCopier()

    def prepare(self, job: Job) -> Job:
        hosted, here = _by_place(job)
        if hosted is not None or here is None:
            return job
        program = _resident(compiled(here, self.tuning), self.device)
        whole = job.layers is None and 0 < job.copies.num_bytes <= self.tuning.graph_bytes
        if whole and all(buffer.array is None or is_pinned(buffer.extent.start) for buffer in job.buffers):
            program = self._lanes[job.way].recorded(program)
        return replace(job, program=program)

    def steps(self, job: Job) -> Iterator[Step]:
        with self._context:
            after = Event(current_stream(self.device.index), self.device.index)
        return self._steps(job, after)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._cpu.close()

    def _steps(self, job: Job, after: Event) -> Iterator[Step]:
        if job.program is not None:
            yield from self._lanes[job.way].started(job.program, after)
            return
        hosted, here = _by_place(job)
        if hosted is not None:
            for step in self._cpu.steps(hosted):
                yield step if here is None else step._replace(layers=0)
        if here is not None:
            tuning = replace(self.tuning, small_bytes=self.tuning.unprepared_bytes)
            yield from self._lanes[job.way].steps(compiled(here, tuning), after)


def _by_place(job: Job) -> tuple[Job | None, Job | None]:
    """The share of a job whose pools are on the host, and the rest."""
    plan = job.arena.plan
    tags = [move.tag for move in job.copies.moves]
    hosted = [tag for tag in tags if plan.pool(plan.group(tag).pool).place is not Place.DEVICE]
    if not hosted:
        return None, job
    rest = [tag for tag in tags if tag not in hosted]
    return job.with_tags(hosted), job.with_tags(rest) if rest else None


def _resident(calls: Iterable[Call], device: torch.device) -> Program:
    """Bring the tables of all calls to the device."""
    made = [replace(call, table=call.tabulated()) if call.lines else call for call in calls]
    tables = [call.table.tiles.ravel() for call in made if call.table is not None]
    memory = torch.from_numpy(np.concatenate([*tables, np.empty(0, np.int64)])).to(device)
    starts = np.cumsum([0, *(table.nbytes for table in tables)]) + memory.data_ptr()
    places = iter(starts.tolist())
    placed = [replace(call, table_at=next(places)) if call.table is not None else call for call in made]
    return Program(tuple(placed), memory)


class _Lane:
    """One way: a stream for copies, one for the kernel, and the staging memory between them."""

    def __init__(self, device: torch.device, context: Context, way: Way, tuning: Tuning) -> None:
        self.device, self.context, self.way = device, context, way
        self.staging = Staging([Slot(device) for _ in range(tuning.slots)], tuning.piece_bytes)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._copies, self._kernels = (stream.cuda_stream for stream in self._streams)
        self._lock = threading.Lock()
        with context:
            self._handed = Event(self._kernels, device.index)

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self.staging.close()

    def steps(self, calls: Iterable[Call], after: Event) -> Iterator[Step]:
        with self.context:
            after.before(self._copies)
            after.before(self._kernels)
        for call in calls:
            with self._lock, self.context:
                event = self._issue(call, self.staging)
            yield Step(call.num_bytes, call.layers, event)

    def started(self, program: Program, after: Event) -> Iterator[Step]:
        """The steps of what was prepared: as it is, or all at once."""
        if program.graph is None:
            yield from self.steps(program.calls, after)
            return
        with self._lock, self.context:
            after.before(self._copies)
            self.staging.take_all(self._copies)
            program.graph.launch(self._copies)
            event = self.staging.release_all(self._copies)
        yield Step(sum(call.num_bytes for call in program.calls), program.calls[-1].layers, event)

    def recorded(self, program: Program) -> Program:
        """The same with a graph that does it all."""
        with self._lock, self.context:
            staging = self.staging.twin(program.staged_bytes)

            def issue() -> None:
                self._hand(self._copies, self._kernels)
                for call in program.calls:
                    self._issue(call, staging)
                self._hand(self._kernels, self._copies)

            return replace(program, graph=Graph(self._copies, issue, (staging, program.tables)))

    def _issue(self, call: Call, staging: Staging) -> Event:
        """Issue a piece; the event that it is over with."""
        for issue in call.direct:
            issue(self._copies)
        if not call.lines:
            return Event(self._copies, self.device.index)
        if not call.staged:
            slot = staging.take(0, self._kernels)
            self._launch(call, slot, 0)
            return slot.release(self._kernels)
        if self.way is Way.STORE:
            return self._issue_store(call, staging.take(call.staged_bytes, self._kernels))
        return self._issue_load(call, staging.take(call.staged_bytes, self._copies))

    def _issue_store(self, call: Call, slot: Slot) -> Event:
        self._launch(call, slot, slot.address)
        self._hand(self._kernels, self._copies)
        for copy in call.staged:
            copy.issue(slot.address, self.way, self._copies)
        return slot.release(self._copies)

    def _issue_load(self, call: Call, slot: Slot) -> Event:
        for copy in call.staged:
            copy.issue(slot.address, self.way, self._copies)
        self._hand(self._copies, self._kernels)
        self._launch(call, slot, slot.address)
        return slot.release(self._kernels)

    def _hand(self, done: int, next_stream: int) -> None:
        self._handed.record(done)
        self._handed.before(next_stream)

    def _launch(self, call: Call, slot: Slot, flat: int) -> None:
        table, address, stream = call.tabulated(), call.table_at, self._kernels
        if address is None:
            address = slot.upload(table.tiles, stream, self.device.index)
        launch(table, address, flat, stream, self.device.index, gather=self.way is Way.STORE)

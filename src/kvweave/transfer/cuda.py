"""The CUDA copier: pages are gathered into staging memory and leave by one copy; the next are gathered meanwhile.

store   gather   |1|2 |3   |4   |                  load   copy     |1   |2   |3 |4|
        copy       |1|2 |3   |4   |                       scatter       |1   |2   |3 |4|
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvweave.plan import Place
from kvweave.transfer.copier import Job, Step, Way
from kvweave.transfer.cpu import CPUCopier
from kvweave.transfer.drafts import Drafts, Tuning
from kvweave.transfer.driver import Context, Event, is_idle, is_pinned
from kvweave.transfer.graph import Graph
from kvweave.transfer.kernel import Tabulator, current_stream, launch
from kvweave.transfer.program import Call, Program, filled
from kvweave.transfer.staging import Slot, Staging
from kvweave.transfer.tables import TILE


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
        self._tabulator = Tabulator(self.device.index)
        self._lanes = {way: _Lane(self.device, self._context, self._tabulator, way, self.tuning) for way in Way}
        self._drafts = Drafts(self.tuning)
        self._cpu = CPUCopier()

    def prepare(self, job: Job) -> Job:
        hosted, here = _by_place(job)
        if hosted is not None or here is None:
            return job
        with self._context:
            program = _resident([filled(here, draft) for draft in self._drafts.of(here)], self._tabulator, self.device)
        whole = job.layers is None and 0 < job.num_bytes <= self.tuning.graph_bytes
        if whole and all(buffer.array is None or is_pinned(buffer.extent.start) for buffer in job.buffers):
            program = self._lanes[job.way].recorded(program)
        return replace(job, program=program)

    def steps(self, job: Job) -> Iterator[Step]:
        stream = current_stream(self.device.index)
        with self._context:
            after = None if is_idle(stream) else Event(stream, self.device.index)
        return self._lanes[job.way].started(job.program, after) if job.program else self._steps(job, after)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._tabulator.close()
        self._cpu.close()

    def _steps(self, job: Job, after: Event | None) -> Iterator[Step]:
        hosted, here = _by_place(job)
        if hosted is not None:
            for step in self._cpu.steps(hosted):
                yield step if here is None else step._replace(layers=0)
        if here is not None:
            calls = (filled(here, draft) for draft in self._drafts.of(here))
            yield from self._lanes[job.way].steps(calls, after)


def _by_place(job: Job) -> tuple[Job | None, Job | None]:
    """The share of a job whose pools are on the host, and the rest."""
    plan = job.arena.plan
    tags = [move.tag for move in job.copies.moves]
    hosted = [tag for tag in tags if plan.pool(plan.group(tag).pool).place is not Place.DEVICE]
    if not hosted:
        return None, job
    rest = [tag for tag in tags if tag not in hosted]
    return job.with_tags(hosted), job.with_tags(rest) if rest else None


def _resident(calls: Sequence[Call], tabulator: Tabulator, device: torch.device) -> Program:
    """The calls with their tables on the device; blocks until they are there."""
    sheets = torch.from_numpy(np.concatenate([*(call.sheet for call in calls), np.empty(0, np.int64)])).pin_memory()
    tables = torch.empty(TILE * sum(call.draft.num_tiles for call in calls), dtype=torch.int64, device=device)
    stream, sheet, table, placed = torch.cuda.current_stream(device), sheets.data_ptr(), tables.data_ptr(), []
    for call in calls:
        tabulator.tabulate(table, sheet, call, stream.cuda_stream)
        placed.append(replace(call, table_at=table))
        sheet, table = sheet + call.sheet.nbytes, table + 8 * TILE * call.draft.num_tiles
    stream.synchronize()
    return Program(tuple(placed), tables)


class _Lane:
    """One way: a stream for copies, one for the kernel, and the staging memory between them."""

    def __init__(self, device: torch.device, context: Context, tabulator: Tabulator, way: Way, tuning: Tuning) -> None:
        self.device, self.context, self.tabulator, self.way = device, context, tabulator, way
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

    def steps(self, calls: Iterable[Call], after: Event | None) -> Iterator[Step]:
        if after is not None:
            with self.context:
                after.before(self._copies)
                after.before(self._kernels)
        for call in calls:
            with self._lock, self.context:
                event = self._issue(call, self.staging)
            yield Step(call.draft.num_bytes, call.draft.layers, event)

    def started(self, program: Program, after: Event | None) -> Iterator[Step]:
        """The steps of what was prepared: as it is, or all at once."""
        if program.graph is None:
            yield from self.steps(program.calls, after)
            return
        with self._lock, self.context:
            if after is not None:
                after.before(self._copies)
            self.staging.take_all(self._copies)
            program.graph.launch(self._copies)
            event = self.staging.release_all(self._copies)
        yield Step(program.num_bytes, program.calls[-1].draft.layers, event)

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
        if not call.draft.lines:
            return Event(self._copies, self.device.index)
        num_bytes = call.draft.staged_bytes
        if not num_bytes:
            slot = staging.take(0, self._kernels)
            self._launch(call, slot, 0)
            return slot.release(self._kernels)
        if self.way is Way.STORE:
            slot = staging.take(num_bytes, self._kernels)
            self._launch(call, slot, slot.address)
            self._hand(self._kernels, self._copies)
            self._copy(call, slot)
            return slot.release(self._copies)
        slot = staging.take(num_bytes, self._copies)
        self._copy(call, slot)
        self._hand(self._copies, self._kernels)
        self._launch(call, slot, slot.address)
        return slot.release(self._kernels)

    def _copy(self, call: Call, slot: Slot) -> None:
        for copy in call.draft.staged:
            copy.issue(slot.address, call.buffers[copy.chunk].extent.start, self.way, self._copies)

    def _hand(self, done: int, next_stream: int) -> None:
        self._handed.record(done)
        self._handed.before(next_stream)

    def _launch(self, call: Call, slot: Slot, flat: int) -> None:
        table, stream = call.table_at, self._kernels
        if table is None:
            table = slot.tabulate(call, self.tabulator, stream)
        gather = self.way is Way.STORE
        launch(table, call.draft.num_tiles, call.vector_bytes, flat, stream, self.device.index, gather=gather)

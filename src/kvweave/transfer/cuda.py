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
from kvweave.transfer.driver import Context, Event
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
        return replace(job, program=_resident(compiled(here, self.tuning), self.device))

    def steps(self, job: Job) -> Iterator[Step]:
        with self._context:
            after = Event(current_stream(self.device.index))
        return self._steps(job, after)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._cpu.close()

    def _steps(self, job: Job, after: Event) -> Iterator[Step]:
        if job.program is not None:
            yield from self._lanes[job.way].steps(job.program.calls, after)
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
    tables = [call.table.words for call in made if call.table is not None]
    starts = np.cumsum([0, *(-(-len(words) // 4) * 4 for words in tables)])  # on multiples of 16 bytes
    packed = np.zeros(starts[-1], np.int32)
    for start, words in zip(starts, tables, strict=False):
        packed[start : start + len(words)] = words
    memory = torch.from_numpy(packed).to(device)
    places = iter((memory.data_ptr() + 4 * starts[:-1]).tolist())
    placed = [replace(call, table_at=next(places)) if call.table is not None else call for call in made]
    return Program(tuple(placed), memory)


class _Lane:
    """One way: a stream for the kernel, one for copies, and the staging memory between them."""

    def __init__(self, device: torch.device, context: Context, way: Way, tuning: Tuning) -> None:
        self.device, self.context, self.way = device, context, way
        self.staging = Staging(device, tuning.piece_bytes, tuning.slots)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._kernels, self._copies = (stream.cuda_stream for stream in self._streams)
        self._lock = threading.Lock()
        with context:
            self._handed = Event(self._kernels)

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self.staging.close()

    def steps(self, calls: Iterable[Call], after: Event) -> Iterator[Step]:
        with self.context:
            after.before(self._kernels)
            after.before(self._copies)
        for call in calls:
            with self._lock, self.context:
                event = self._issue(call)
            yield Step(call.num_bytes, call.layers, event)

    def _issue(self, call: Call) -> Event:
        """Issue a piece; the event that it is over with."""
        for issue in call.direct:
            issue(self._copies)
        if not call.lines:
            return Event(self._copies)
        slot = self.staging.take(call.staged_bytes)
        if not call.staged:
            self._launch(call, slot)
            return slot.release(self._kernels)
        if self.way is Way.STORE:
            self._launch(call, slot)
            self._hand(self._kernels, self._copies)
        for copy in call.staged:
            copy.issue(slot.address, self.way, self._copies)
        if self.way is Way.STORE:
            return slot.release(self._copies)
        self._hand(self._copies, self._kernels)
        self._launch(call, slot)
        return slot.release(self._kernels)

    def _hand(self, done: int, next_stream: int) -> None:
        self._handed.record(done)
        self._handed.before(next_stream)

    def _launch(self, call: Call, slot: Slot) -> None:
        table, address, flat = call.tabulated(), call.table_at, slot.address if call.staged else 0
        if address is None:
            address = slot.upload(table.words, self._kernels, self.device.index)
        launch(table, address, flat, self._kernels, self.device.index, gather=self.way is Way.STORE)

"""The CUDA copier: pages are gathered into staging memory and leave by one copy; the next are gathered meanwhile.

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
from kvweave.transfer.copier import Job, Step, Way
from kvweave.transfer.cpu import CPUCopier
from kvweave.transfer.drafts import Drafts, Tuning
from kvweave.transfer.driver import Event, Live, context_of, has_batches, is_idle, is_pinned, play
from kvweave.transfer.kernel import Tabulator, current_stream, launch
from kvweave.transfer.program import Call, Program
from kvweave.transfer.staging import Slot, Staging
from kvweave.transfer.tables import TILE
from kvweave.transfer.tape import Tape


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
        if not has_batches():
            self.tuning = replace(self.tuning, direct_bytes=max(self.tuning.direct_bytes, self.tuning.single_bytes))
        self._context = context_of(self.device.index)
        self._tabulator = Tabulator(self.device.index)
        self._stores, self._loads = (_Lane(self.device, self._tabulator, way, self.tuning) for way in Way)
        self._drafts = Drafts(self.tuning)
        self._cpu = CPUCopier()

    def prepare(self, job: Job) -> Job:
        hosted, here = _by_place(job)
        if hosted is not None or here is None:
            return job
        program = _resident([Call(draft, here) for draft in self._drafts.of(here)], self._tabulator, self.device)
        whole = job.layers is None and 0 < job.num_bytes <= self.tuning.tape_bytes
        if whole and all(buffer.array is None or is_pinned(buffer.extent.start) for buffer in job.buffers):
            return replace(job, program=self._lane(job.way).recorded(program), is_single=True)
        return replace(job, program=program)

    def steps(self, job: Job) -> Iterator[Step]:
        program, lane = job.program, self._lane(job.way)
        if job.is_single:
            return lane.started(program)
        stream, after = current_stream(self.device.index), None
        if not is_idle(self._context, stream):
            after = Event(self._context)
            after.record(stream)
        return self._steps(lane, job, after) if program is None else lane.steps(program.calls, after)

    def close(self) -> None:
        self._stores.close()
        self._loads.close()
        self._tabulator.close()
        self._cpu.close()

    def _lane(self, way: Way) -> _Lane:
        return self._stores if way is Way.STORE else self._loads

    def _steps(self, lane: _Lane, job: Job, after: Event | None) -> Iterator[Step]:
        hosted, here = _by_place(job)
        if hosted is not None:
            for step in self._cpu.steps(hosted):
                yield step if here is None else step._replace(layers=0)
        if here is not None:
            calls = (Call(draft, here) for draft in self._drafts.of(here))
            yield from lane.steps(calls, after)


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
    stream, sheet, table = torch.cuda.current_stream(device), sheets.data_ptr(), tables.data_ptr()
    tape, placed = Tape(), []
    for call in calls:
        tabulator.tabulate(tape, table, sheet, call, stream.cuda_stream)
        placed.append(replace(call, table_at=table))
        sheet, table = sheet + call.sheet.nbytes, table + 8 * TILE * call.draft.num_tiles
    play(tape, context_of(stream.device_index))
    stream.synchronize()
    return Program(tuple(placed), tables)


class _Lane:
    """One way: a stream for copies, one for the kernel, and the staging memory between them."""

    def __init__(self, device: torch.device, tabulator: Tabulator, way: Way, tuning: Tuning) -> None:
        self.tabulator, self.way, self._number = tabulator, way, device.index
        self.staging = Staging(device, tuning.slots, tuning.piece_bytes)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._copies, self._kernels = (int(stream.cuda_stream) for stream in self._streams)
        self._context = context_of(device.index)
        self._handed, self._asked, self._mark = (Event(self._context) for _ in range(3))
        self._under_way: deque[tuple[Event, object]] = deque()
        """What was issued, and what must live until that is over."""
        self._lock = threading.Lock()

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._under_way.clear()
        self.staging.close()

    def steps(self, calls: Iterable[Call], after: Event | None) -> Iterator[Step]:
        """Issue one call after the other, each when it is asked for."""
        for call in calls:
            tape = Live(self._context)
            with self._lock:
                if after is not None:
                    tape.wait(after, self._copies)
                    tape.wait(after, self._kernels)
                    tape.keep(after)
                    after = None
                tape.mark(self._put(tape, call))
                mark = self._play(tape, (tape, call))
            yield Step(call.draft.num_bytes, call.draft.layers, mark)

    def started(self, program: Program) -> Iterator[Step]:
        """All of what was prepared, after what is on the caller's stream. It is under way when this returns."""
        assert program.tape is not None
        with self._lock:
            mark = self._play(program.tape, program, current_stream(self._number))
        return iter((Step(program.num_bytes, program.calls[-1].draft.layers, mark),))

    def recorded(self, program: Program) -> Program:
        """The same with a tape of all calls."""
        tape, ends = Tape(), dict[int, None]()
        with self._lock:
            tape.after(self._asked, self._copies, self._kernels)
            for call in program.calls:
                end = self._put(tape, call)
                ends.pop(end, None)
                ends[end] = None
        *others, last = ends
        for end in others:
            tape.hand(self._handed, end, last)
        tape.mark(last)
        return replace(program, tape=tape)

    def _play(self, tape: Tape, owner: object, caller: int = 0) -> Event:
        play(tape, self._context, caller, self._mark)
        mark, self._mark = self._mark, Event(self._context)
        self._under_way.append((mark, owner))
        while self._under_way and self._under_way[0][0].is_over():
            self._under_way.popleft()
        return mark

    def _put(self, tape: Tape, call: Call) -> int:
        """Record a piece; the stream that it ends on."""
        for direct in call.direct:
            tape.copy_many(*direct, self._copies)
        if not call.draft.lines:
            return self._copies
        num_bytes = call.draft.staged_bytes
        if not num_bytes:
            slot = self.staging.take(0, tape, self._kernels)
            self._launch(tape, call, slot, 0)
            tape.record(slot.free, self._kernels)
            return self._kernels
        if self.way is Way.STORE:
            slot = self.staging.take(num_bytes, tape, self._kernels)
            self._launch(tape, call, slot, slot.address)
            tape.hand(self._handed, self._kernels, self._copies)
            self._copy(tape, call, slot)
            tape.record(slot.free, self._copies)
            return self._copies
        slot = self.staging.take(num_bytes, tape, self._copies)
        self._copy(tape, call, slot)
        tape.flush()
        tape.hand(self._handed, self._copies, self._kernels)
        self._launch(tape, call, slot, slot.address)
        tape.record(slot.free, self._kernels)
        return self._kernels

    def _copy(self, tape: Tape, call: Call, slot: Slot) -> None:
        draft, starts, staging, stream = call.draft, call.job.starts, slot.address, self._copies
        offsets, places, sizes, chunks = draft.flat
        if len(sizes):
            here, there = staging + offsets, starts[chunks] + places
            tape.copy_many(*((there, here) if self.way is Way.STORE else (here, there)), sizes, stream)
        for copy in draft.strided:
            here, there = staging + copy.offset, int(starts[copy.chunk]) + copy.place
            if self.way is Way.STORE:
                tape.copy_rows(there, copy.pitch, here, copy.width, copy.width, copy.height, stream)
            else:
                tape.copy_rows(here, copy.width, there, copy.pitch, copy.width, copy.height, stream)

    def _launch(self, tape: Tape, call: Call, slot: Slot, flat: int) -> None:
        table, stream = call.table_at, self._kernels
        if table is None:
            table = slot.tabulate(call, self.tabulator, tape, stream)
        gather = self.way is Way.STORE
        launch(tape, table, call.draft.num_tiles, call.vector_bytes, flat, stream, self._number, gather=gather)

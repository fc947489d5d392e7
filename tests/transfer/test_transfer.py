"""Transfers: pending, then done, failed or cancelled; nobody is told otherwise, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvweave.errors import ArenaClosed, BadCopy, TransferCancelled, TransferFailed, TransferTimeout
from kvweave.operation import AnyOperation, Completions, OperationState
from kvweave.plan import Layout
from kvweave.transfer import (
    ChunkLayout,
    Copier,
    CopyJob,
    CopyStep,
    CPUCopier,
    Direction,
    Mover,
    Transfer,
    make_move,
    whole_chunks,
)
from tests.transfer.contract import hybrid
from tests.transfer.worlds import World, buffers

MADE = hybrid(Layout.LAYER_MAJOR)


class Gate:
    """A mark that is over when it is opened, or breaks."""

    def __init__(self) -> None:
        self.is_open = False
        self.error: Exception | None = None
        self.held: list[object] = []

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_open

    def spin(self, seconds: float) -> None:
        time.sleep(min(seconds, 1e-4))

    def block_stream(self, stream: object) -> None:
        self.held.append(stream)


class ByHand:
    """A copier whose steps the test lets happen, one by one."""

    def __init__(self, steps: list[CopyStep], error: Exception | None = None) -> None:
        self.todo, self.error = steps, error
        self.go = threading.Semaphore(0)
        self.given: list[CopyJob] = []
        self.closed = 0

    def prepare(self, job: CopyJob) -> CopyJob:
        return job

    def steps(self, job: CopyJob) -> Iterator[CopyStep]:
        self.given.append(job)
        return self._steps()

    def _steps(self) -> Iterator[CopyStep]:
        for step in self.todo:
            assert self.go.acquire(timeout=10)
            yield step
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


def run(steps: list[CopyStep], num_bytes: int, error: Exception | None = None, **how: Any) -> Transfer:
    """All steps issued by this thread."""
    transfer = Transfer(Direction.LOAD, num_bytes, **how)
    copier = ByHand(steps, error)
    copier.go.release(len(steps))
    transfer.run(copier._steps(), until_done=False)
    return transfer


def start(world: World, copier: Copier, **how: Any) -> tuple[Mover, Transfer]:
    layout = ChunkLayout.of(MADE, 16)
    copies = whole_chunks(layout, world.tables(layout, 2), 0, 2)
    mover = Mover(world.arena, copier)
    return mover, mover.store(copies, buffers(layout, 2), **how)


def sizes(world: World, count: int) -> list[int]:
    layout = ChunkLayout.of(MADE, 16)
    total = 2 * sum(part.num_bytes for part in layout.groups)
    return [total // count] * (count - 1) + [total - total // count * (count - 1)]


def test_a_transfer_is_pending_until_its_last_mark_is_over() -> None:
    gates = [Gate(), Gate()]
    transfer = run([CopyStep(10, 0, gates[0]), CopyStep(5, 1, gates[1])], 15)
    assert (transfer.state, transfer.bytes_done) == (OperationState.PENDING, 0)
    gates[1].is_open = True
    assert (transfer.state, transfer.bytes_done) == (OperationState.PENDING, 0), "steps end in order"
    gates[0].is_open = True
    assert (transfer.state, transfer.bytes_done) == (OperationState.DONE, 15)
    transfer.wait(0)
    took = transfer.seconds
    assert took == transfer.seconds > 0


def test_a_transfer_is_polled_like_every_other_operation() -> None:
    gate, completions = Gate(), Completions()
    transfer = run([CopyStep(10, 0, gate)], 10)
    assert isinstance(transfer, AnyOperation)
    completions.add(transfer)
    assert completions.poll() == []
    gate.is_open = True
    assert completions.poll() == [transfer]
    assert completions.poll() == []


def test_waiting_has_an_end_and_may_be_repeated() -> None:
    gate = Gate()
    transfer = run([CopyStep(10, 1, gate)], 10)
    begun = time.perf_counter()
    with pytest.raises(TransferTimeout, match="load of 10 bytes: 0 moved after .*wait again, or cancel"):
        transfer.wait(0.05)
    assert time.perf_counter() - begun < 5
    assert transfer.state is OperationState.PENDING
    gate.is_open = True
    transfer.wait(1)


def test_a_broken_mark_is_a_failure_and_never_done() -> None:
    """S3: a layer that could not be copied was reported as there."""
    gates = [Gate(), Gate()]
    transfer = run([CopyStep(10, 1, gates[0]), CopyStep(5, 2, gates[1])], 15)
    gates[0].error = RuntimeError("illegal memory access")
    for _ in range(2):
        with pytest.raises(TransferFailed, match="load of 15 bytes failed: illegal memory access"):
            transfer.wait(1)
        with pytest.raises(TransferFailed):
            transfer.wait_layer(0, 1)
    assert (transfer.state, transfer.bytes_done) == (OperationState.FAILED, 0)


def test_an_error_on_the_way_is_a_failure_once_what_was_issued_is_over() -> None:
    gate = Gate()
    transfer = run([CopyStep(10, 1, gate)], 15, ValueError("no such page"))
    assert transfer.state is OperationState.PENDING, "a step is still writing"
    gate.is_open = True
    with pytest.raises(TransferFailed, match="no such page"):
        transfer.wait(1)


def test_a_copier_that_stops_early_has_failed() -> None:
    transfer = run([CopyStep(10, 1)], 15)
    with pytest.raises(TransferFailed, match="only 10 of 15 bytes were moved"):
        transfer.wait(1)


def test_layers_are_there_one_after_the_other() -> None:
    gates = [Gate(), Gate(), Gate()]
    transfer = run([CopyStep(5, layer, gate) for layer, gate in zip((2, 2, 4), gates, strict=True)], 15)
    transfer.wait_layer(1, 1, "stream")
    assert [gate.held for gate in gates] == [["stream"], [], []]
    transfer.wait_layer(2, 1, "stream")
    assert [gate.held for gate in gates] == [["stream"] * 2, ["stream"], ["stream"]]


def test_waiting_for_a_layer_after_the_end_still_orders_the_stream() -> None:
    """S7: a late waiter found no event, and went on before the copy had ended."""
    gate = Gate()
    gate.is_open = True
    transfer = run([CopyStep(15, 4, gate)], 15)
    transfer.wait(1)
    transfer.wait_layer(0, 1, "late")
    assert gate.held == ["late"]


def test_progress_is_told_and_may_break() -> None:
    seen: list[int] = []

    def tell(transfer: Transfer) -> None:
        seen.append(transfer.bytes_done)
        if len(seen) == 2:
            raise ValueError("display gone")

    transfer = run([CopyStep(5, 0), CopyStep(5, 0), CopyStep(5, 1)], 15, on_progress=tell)
    transfer.wait(1)
    assert seen == [5, 10]
    assert transfer.state is OperationState.DONE


def test_in_the_background_a_transfer_can_be_waited_for_and_cancelled() -> None:
    with World(MADE, 1) as world:
        copier = ByHand([CopyStep(n, 0) for n in sizes(world, 3)])
        mover, transfer = start(world, copier)
        copier.go.release()
        while transfer.bytes_done == 0:
            time.sleep(0.001)
        assert transfer.cancel()
        assert transfer.cancel(), "twice is once"
        copier.go.release()
        with pytest.raises(TransferCancelled, match=r"store was cancelled after \d+ of \d+ bytes"):
            transfer.wait(5)
        assert transfer.state is OperationState.CANCELLED
        with pytest.raises(TransferCancelled):
            transfer.wait_layer(0, 5)
        mover.close()
        mover.close()


def test_a_single_step_does_not_wait_for_what_the_background_is_busy_with() -> None:
    with World(MADE, 2) as world:
        layout = ChunkLayout.of(MADE, 16)
        copies = whole_chunks(layout, world.tables(layout, 2), 0, 2)
        gate = Gate()
        copier = ByHand([CopyStep(copies.num_bytes, 3, gate)])
        with Mover(world.arena, copier) as mover:
            job = mover.prepare(copies, buffers(layout, 2), Direction.STORE)
            first = mover.start(job)
            copier.go.release()
            first.wait_layer(0, 5)  # its thread has issued it, and waits for the gate
            copier.todo = [CopyStep(copies.num_bytes, 3)]
            copier.go.release()
            try:
                mover.start(replace(job, is_single=True)).wait(5)
                assert first.state is OperationState.PENDING
            finally:
                gate.is_open = True
            first.wait(5)


def test_what_is_over_cannot_be_cancelled() -> None:
    transfer = run([CopyStep(15, 1)], 15)
    assert not transfer.cancel()
    assert transfer.state is OperationState.DONE


def test_a_queued_transfer_can_be_cancelled_before_it_starts() -> None:
    with World(MADE, 1) as world:
        copier = ByHand([CopyStep(sum(sizes(world, 1)), 6)])
        mover, first = start(world, copier)
        layout = ChunkLayout.of(MADE, 16)
        second = mover.store(whole_chunks(layout, world.tables(layout, 2), 0, 2), buffers(layout, 2))
        assert second.cancel()
        copier.go.release()
        first.wait(5)
        with pytest.raises(TransferCancelled, match="after 0 of"):
            second.wait(5)
        mover.close()


def test_a_waiter_sleeps_until_the_layer_is_issued() -> None:
    with World(MADE, 1) as world:
        first, second = sizes(world, 2)
        copier = ByHand([CopyStep(first, 2), CopyStep(second, 6)])
        mover, transfer = start(world, copier)
        with pytest.raises(TransferTimeout):
            transfer.wait_layer(0, 0.05)
        copier.go.release()
        transfer.wait_layer(1, 5)
        assert transfer.state is OperationState.PENDING
        copier.go.release()
        transfer.wait_layer(5, 5)
        transfer.wait(5)
        mover.close()


def test_a_failure_in_the_background_reaches_those_who_wait() -> None:
    with World(MADE, 1) as world:
        copier = ByHand([], OSError("disk full"))
        mover, transfer = start(world, copier)
        with pytest.raises(TransferFailed, match="disk full"):
            transfer.wait(5)
        assert isinstance(transfer.error, OSError)
        mover.close()
        assert copier.closed == 1


def test_stores_and_loads_go_on_at_once_and_are_counted() -> None:
    with World(MADE, 2) as world, Mover(world.arena, CPUCopier(threads=2)) as mover:
        layout = ChunkLayout.of(MADE, 16)
        tables, others = world.tables(layout, 2), world.tables(layout, 2)
        world.sign(tables)
        copies, back = whole_chunks(layout, tables, 0, 2), whole_chunks(layout, others, 0, 2)
        chunks = buffers(layout, 2)
        mover.store(copies, chunks).wait(5)
        handles = [mover.store(copies, buffers(layout, 2)) for _ in range(5)]
        handles += [mover.load(back, chunks, layers=2) for _ in range(5)]
        for handle in handles:
            handle.wait_layer(0, 5)
            handle.wait(5)
        signed, found = world.read(tables), world.read(others)
        assert all(np.array_equal(signed[name], found[name]) for name in signed)
        stats = mover.stats()
        assert (stats.stores, stats.loads) == (6, 5)
        assert stats.stored_bytes == 6 * copies.num_bytes


def test_buffers_may_be_anything_with_bytes_but_not_anything() -> None:
    with World(MADE, 3) as world:
        layout = ChunkLayout.of(MADE, 16, ["full"])
        copies = whole_chunks(layout, world.tables(layout, 1), 0, 1)
        mover = Mover(world.arena, background=False)
        memory = bytearray(layout.num_bytes)
        mover.store(copies, [memory]).wait(5)
        mover.load(copies, [bytes(memory)]).wait(5)
        mover.store(copies, [memoryview(memory)]).wait(5)
        with pytest.raises(BadCopy, match="read-only"):
            mover.store(copies, [bytes(memory)])
        with pytest.raises(BadCopy, match="one run of bytes"):
            mover.store(copies, [buffers(layout, 1)[0].repeat(2).view(-1, 2).t()[0]])
        with pytest.raises(BadCopy, match="one run of bytes"):
            mover.store(copies, ["chunk"])
        with pytest.raises(BadCopy, match="at least 1 layer"):
            mover.load(copies, [memory], layers=0)


def test_closed_movers_and_arenas_move_nothing() -> None:
    with World(MADE, 3) as world:
        layout = ChunkLayout.of(MADE, 16, ["full"])
        copies = whole_chunks(layout, world.tables(layout, 1), 0, 1)
        mover, other = Mover(world.arena), Mover(world.arena)
        mover.close()
        with pytest.raises(ArenaClosed):
            mover.store(copies, buffers(layout, 1))
    with pytest.raises(ArenaClosed):
        other.store(copies, buffers(layout, 1))
    other.close()


def test_a_plan_is_checked_again_where_only_its_places_or_its_way_differ_from_one_that_was_fine() -> None:
    with World(MADE, 3) as world, Mover(world.arena, background=False) as mover:
        layout = ChunkLayout.of(MADE, 16)
        tables = world.tables(layout, 2)
        fine = whole_chunks(layout, tables, 0, 2)
        mover.load(fine, buffers(layout, 2)).wait(20)
        move = fine.moves[0]
        beyond = replace(fine, moves=(make_move(move.tag, move.pages, move.chunks + 1, move.blocks), *fine.moves[1:]))
        with pytest.raises(BadCopy, match="chunk 2"):
            mover.load(beyond, buffers(layout, 2))
        two = make_move(move.tag, [*move.pages[:2]], [0, 0], [*move.blocks[:1]] * 2)
        twice = replace(fine, moves=(two,))
        mover.load(twice, buffers(layout, 2)).wait(20)
        with pytest.raises(BadCopy, match="filled twice"):
            mover.store(twice, buffers(layout, 2))

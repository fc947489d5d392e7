"""The embedded store as engines use it; and what is its own: bounds, and the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvweave.errors import OperationCancelled, StoreError
from kvweave.operation import AnyOperation, Completions, OperationState
from kvweave.store import (
    BaseStore,
    DictTier,
    HashedPrompt,
    MemoryTier,
    Operation,
    Saved,
    Schema,
    Store,
    TierPolicy,
    TierStack,
    blocking_store,
    operations,
)
from kvweave.store.blob import blob_bytes
from kvweave.store.jobs import run_beside
from kvweave.store.tier import whole
from tests.store.engine_contract import SPEC, WAIT_S, EngineContract, Taken, polled, prompt_of
from tests.store.interrupts import interrupted
from tests.store.models import truth

SCHEMA = Schema.of(SPEC, parts=2)


class TestEmbedded(EngineContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        made = Store(SCHEMA, TierStack((MemoryTier("16MiB"), TierPolicy(inline=True))))
        yield made
        made.close()

    def one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvweave.store.batches.BATCH_BYTES", 1)

    def lose(self, store: BaseStore[Any], prompt: HashedPrompt, chunk: int) -> None:
        assert isinstance(store, Store)
        number = len(SCHEMA.shards)
        store.tier_stack.executors[0].tier.delete(prompt.keys(SCHEMA.ids)[chunk * number : (chunk + 1) * number])


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(SCHEMA, TierStack((DictTier(), TierPolicy(inline=True))))
    yield made
    made.close()


def test_saves_beyond_the_bound_are_dropped_at_once_and_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SAVES", 2)
    go_on = threading.Event()

    def source(*args: Any) -> Any:
        assert go_on.wait(WAIT_S)
        return truth(*args)

    saves = [store.submit_save(prompt_of(store, number), source, points=[1024]) for number in range(8)]
    dropped = [save for save in saves if save.is_done]
    assert len(dropped) >= 8 - 2 - 2, "two run, and two wait"
    assert all(save.result() == Saved(dropped=len(save.failed)) != Saved() for save in dropped)
    go_on.set()
    kept = [save for save in saves if save not in dropped]
    assert all(save.result(WAIT_S).dropped == 0 for save in kept)


def test_nothing_can_be_submitted_to_a_closed_store(store: Store) -> None:
    hit = store.lookup(prompt := prompt_of(store))
    store.close()
    threads = threading.active_count()
    calls: list[Callable[[], object]] = [
        lambda: store.submit_lookup([prompt]),
        lambda: store.submit_load(hit, Taken()),
        lambda: store.submit_save(prompt, truth),
        store.submit_removed,
        lambda: store.prefetch(hit),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="closed"):
            call()
    assert threading.active_count() <= threads
    assert not len(store.completions)


@pytest.mark.parametrize("inline", [True, False])
def test_calls_to_a_closed_store_are_misses_at_once(inline: bool) -> None:
    store = Store(SCHEMA, TierStack((MemoryTier("16MiB"), TierPolicy(inline=inline, deadline_s=WAIT_S))))
    prompt = prompt_of(store)
    assert store.save(prompt, truth, points=[1024]).dropped == 0
    hit = store.lookup(prompt)
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.lookup(prompt).position,
        lambda: store.load(hit, Taken()),
        lambda: store.save(prompt, truth, points=[1024]).stored,
        lambda: store.gather(prompt, truth, points=[1024]).commit().stored,
    ]
    ended = [run_beside(call, "after the end") for call in calls]
    assert [future.result(WAIT_S / 2) for future in ended] == [0, 0, 0, 0]


def test_a_submit_that_is_interrupted_is_not_counted(store: Store) -> None:
    prompt, after = prompt_of(store), 0
    store.submit_lookup([prompt]).result(WAIT_S)
    while interrupted(lambda: store.submit_lookup([prompt]), after):
        assert not len(store.completions), after
        after += 1
    assert after > 10


def test_refused_tickets_are_counted_and_one_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert store.redeem(b"not a ticket").position == 0
    assert store.stats().refused_tickets == 3
    assert caplog.text.count("a ticket is refused") == 1
    store._warn_at = 0.0  # a minute later
    store.redeem(b"not a ticket")
    assert caplog.text.count("a ticket is refused") == 2


def test_closing_does_what_was_submitted(store: Store) -> None:
    tier = store.tier_stack.executors[0].tier
    saves = [store.submit_save(prompt_of(store, number), truth) for number in range(5)]
    store._operations.close(WAIT_S)
    assert all(save.result(0).dropped == 0 for save in saves)
    assert tier.stats().entries
    assert store.lookup(prompt_of(store)).position == 1024


def test_a_forked_child_has_operations_of_its_own(store: Store) -> None:
    go_on = threading.Event()

    def source(*args: Any) -> Any:
        assert go_on.wait(WAIT_S)
        return truth(*args)

    mine = store.submit_save(prompt_of(store), source)
    child = os.fork()
    if not child:
        try:
            fine = store.poll() == [] and store.submit_lookup([]).result(WAIT_S) == []
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    assert polled(store, 1) == [mine]


@pytest.mark.parametrize("kind", ["lookup", "load", "save"])
def test_a_forked_child_does_not_wait_for_a_thread_that_measured_meanwhile(store: Store, kind: str) -> None:
    prompt = prompt_of(store)
    with store._latency[kind]._lock:
        child = os.fork()
    if not child:
        try:
            signal.alarm(int(WAIT_S))
            store.load(store.lookup(prompt), Taken())
            store.save(prompt, truth)
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_no_more_is_gathered_than_may_be(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    size = max(map(blob_bytes, SCHEMA.shards))
    monkeypatch.setattr("kvweave.store.store.GATHER_BYTES", 4 * size)
    gathered = store.gather(prompt_of(store), truth)
    wanted = len(store._to_keep(prompt_of(store), truth, None, None, 0))
    assert 0 < len(gathered.failed) < wanted
    saved = gathered.commit()
    assert (saved.stored, saved.dropped) == (wanted - len(gathered.failed), len(gathered.failed))
    assert store.save(prompt_of(store), truth).present == saved.stored
    assert blocking_store.GATHER_BYTES == 256 << 20


def test_a_budget_ends_what_was_submitted_in_time(store: Store) -> None:
    store.save(prompt_of(store), truth)
    load = store.submit_load(store.lookup(prompt_of(store)), Taken(), budget_s=0.0)
    assert load.result(WAIT_S) == 0
    assert len(load.failed) > 0
    assert load.state is OperationState.DONE, "late is not cancelled"


def test_a_cancelled_lookup_is_no_answer(store: Store) -> None:
    go_on = threading.Event()
    tier = store.tier_stack.executors[0].tier
    contains = tier.contains

    def slow(keys: Any) -> Any:
        assert go_on.wait(WAIT_S)
        return contains(keys)

    tier.contains = slow  # type: ignore[method-assign]
    lookup = store.submit_lookup([prompt_of(store)])
    lookup.cancel()
    go_on.set()
    with pytest.raises(OperationCancelled):
        lookup.result(WAIT_S)


def test_a_load_that_was_complete_when_it_was_cancelled_is_done(store: Store) -> None:
    store.save(prompt_of(store), truth)
    loads: list[Operation[int]] = []

    def sink(*_: object) -> None:
        if loads[0].missing and len(loads[0].missing) == 1:  # this is the last piece
            loads[0].budget.cancelled.set()

    operation: Operation[int] = store._operations.new("load", None, None)
    loads.append(operation)
    hit = store.lookup(prompt_of(store))
    operation.expect(store._needs(hit.position, range(len(SCHEMA.shards)), hit.present))
    operation.run(lambda: (store._load(hit, sink, 0, None, operation.budget, operation.arrived), operation.missing))
    assert (operation.state, operation.result(WAIT_S)) == (OperationState.DONE, 1024)


def test_completions_take_whatever_is_an_operation() -> None:
    class Copy:
        error: BaseException | None = None
        is_done = False

        @property
        def state(self) -> OperationState:
            return OperationState.DONE if self.is_done else OperationState.PENDING

        def wait(self, timeout: float = 1.0) -> None: ...

        def cancel(self) -> bool:
            return False

    first, second, completions = Copy(), Copy(), Completions()
    assert isinstance(first, AnyOperation)
    completions.add(first)
    completions.add(second)
    assert completions.poll() == []
    second.is_done = True
    assert completions.poll() == [second]
    assert completions.poll() == []
    first.is_done = True
    completions.discard(first)
    assert (completions.poll(), len(completions)) == ([], 0)


def test_an_entry_that_somebody_forged_is_a_miss_for_a_ticket_too(store: Store) -> None:
    prompt = prompt_of(store)
    store.save(prompt, truth, points=[512, 1024])
    ticket = store.lookup(prompt).ticket()
    key, tier = prompt.keys(SCHEMA.ids)[3 * len(SCHEMA.shards)], store.tier_stack.executors[0].tier
    tier.delete([key])
    tier.put([key], [whole(bytes(blob_bytes(SCHEMA.shards[0])))])
    assert store.load(store.redeem(ticket), Taken()) == 512


def test_a_save_that_is_dropped_at_once_has_ended_though_it_is_a_mistake(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "SAVES", 0)
    save = store.submit_save(prompt_of(store), truth, points=[100])
    assert polled(store, 1) == [save]
    assert (save.state, store.stats().operations) == (OperationState.FAILED, 0)
    with pytest.raises(StoreError, match="chunks are of 256 tokens"):
        save.result(WAIT_S)


def test_a_forked_child_does_not_wait_for_what_its_parent_writes(store: Store) -> None:
    lock, is_held, go_on = store.tier_stack.executors[0]._jobs._lock, threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            go_on.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(WAIT_S)
    child = os.fork()
    go_on.set()
    if not child:
        try:
            signal.alarm(int(WAIT_S) // 3)
            os._exit(0 if store.flush() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"write": "throguh"}, "write='throguh': it is one of through, back, off"),
        ({"workers": 0}, "workers=0: it is 1 at least"),
        ({"queue_jobs": 0}, "queue_jobs=0: it is 1 at least"),
        ({"retries": -1}, "retries=-1: it is 0 at least"),
        ({"failures": 0}, "failures=0: it is 1 at least"),
        ({"cool_s": float("nan")}, "cool_s=nan: it is 0 at least"),
        ({"deadline_s": 0}, "deadline_s=0: it is 0.001 at least, 86400 at most"),
        ({"deadline_s": float("inf")}, "deadline_s=inf: it is 0.001 at least, 86400 at most"),
    ],
)
def test_a_policy_with_which_nothing_would_be_stored_is_an_error(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        TierPolicy(**wrong)

"""A tier's threads: reads go before writes, flushes wait for what was there before them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvweave.store import DictTier, DiskTier, Store, TierPolicy, TierStack
from kvweave.store.jobs import JobQueue
from kvweave.store.tier import Blob
from kvweave.store.tier_executor import TierExecutor
from tests.store.contract import key, put
from tests.store.faults import SCHEMA, SPEC, TOKENS, payload, verify
from tests.store.interrupts import interrupt_everywhere, interrupted
from tests.store.models import namespace


@pytest.fixture
def jobs() -> Iterator[JobQueue]:
    made = JobQueue("test", 2, 4)
    yield made
    made.close(10)


def test_no_interrupt_leaves_the_queue_locked(jobs: JobQueue) -> None:
    for call in (lambda: jobs.read(int), lambda: jobs.write(int), lambda: jobs.drain(1.0)):
        interrupt_everywhere(call, jobs._lock)


def test_no_interrupt_of_who_waits_for_a_job_stops_the_thread_that_does_it(jobs: JobQueue) -> None:
    executor = TierExecutor(DictTier(), TierPolicy(inline=True))
    executor._jobs.close(10)
    executor._jobs = jobs

    def written() -> None:
        if future := jobs.write(int):
            future.result(10)

    def waited() -> None:
        executor.finish(executor.reads, executor.start(executor.reads, int))

    def cancelled() -> None:
        jobs.read(int).cancel()

    for call in (written, waited, cancelled):
        after = 0
        while interrupted(call, after):
            everybody = threading.Barrier(3)
            begun: list[Future[int]] = [jobs.read(partial(everybody.wait, 10)) for _ in range(3)]
            assert sorted(each.result(10) for each in begun) == [0, 1, 2], (call, after)
            after += 1
    assert jobs.drain(10)
    assert jobs.write(int), "nobody who was interrupted is still in line before it"


def test_no_interrupt_leaves_a_tier_locked(tmp_path: Path) -> None:
    with DiskTier(tmp_path, "1MiB") as tier:
        put(tier, 0, 1)
        for call in (tier.contains, tier.contains_now, tier.touch):
            interrupt_everywhere(partial(call, [key(0), key(1)]), tier._lock)


def test_no_write_waits_beside_an_idle_thread_for_a_read_that_the_thread_woken_for_it_took(jobs: JobQueue) -> None:
    for _ in range(50):
        time.sleep(0.001)  # all threads are idle
        written = threading.Event()
        with jobs._lock:
            jobs.write(written.set)
            read = jobs.read(partial(written.wait, 2))
        assert read.result(10)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_job_wakes_one_thread(jobs: JobQueue, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    woken, wait = list[str](), threading.Condition.wait

    def counted(self: threading.Condition, timeout: float | None = None) -> bool:
        found = wait(self, timeout)
        woken.append(threading.current_thread().name)
        return found

    monkeypatch.setattr(threading.Condition, "wait", counted)
    for _ in range(2):  # the first one ends the waits that began before
        woken.clear()
        for _ in range(20):
            future = getattr(jobs, kind)(int)
            assert future.result(10) == 0
            assert jobs.drain(10)
            time.sleep(0.002)
    assert 0 < len([name for name in woken if name.startswith("kvweave-test")]) <= 21


def test_reads_that_come_together_are_served_together(jobs: JobQueue) -> None:
    everybody = threading.Barrier(3)
    for _ in range(20):
        assert all(each.result(10) in range(3) for each in [jobs.read(lambda: everybody.wait(10)) for _ in range(3)])


def test_a_read_is_done_while_every_other_thread_writes(jobs: JobQueue) -> None:
    go_on = threading.Event()
    writes = [jobs.write(lambda: go_on.wait(30)) for _ in range(4)]
    assert all(writes)
    assert jobs.read(lambda: "at once").result(10) == "at once"
    go_on.set()


def test_reads_that_wait_are_done_before_writes_that_wait(jobs: JobQueue) -> None:
    go_on, done = threading.Event(), list[str]()
    blocked = [jobs.read(lambda: go_on.wait(30)) for _ in range(3)]  # all three threads
    time.sleep(0.1)
    writes = [jobs.write(lambda: done.append("write")) for _ in range(3)]
    reads = [jobs.read(lambda: done.append("read")) for _ in range(3)]
    go_on.set()
    for future in (*blocked, *reads, *writes):
        assert future is not None
        future.result(10)
    assert sorted(done) == ["read"] * 3 + ["write"] * 3
    assert done[0] == "read"


def test_no_number_of_writes_makes_a_read_a_miss(jobs: JobQueue) -> None:
    go_on = threading.Event()
    while jobs.write(lambda: go_on.wait(30)) is not None:
        pass
    assert [jobs.read(lambda: 1).result(10) for _ in range(100)] == [1] * 100
    go_on.set()


def test_a_flush_waits_for_what_was_queued_before_it_and_no_longer(jobs: JobQueue) -> None:
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            jobs.write(lambda: time.sleep(0.002), 1.0)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for _ in range(5):
            assert jobs.drain(10)
    finally:
        stop.set()
        writer.join()


def test_a_flush_says_so_if_a_write_was_not_tried_in_time(jobs: JobQueue) -> None:
    go_on = threading.Event()
    jobs.write(lambda: go_on.wait(30))
    assert not jobs.drain(0.05)
    go_on.set()
    assert jobs.drain(10)


class SlowWrites(DictTier):
    def __init__(self) -> None:
        super().__init__("slow")
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        self.begun.set()
        assert self.go.wait(30)
        return super().put(keys, blobs)


def test_prompts_of_a_tier_are_found_and_loaded_while_others_write_to_it() -> None:
    tier = SlowWrites()
    store = Store(SCHEMA, TierStack((tier, TierPolicy(write="back", queue_jobs=1, deadline_s=5))))
    prompt = store.prompt(TOKENS, namespace(SPEC))
    store.save(prompt, payload)
    assert store.flush()
    tier.go.clear()
    for number in range(4):  # both threads and the queue
        store.save(store.prompt(TOKENS + 1 + number, namespace(SPEC)), payload, budget_s=0.1)
    for _ in range(10):
        assert store.load(store.lookup(prompt), verify) == 1024
    assert store.stats().unanswered == 0
    tier.go.set()
    store.close()


def test_a_lookup_that_was_not_answered_is_counted_apart_from_a_miss() -> None:
    class Mute(DictTier):
        def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
            assert go_on.wait(30)
            return super().contains(keys)

    go_on = threading.Event()
    store = Store(SCHEMA, TierStack((Mute(), TierPolicy(deadline_s=20))))
    prompt = store.prompt(TOKENS, namespace(SPEC))
    assert store.lookup(prompt, budget_s=0.05).position == 0
    assert (store.stats().unanswered, store.stats().tiers[0].misses) == (1, 0)
    go_on.set()
    assert store.lookup(prompt).position == 0
    assert store.stats().unanswered == 1
    assert store.stats().tiers[0].misses > 0
    store.close()


def test_lookups_of_a_disk_need_none_of_its_threads(tmp_path: Path) -> None:
    tier, go_on = DiskTier(tmp_path, "16MiB"), threading.Event()
    with Store(SCHEMA, TierStack((tier, TierPolicy(deadline_s=5)))) as store:
        prompt = store.prompt(TOKENS, namespace(SPEC))
        store.save(prompt, payload)
        executor = store.tier_stack.executors[0]
        hanging = [executor.start(executor.reads, lambda: go_on.wait(30)) for _ in range(10)]
        for budget_s in (0.0, 0.05, None):  # even a budget that is spent is enough
            assert store.lookup(prompt, budget_s=budget_s).position == 1024
        assert store.stats().unanswered == 0
        go_on.set()
        assert all(future and future.result(10) for future in hanging)


def test_a_save_that_no_tier_answered_is_dropped_and_not_called_present() -> None:
    class Mute(DictTier):
        def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
            assert go_on.wait(30)
            return super().contains(keys)

    go_on = threading.Event()
    with Store(SCHEMA, TierStack((Mute(), TierPolicy(deadline_s=20)))) as store:
        prompt = store.prompt(TOKENS, namespace(SPEC))
        saved = store.save(prompt, payload, budget_s=0.05)
        assert (saved.stored, saved.present) == (0, 0)
        assert store.gather(prompt, payload, budget_s=0.05).commit() == saved
        assert store.stats().unanswered == 2
        go_on.set()
        assert store.save(prompt, payload).stored == saved.dropped > 0


@pytest.mark.slow
def test_disk_prompts_are_found_while_two_writers_never_pause(tmp_path: Path) -> None:
    store = Store(SCHEMA, TierStack((DiskTier(tmp_path, "64MiB"), TierPolicy(write="back", queue_jobs=2))))
    prompt = store.prompt(TOKENS, namespace(SPEC))
    store.save(prompt, payload)
    assert store.flush()
    stop = threading.Event()

    def write(first: int) -> None:
        number = first
        while not stop.is_set():
            number += 2
            store.save(store.prompt(TOKENS + number, namespace(SPEC)), payload)

    writers = [threading.Thread(target=write, args=(1 + number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    found = [store.load(store.lookup(prompt), verify) for _ in range(60)]
    stop.set()
    for writer in writers:
        writer.join()
    assert found == [1024] * 60
    store.close()


def test_callers_get_room_in_a_full_queue_in_the_order_in_which_they_came() -> None:
    jobs, go_on, order = JobQueue("test", 1, 1), threading.Event(), list[int]()
    jobs.write(lambda: go_on.wait(30))
    jobs.write(lambda: None, 10)

    def write(number: int) -> None:
        assert jobs.write(lambda: order.append(number), 30)

    callers = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for caller in callers:
        caller.start()
        time.sleep(0.02)
    go_on.set()
    for caller in callers:
        caller.join()
    assert jobs.drain(10)
    assert order == [*range(12)]
    assert jobs.close(10)


def test_a_caller_waits_while_the_queue_moves_and_gives_up_when_it_does_not() -> None:
    jobs, go_on = JobQueue("test", 1, 1), threading.Event()
    callers = [
        threading.Thread(target=jobs.write, args=(lambda: time.sleep(0.2), 30, 30))
        for _ in range(10)  # two seconds of work
    ]
    for caller in callers:
        caller.start()
    time.sleep(0.05)
    assert jobs.write(lambda: go_on.wait(30), 30, stalled_s=1.0) is not None
    for caller in callers:
        caller.join()
    assert jobs.write(lambda: None, 5) is not None
    began = time.monotonic()
    assert jobs.write(lambda: None, 30, stalled_s=0.1) is None
    assert time.monotonic() - began < 5
    assert jobs.is_stalled(0.1)
    go_on.set()
    assert jobs.close(10)


def test_reads_without_end_do_not_hold_a_write_up_for_ever(jobs: JobQueue) -> None:
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            jobs.read(lambda: time.sleep(0.002)).result(10)

    readers = [threading.Thread(target=keep_reading) for _ in range(12)]
    for reader in readers:
        reader.start()
    try:
        writes = [jobs.write(lambda: "done") for _ in range(3)]
        assert [write.result(10) for write in writes if write] == ["done"] * 3
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_a_store_whose_queue_hangs_opens_its_breaker_and_saves_wait_no_more() -> None:
    tier = SlowWrites()
    with Store(SCHEMA, TierStack((tier, TierPolicy(write="back", queue_jobs=1, deadline_s=0.1)))) as store:
        tier.go.clear()
        for number in range(3 + 3):  # two threads and a queue of one, then three that wait in vain
            store.save(store.prompt(TOKENS + number, namespace(SPEC)), payload)
        before = store.stats().tiers[0].drops
        saved = store.save(store.prompt(TOKENS + 9, namespace(SPEC)), payload)
        drops = store.stats().tiers[0].drops
        assert drops["queue full"] == before["queue full"] > 0, "a save waits for a tier that hangs"
        assert drops["paused"] - before.get("paused", 0) == saved.dropped > 0
        tier.go.set()


def test_a_write_that_was_not_begun_in_time_is_counted_as_late() -> None:
    tier = SlowWrites()
    with Store(SCHEMA, TierStack((tier, TierPolicy(workers=1, deadline_s=0.1)))) as store:
        tier.go.clear()
        saved = [store.save(store.prompt(TOKENS + number, namespace(SPEC)), payload) for number in range(2)]
        assert store.stats().tiers[0].drops == {
            "late": saved[1].dropped
        }  # the first hangs, and the second waits for it
        tier.go.set()

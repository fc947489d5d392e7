"""A tier's threads: reads go before writes, flushes wait for what was there before them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvweave.store import DictTier, DiskTier, Store, TierPolicy, TierStack
from kvweave.store.jobs import JobQueue
from kvweave.store.tier import Blob
from tests.store.faults import SCHEMA, SPEC, TOKENS, payload, verify
from tests.store.models import namespace


@pytest.fixture
def jobs() -> Iterator[JobQueue]:
    made = JobQueue("test", 2, 4)
    yield made
    made.close(10)


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

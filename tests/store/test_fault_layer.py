"""Random work on a disk that fails and hangs, by turns: nothing wrong, nothing lost that was kept, all in time."""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path

import pytest

from kvweave.store import DiskTier, MemoryTier, Store, TierPolicy, TierStack
from kvweave.store.keys import HashedPrompt
from tests.store.fault_layer import HANG_S, FaultLayer
from tests.store.faults import SCHEMA, SPEC, TOKENS, payload, verify
from tests.store.models import namespace

BUDGET_S = 0.15
LATE_S = 1.0
"""Beyond the budget; the machine may be busy, and two threads of this test share it with the tier's."""
PROMPTS = 24


def opened(directory: Path, *, near: bool) -> Store:
    disk = DiskTier(directory, "64MiB"), TierPolicy(write="through", deadline_s=2.0, cool_s=0.1, workers=3)
    memory = MemoryTier("1MiB"), TierPolicy(inline=True, promote=True)
    return Store(SCHEMA, TierStack(memory, disk) if near else TierStack(disk))


def prompt(store: Store, number: int) -> HashedPrompt:
    return store.prompt(TOKENS + number, namespace(SPEC))


class Workload:
    """Threads that save, look up and load prompts at random."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.store, self._until = store, time.monotonic() + seconds
        self.slowest, self.loads, self.errors = 0.0, 0, list[BaseException]()

    def run(self, threads: int) -> None:
        running = [threading.Thread(target=self._work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not self.errors

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while time.monotonic() < self._until:
                began = time.monotonic()
                self._step(chance, chance.randrange(PROMPTS))
                self.slowest = max(self.slowest, time.monotonic() - began - BUDGET_S)
        except BaseException as error:
            self.errors.append(error)

    def _step(self, chance: random.Random, number: int) -> None:
        mine = prompt(self.store, number)
        if chance.random() < 0.4:
            self.store.save(mine, payload, budget_s=BUDGET_S)
        elif chance.random() < 0.5:
            self.store.lookup(mine, budget_s=BUDGET_S)
        else:
            until = time.monotonic() + BUDGET_S
            hit = self.store.lookup(mine, budget_s=BUDGET_S)
            left_s = max(0.0, until - time.monotonic())
            self.loads += self.store.load(hit, verify, budget_s=left_s) > 0


def check(directory: Path, faults: FaultLayer, seconds: float) -> None:
    store = opened(directory, near=True)
    faults.every = 12
    work = Workload(store, seconds)
    work.run(2)
    faults.every = 0
    assert sum(faults.injected.values()) > 0
    assert work.slowest < LATE_S + HANG_S
    store.close()
    check_reopened(directory)


def check_reopened(directory: Path) -> None:
    """Everything that is found is right, and everything can be kept again."""
    store = opened(directory, near=False)
    for number in range(PROMPTS):
        hit = store.lookup(prompt(store, number))
        assert store.load(hit, verify) == hit.position
        assert store.save(prompt(store, number), payload).dropped == 0
        assert store.load(store.lookup(prompt(store, number)), verify) == 1024
    disk = store.stats().tiers[0].tier
    assert (disk.used_bytes or 0) <= (disk.capacity_bytes or 0)
    store.close()


def test_a_disk_that_fails_and_hangs_by_turns_serves_nothing_wrong_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, FaultLayer(monkeypatch, 1), 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_disk_that_fails_and_hangs_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    check(tmp_path, FaultLayer(monkeypatch, 100 + seed), 30.0)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_kept_while_writes_failed_is_there_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    faults = FaultLayer(monkeypatch, seed)
    faults.errors = (errno.EIO,)  # on a full disk older prompts are evicted
    store = opened(tmp_path, near=False)
    kept = []
    for number in range(PROMPTS):
        faults.every, faults.kinds = 100, ("fail",)
        saved = store.save(prompt(store, number), payload)
        faults.every = 0
        if not saved.dropped and saved.stored:
            kept.append(number)
        time.sleep(0.01)
    assert faults.injected
    assert kept
    store.close()
    store = opened(tmp_path, near=False)
    for number in kept:
        assert store.load(store.lookup(prompt(store, number)), verify) == 1024, number
    store.close()

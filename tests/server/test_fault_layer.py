"""A daemon whose disk fails and hangs, by turns: nothing wrong is served, every call ends in time, it goes on."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvweave.server import Disk, RemoteStore
from kvweave.store import HashedPrompt
from tests.server.models import POINTS, prompt, serving, settings, store, verify
from tests.store.fault_layer import HANG_S, FaultLayer
from tests.store.models import truth

BUDGET_S = 0.3
LATE_S = 1.0
"""Beyond the budget: daemon, disk and clients share this process, and perhaps a busy machine."""
PROMPTS = 16


class Engine(threading.Thread):
    """Saves, looks up and loads at random; notes what went wrong, and how long a call took at most."""

    def __init__(self, client: RemoteStore, seed: int, seconds: float) -> None:
        super().__init__()
        self._client, self._chance, self._until = client, random.Random(seed), time.monotonic() + seconds
        self.slowest, self.error = 0.0, list[BaseException]()

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                began = time.monotonic()
                self._step(prompt(self._chance.randrange(PROMPTS)))
                self.slowest = max(self.slowest, time.monotonic() - began)
        except BaseException as error:
            self.error.append(error)

    def _step(self, mine: HashedPrompt) -> None:
        if self._chance.random() < 0.4:
            self._client.save(mine, truth, points=POINTS, budget_s=BUDGET_S)
        else:
            hit = self._client.lookup(mine, budget_s=BUDGET_S / 2)
            self._client.load(hit, verify, budget_s=BUDGET_S / 2)


def check(folder: Path, faults: FaultLayer, seconds: float) -> None:
    wish = settings(folder, disk=Disk(folder / "disk", 64 << 20), drain_s=5.0)
    with serving(wish):
        engines = [Engine(store(wish.socket), seed, seconds) for seed in range(2)]
        faults.every = 15
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.join()
        faults.every = 0
        assert [engine.error for engine in engines] == [[], []]
        assert max(engine.slowest for engine in engines) < BUDGET_S + HANG_S + LATE_S
        assert sum(faults.injected.values()) > 0
        for engine in engines:
            engine._client.close()
    with serving(wish):
        client = store(wish.socket)
        for number in range(PROMPTS):
            hit = client.lookup(prompt(number))
            assert client.load(hit, verify) == hit.position
            assert client.save(prompt(number), truth, points=POINTS).dropped == 0
            assert client.load(client.lookup(prompt(number)), verify) == 1024
        client.close()


def test_a_daemon_withstands_a_disk_that_fails_and_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, FaultLayer(monkeypatch, 7), 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_daemon_withstands_it_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    check(tmp_path, FaultLayer(monkeypatch, 70 + seed), 30.0)

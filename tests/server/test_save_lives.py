"""Saves of several engines in disorder, some killed in the middle of one: no byte is wrong, nothing stays behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.server import Daemon, RemoteStore
from kvweave.server.settings import Limits
from tests.server.models import POINTS, SCHEMA, prompt, prompt_bytes, serving, settings, store, verify
from tests.server.test_staged import TOKENS, engine
from tests.store.models import fill, truth

PROMPTS = 12


class Engine:
    """A store of its own, over pages that are reached through staging memory."""

    def __init__(self, socket: Path) -> None:
        self.store: RemoteStore = store(socket)
        self._made, self._pages, _ = engine()
        fill(SCHEMA, self._made, TOKENS // SCHEMA.chunk_tokens)

    def save(self, number: int) -> None:
        self.store.save(prompt(number), self._pages.source(self._made.table), points=POINTS)

    def load(self, number: int) -> None:
        self.store.load(self.store.lookup(prompt(number)), verify)  # which compares every byte


def books_balance(daemon: Daemon) -> bool:
    """Whether every byte of the arena is free or an entry's, and none is reserved."""
    arena = daemon.state.arena
    used = int(arena._catalog.sizes[[*arena._catalog.slot_of.values()]].sum())
    return not arena._writing and used + arena._extents.free_bytes == arena._extents.capacity


def killed_in_a_save(socket: Path, number: int, after_s: float) -> None:
    """A process that saves again and again, and is killed some time after its first save."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            one = Engine(socket)
            while True:
                one.save(number)
                os.write(writing, b"saved")
                number += 1
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 1), "it ended by itself"
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)


@pytest.mark.parametrize("steps", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_savers_killed_at_random_moments_leave_nothing_behind_and_no_wrong_byte(tmp_path: Path, steps: int) -> None:
    chance, limits = random.Random(steps), replace(Limits(), reserve_share=0.5)
    with serving(settings(tmp_path, memory=4 * prompt_bytes(), limits=limits, lease_s=2.0)) as daemon:
        engines, plain = [Engine(daemon.settings.socket) for _ in range(3)], store(daemon.settings.socket)
        for _ in range(steps):
            number, one = chance.randrange(PROMPTS), chance.choice(engines)
            what = chance.choice(["save", "save", "load", "plain", "threads", "kill", "close"])
            if what == "save":
                one.save(number)
            elif what == "load":
                one.load(number)
            elif what == "plain":
                plain.save(prompt(number), truth, points=POINTS)
            elif what == "threads":
                both = [threading.Thread(target=each.save, args=(number + i,)) for i, each in enumerate(engines[:2])]
                for thread in both:
                    thread.start()
                for thread in both:
                    thread.join(60)
            elif what == "kill":
                killed_in_a_save(daemon.settings.socket, number, chance.random() * 0.02)
            else:
                one.store.close()  # its next call connects again
        assert daemon.state.counts["memory damaged"] == 0
        assert daemon.state.arena._evicted > 0, "memory was never short"
        for number in range(PROMPTS):
            engines[0].load(number)
        for each in engines:
            each.store.close()
        plain.close()
        until = time.monotonic() + 10
        while not books_balance(daemon) and time.monotonic() < until:
            time.sleep(0.01)
        assert books_balance(daemon)

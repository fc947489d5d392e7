"""kill -9 at random moments, of writers and of the daemon: nothing wrong is served, nothing leaks, nothing that was
committed to disk is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.errors import ServerError
from kvweave.server import Client, Disk, RemoteStore, Settings, protocol
from kvweave.server.run import run
from tests.server.models import SCHEMA, prompt, prompt_bytes, settings, store, verify
from tests.store.models import truth

POINTS = [512]
RECENT = 12


def forked_daemon(wish: Settings) -> int:
    child = os.fork()
    if not child:
        try:
            run(wish)
        finally:
            os._exit(0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            Client(wish.socket, arena=False).close()
        except ServerError:
            time.sleep(0.005)
        else:
            return child
    raise AssertionError("the daemon does not answer")


@contextmanager
def daemon_process(wish: Settings) -> Iterator[int]:
    child = forked_daemon(wish)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def writer(socket: Path, first: int, report: int) -> None:
    """Saves prompt after prompt and reports what was acknowledged; checks now and then what it finds; never returns."""
    client = store(socket, workers=1)
    for number in range(first, first + 10_000):
        if client.save(prompt(number), truth, points=POINTS).dropped:
            continue
        os.write(report, number.to_bytes(8, "little"))
        hit = client.lookup(prompt(number - number % 3))
        if number % 2:
            client.load(hit, verify)


def killed_writer(socket: Path, first: int, seconds: float) -> list[int]:
    """What a writer had reported when it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            writer(socket, first, writing)
        finally:
            os.write(writing, (2**40).to_bytes(8, "little"))  # it found something wrong
            os._exit(1)
    os.close(writing)
    heard = os.read(reading, 8)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(reading, 1 << 16):
        heard += piece
    os.close(reading)
    return [int.from_bytes(heard[at : at + 8], "little") for at in range(0, len(heard), 8)]


def check_writers(folder: Path, times: int) -> None:
    chance, first = random.Random(times), 0
    wish = settings(folder, memory=(RECENT + 8) * prompt_bytes(), disk=Disk(folder / "disk", 64 << 20))
    with daemon_process(wish):
        mine = store(wish.socket, workers=1)
        for _ in range(times):
            done = killed_writer(wish.socket, first, chance.uniform(0, 0.04))
            assert max(done) < 2**40, "a writer saw something wrong"
            alone(mine)
            for number in done[-RECENT:]:
                assert_found(mine, number)
            half = mine.lookup(prompt(max(done) + 1))  # it was in the middle of this one
            assert mine.load(half, verify) == half.position
            first = max(done) + 2
            clear_when_half_full(mine)
        mine.client.ask(protocol.Clear(), protocol.ClearReply)
        mine.flush()
        assert [tier.tier.used_bytes for tier in mine.report().tiers] == [0, 0]
        mine.close()


def alone(mine: RemoteStore) -> None:
    """Until the daemon noticed that the others are dead; then nobody holds anything."""
    until = time.monotonic() + 10
    while len(mine.report().clients) > 1:
        assert time.monotonic() < until
        time.sleep(0.002)
    (me,) = mine.report().clients
    assert (me.leases, me.leased_bytes, me.reserved_bytes) == (0, 0, 0)


def assert_found(mine: RemoteStore, number: int) -> None:
    """A lookup and a load that all tiers answered in time find it: one that was not answered says nothing."""
    before = unanswered(mine)
    position = mine.load(mine.lookup(prompt(number)), verify)
    while position != 512 and unanswered(mine) != before:
        before = unanswered(mine)
        position = mine.load(mine.lookup(prompt(number)), verify)
    assert position == 512, mine.stats()


def unanswered(mine: RemoteStore) -> int:
    stats = mine.stats()
    return stats.unanswered + sum(tier.late for tier in stats.tiers)


def clear_when_half_full(mine: RemoteStore) -> None:
    """A disk that overflows for the first time evicts what was never hit before what was, however recent it is: then
    prompts that were acknowledged just now would rightly be missing."""
    disk = mine.stats().tiers[1].tier
    assert not disk.evicted
    if (disk.used_bytes or 0) > (disk.capacity_bytes or 0) // 2:
        mine.client.ask(protocol.Clear(), protocol.ClearReply)


def check_daemons(folder: Path, times: int) -> None:
    chance, number, kept = random.Random(times), 0, list[int]()
    wish = settings(folder, memory=8 * prompt_bytes(), disk=Disk(folder / "disk", 64 << 20))
    client = None
    for _ in range(times):
        with daemon_process(wish) as child:
            client = client or RemoteStore(SCHEMA, Client(wish.socket, cool_s=0.0), workers=1)
            for earlier in kept[-RECENT:]:
                assert_found(client, earlier)
            before = client.unreachable
            killer = threading.Timer(chance.uniform(0, 0.12), os.kill, (child, signal.SIGKILL))
            killer.start()
            while client.unreachable == before:
                saved = client.save(prompt(number), truth, points=POINTS)
                if saved.dropped == 0 and number % 3 == 0 and client.flush():
                    kept.append(number)
                number += 1
            killer.join()
    assert client is not None
    assert len(kept) > times // 20
    with daemon_process(wish):
        for earlier in kept[-RECENT:]:
            assert_found(client, earlier)
        client.client.ask(protocol.Clear(), protocol.ClearReply)
        assert [tier.tier.used_bytes for tier in client.report().tiers] == [0, 0]
        client.close()


def test_writers_killed_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    check_writers(tmp_path, 20)


def test_daemons_killed_at_random_moments_serve_again_what_was_on_disk(tmp_path: Path) -> None:
    check_daemons(tmp_path, 20)


@pytest.mark.slow
def test_two_hundred_writers_killed(tmp_path: Path) -> None:
    check_writers(tmp_path, 200)


@pytest.mark.slow
def test_two_hundred_daemons_killed(tmp_path: Path) -> None:
    check_daemons(tmp_path, 200)

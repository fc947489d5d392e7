"""A disk that hangs holds up nobody who does not need it: memory hits, metrics, new connections, the stop."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.server import Client, Daemon, Disk, Settings, protocol
from kvweave.server.connection import AHEAD_BYTES
from kvweave.store import DiskTier
from kvweave.store.journal import FileJournal
from kvweave.store.reopening_tier import ReopeningTier
from tests.server.models import POINTS, prompt, serving, settings, store, verify
from tests.server.test_leases import until
from tests.store.models import truth


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until this is set, disks hang in the middle of a journal write."""
    event, real = threading.Event(), FileJournal.added

    def added(self: FileJournal, key: bytes, start: int, length: int) -> None:
        assert event.wait(60)
        real(self, key, start, length)

    monkeypatch.setattr(FileJournal, "added", added)
    yield event
    event.set()


def wish(folder: Path) -> Settings:
    return settings(folder, disk=Disk(folder / "disk", 64 << 20), http="127.0.0.1:0", drain_s=1.0)


def hang(daemon: Daemon) -> None:
    """Save something, and wait until the disk hangs in it."""
    client = store(daemon.settings.socket)
    client.save(prompt(0), truth, points=POINTS)
    tier = daemon.state.backing.executors[0].tier
    assert isinstance(tier, ReopeningTier)
    assert isinstance(tier._tier, DiskTier)
    lock = tier._tier._journal_lock
    until(lambda: is_held(lock))
    client.close()


def is_held(lock: threading.Lock) -> bool:
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def page(daemon: Daemon, path: str) -> str:
    reply: bytes = urllib.request.urlopen(f"http://127.0.0.1:{daemon.ports[0]}{path}", timeout=5).read()
    return reply.decode()


def test_metrics_health_and_memory_hits_go_on_while_a_disk_hangs(tmp_path: Path, go_on: threading.Event) -> None:
    with serving(wish(tmp_path)) as daemon:
        hang(daemon)
        for _ in range(3):
            assert 'kvweave_tier_entries{tier="disk"}' in page(daemon, "/metrics")
        assert page(daemon, "/health") == "ok\n"
        other = store(daemon.settings.socket)  # a new connection
        assert other.load(other.lookup(prompt(0), budget_s=5), verify, budget_s=5) == 1024
        assert other.describe(budget_s=5).tiers[1].name == "disk"
        assert other.stats(budget_s=5).tiers[1].tier.capacity_bytes == 64 << 20
        other.close()
        assert not go_on.is_set()


def test_prompts_on_disk_are_found_and_loaded_while_a_journal_write_hangs(
    tmp_path: Path, go_on: threading.Event
) -> None:
    with serving(wish(tmp_path)) as daemon:
        go_on.set()
        client = store(daemon.settings.socket)
        client.save(prompt(1), truth, points=POINTS)
        assert client.flush()
        daemon.state.arena.clear()
        go_on.clear()
        hang(daemon)
        for _ in range(5):
            assert client.load(client.lookup(prompt(1), budget_s=1), verify, budget_s=5) == 1024
        assert client.stats().unanswered == daemon.report().unanswered == 0
        client.close()
        assert not go_on.is_set()
        go_on.set()


def test_a_daemon_whose_disk_hangs_stops_in_time(tmp_path: Path, go_on: threading.Event) -> None:
    with serving(wish(tmp_path)) as daemon:
        hang(daemon)
        began = time.monotonic()
    assert time.monotonic() - began < 10, "it drains for 1 s"
    assert daemon.is_stuck
    assert not go_on.is_set()


def test_flushes_that_wait_do_not_keep_the_daemon_from_stopping(tmp_path: Path, go_on: threading.Event) -> None:
    with serving(wish(tmp_path)) as daemon:
        hang(daemon)
        patient = [store(daemon.settings.socket) for _ in range(6)]
        flushes = [threading.Thread(target=each.flush, args=(50,)) for each in patient]
        for flush in flushes:
            flush.start()
        until(lambda: len(daemon._connections) >= 12)
        began = time.monotonic()
    assert time.monotonic() - began < 10, "it drains for 1 s"
    go_on.set()
    for flush in flushes:
        flush.join()
    for each in patient:
        each.close()


def test_flushes_that_wait_hold_up_no_other_and_leave_nothing_when_their_clients_go(
    tmp_path: Path, go_on: threading.Event
) -> None:
    with serving(wish(tmp_path)) as daemon:
        hang(daemon)
        patient = [Client(daemon.settings.socket, arena=False) for _ in range(8)]
        for each in patient:
            each.post(protocol.Flush(3600))
        with Client(daemon.settings.socket, arena=False) as other:
            assert other.ask(protocol.Flush(0.1), protocol.Done, 30).count == 0, "not drained, but answered"
        jobs = daemon.state.backing.executors[0]._jobs
        until(lambda: len(jobs._drains) == len(patient))
        for each in patient:
            each.close()
        until(lambda: not jobs._drains and not daemon._connections)
        with Client(daemon.settings.socket, arena=False) as other:
            other.post(protocol.Flush(3600))
            go_on.set()
            assert other.ask(protocol.Flush(60), protocol.Done, 60).count == 1


def test_a_client_that_ends_while_its_request_waits_gives_back_what_it_held(
    tmp_path: Path, go_on: threading.Event
) -> None:
    with serving(wish(tmp_path)) as daemon:
        hang(daemon)
        client = store(daemon.settings.socket)
        assert client.lookup(prompt(0)).position
        client.client.post(protocol.Flush(3600))
        until(lambda: bool(daemon.state.backing.executors[0]._jobs._drains))
        (connection,) = [each for each in daemon._connections if each.report().leases]
        client.client.post(protocol.Ping())
        until(lambda: connection._frames.num_bytes > 0)
        client.close()
        until(lambda: not daemon._connections and not daemon.state.leased.held_bytes)
        assert not go_on.is_set()


def test_while_a_request_waits_later_ones_are_read_up_to_a_bound_and_served_in_turn(
    tmp_path: Path, go_on: threading.Event
) -> None:
    with serving(wish(tmp_path)) as daemon, Client(daemon.settings.socket, arena=False) as client:
        hang(daemon)
        until(lambda: len(daemon._connections) == 1)
        later = [protocol.Release(list(range(1 << 14))) for _ in range(100)]
        (connection,) = daemon._connections
        replies: list[object] = []
        asking = threading.Thread(
            target=lambda: replies.extend(client.exchange([protocol.Flush(60), *later], 60).replies)
        )
        asking.start()
        until(lambda: connection._transport is not None and not connection._transport.is_reading())
        assert AHEAD_BYTES < connection._frames.num_bytes < len(protocol.frame(later[0], 1)) * len(later) / 2
        go_on.set()
        asking.join()
        assert replies == [protocol.Done(1), *[protocol.Done(0)] * len(later)]

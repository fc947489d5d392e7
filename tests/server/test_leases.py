"""Leases: what a client holds goes back when it dies, is stopped or takes too long; nobody is served a half."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import LeaseExpired
from kvweave.server import Client, Daemon, Disk, Limits, RemoteStore, protocol
from kvweave.server.protocol import numbers, packed
from kvweave.store import Saved, Shard
from kvweave.store.blob import blob_bytes, seal
from kvweave.store.keys import Bytes
from kvweave.store.tier import joined
from tests.server.models import LARGEST, POINTS, SCHEMA, prompt, prompt_bytes, serving, settings, spawned, store, verify
from tests.server.test_save_lives import books_balance
from tests.store.models import truth

ALL = packed([(shard, 3) for shard in range(len(SCHEMA.shards))], "<i4")


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def used(daemon: Daemon) -> int:
    return daemon.report().tiers[0].tier.used_bytes or 0


def reserved(socket: Path, number: int = 0) -> tuple[Client, list[int]]:
    """A client that holds places for the last chunk of a prompt, and has written nothing."""
    client = Client(socket)
    mine = RemoteStore(SCHEMA, client)
    reply, _ = mine._prompt_session.ask(prompt(number), lambda sequence: protocol.Reserve(sequence, 7777, ALL))
    return client, numbers(client.check(reply, protocol.Places).starts).tolist()


def test_places_are_given_back_when_their_client_goes(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, starts = reserved(tmp_path / "kv.sock")
        assert min(starts) >= 0
        assert used(daemon) > 0
        client.close()
        until(lambda: used(daemon) == 0)
        assert daemon.report().returned == 1


def test_a_reservation_under_a_number_that_is_taken_is_refused_and_leaks_nothing(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, _ = reserved(tmp_path / "kv.sock")
        mine, other = RemoteStore(SCHEMA, client), packed([(0, 0)], "<i4")
        reply, _ = mine._prompt_session.ask(prompt(), lambda sequence: protocol.Reserve(sequence, 7777, other))
        assert isinstance(reply, protocol.Failed)
        client.close()
        until(lambda: used(daemon) == 0)


def test_what_was_written_but_not_committed_is_never_seen(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, starts = reserved(tmp_path / "kv.sock")
        keys = prompt().keys(SCHEMA.ids)[-len(SCHEMA.shards) :]
        for shard, key, start in zip(SCHEMA.shards, keys, starts, strict=True):  # whole and sealed, but nobody said so
            blob = joined(seal(shard, 3, key, truth(shard, 3)))
            client.arena[start : start + len(blob)] = np.frombuffer(blob, np.uint8)
        other = store(tmp_path / "kv.sock")
        assert not other.lookup(prompt()).present.any()
        client.close()
        until(lambda: used(daemon) == 0)
        assert not other.lookup(prompt()).present.any()
        other.close()


def test_a_place_that_is_being_written_is_not_given_to_a_second_writer(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client, _ = reserved(tmp_path / "kv.sock")
        other = store(tmp_path / "kv.sock")
        saved = other.save(prompt(), truth)
        assert (saved.present, saved.dropped) == (0, len(SCHEMA.shards))  # those of the last chunk are somebody's
        assert other.lookup(prompt()).position == 0
        client.close()
        until(lambda: other.save(prompt(), truth).stored == len(SCHEMA.shards))
        assert other.load(other.lookup(prompt()), verify) == 1024
        other.close()


def test_what_a_killed_client_was_writing_is_written_by_the_other_that_saves_it(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client, _ = reserved(tmp_path / "kv.sock")
        other = store(tmp_path / "kv.sock")
        killer = threading.Timer(0.1, client.close)
        killer.start()
        assert other.save(prompt(), truth).dropped == 0  # acknowledged: it must be found
        killer.join()
        assert other.load(other.lookup(prompt()), verify) == 1024
        other.close()


@pytest.mark.parametrize("ends", ["commit", "abandon"])
def test_what_is_on_disk_is_loaded_while_another_client_writes_it_again(tmp_path: Path, ends: str) -> None:
    with serving(settings(tmp_path, memory=8 * prompt_bytes(), disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        writer, reader = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        assert writer.save(prompt(), truth, points=POINTS).dropped == 0
        assert writer.flush()
        daemon.state.arena.clear()
        gathered = writer.gather(prompt(), truth, points=POINTS)  # it may stop here, for as long as its lease
        assert gathered.failed == ()
        began = time.monotonic()
        assert reader.load(reader.lookup(prompt()), verify) == 1024
        assert time.monotonic() - began < 10, "it waited for the lease of another"
        getattr(gathered, ends)()
        assert reader.load(reader.lookup(prompt()), verify) == 1024
        writer.close()
        reader.close()
        until(lambda: books_balance(daemon))


def test_what_others_are_writing_is_waited_for_no_longer_than_the_budget(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client, _ = reserved(tmp_path / "kv.sock")
        other = store(tmp_path / "kv.sock")
        operation = other.submit_save(prompt(), truth, budget_s=0.1)
        began = time.monotonic()
        assert operation.result().dropped == len(SCHEMA.shards)
        assert time.monotonic() - began < 5, "it waited for the lease of another"
        client.close()
        other.close()


def test_a_commit_after_the_lease_is_told_so_and_shows_nothing(tmp_path: Path) -> None:
    with serving(settings(tmp_path, lease_s=0.2)) as daemon:
        client, _ = reserved(tmp_path / "kv.sock")
        until(lambda: used(daemon) == 0)
        with pytest.raises(LeaseExpired, match="nothing became visible"):
            client.ask(protocol.Commit(7777), protocol.Done)
        assert daemon.report().expired == 1
        client.close()


def test_a_slow_source_costs_its_own_save_only(tmp_path: Path) -> None:
    def slow(shard: Shard, chunk: int) -> Bytes:
        time.sleep(0.02)
        return truth(shard, chunk)

    with serving(settings(tmp_path, lease_s=0.2)) as daemon:
        client = store(tmp_path / "kv.sock")
        saved = client.save(prompt(), slow, points=POINTS)
        assert saved.dropped > 0
        assert client.load(client.lookup(prompt()), verify) == client.lookup(prompt()).position
        client.close()
        until(lambda: all(each.leases == 0 for each in daemon.report().clients))


def test_a_source_that_raises_gives_its_places_back(tmp_path: Path) -> None:
    def broken(shard: Shard, chunk: int) -> Bytes:
        raise RuntimeError("no such page")

    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        with pytest.raises(RuntimeError, match="no such page"):
            client.save(prompt(), broken)
        until(lambda: used(daemon) == 0)
        assert client.save(prompt(), truth).dropped == 0
        client.close()


def test_what_is_under_lease_is_never_evicted(tmp_path: Path) -> None:
    room = 3 * prompt_bytes()
    with serving(settings(tmp_path, memory=room)) as daemon:
        reader, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        reader.save(prompt(0), truth, points=POINTS)
        hit = reader.lookup(prompt(0))
        for number in range(1, 12):
            assert writer.save(prompt(number), truth, points=POINTS).dropped == 0
        assert daemon.report().tiers[0].tier.evicted > 0
        places = hit.places.copy()
        assert reader.load(hit, verify) == 1024
        assert (places == hit.places).all()
        for number in range(12, 20):
            writer.save(prompt(number), truth, points=POINTS)
        assert reader.lookup(prompt(0)).position == 0  # released, it went like all others
        reader.close()
        writer.close()


def test_a_read_after_the_lease_is_a_miss_and_never_wrong(tmp_path: Path) -> None:
    half = Limits(lease_share=0.5)
    with serving(settings(tmp_path, memory=2 * prompt_bytes(), lease_s=0.2, limits=half)) as daemon:
        reader, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        reader.save(prompt(0), truth, points=POINTS)
        hit = replace(reader.lookup(prompt(0)), until=float("inf"))  # a client that does not look at its watch
        until(lambda: daemon.report().expired == 1)
        for number in range(1, 9):
            writer.save(prompt(number), truth, points=POINTS)
        assert reader.load(hit, verify) == 0
        assert reader.save(prompt(0), truth, points=POINTS).dropped == 0
        assert reader.load(reader.lookup(prompt(0)), verify) == 1024
        reader.close()
        writer.close()


def test_pieces_that_are_fetched_again_under_a_lease_are_held_once(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        held = []
        for _ in range(20):
            client._prompt_session.ask(prompt(), lambda sequence: protocol.Fetch(sequence, 7, ALL))
            held.append(daemon.report().clients[0].leased_bytes)
        assert {*held} == {held[0]}
        assert daemon.state.arena._catalog.pins.max() == 1
        assert client.client.ask(protocol.Release([7]), protocol.Done).count == 1
        assert not daemon.state.arena._catalog.pins.any()
        client.close()


def test_many_lookups_of_a_prompt_hold_one_lease(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth)
        for _ in range(10):
            hit = client.lookup(prompt())
        assert [each.leases for each in daemon.report().clients] == [1]
        client.release(hit)
        client.release(hit)
        assert [each.leases for each in daemon.report().clients] == [0]
        client.close()


def test_a_client_that_is_stopped_past_its_lease_gives_back_what_it_held(tmp_path: Path) -> None:
    with spawned(tmp_path / "kv.sock", "--memory", f"{5 * prompt_bytes()}", "--lease", "0.3"):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, f"{stopped_in_the_middle(tmp_path / 'kv.sock')}".encode())
            finally:
                os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        mine = store(tmp_path / "kv.sock")
        theirs = next(each for each in mine.report().clients if each.pid == child)
        assert (theirs.leased_bytes > 0, theirs.reserved_bytes > 0) == (True, True)
        until(lambda: mine.report().expired >= 2)
        theirs = next(each for each in mine.report().clients if each.pid == child)
        assert (theirs.leases, theirs.leased_bytes, theirs.reserved_bytes) == (0, 0, 0)
        for number in range(10, 19):  # all of the arena can be used
            assert mine.save(prompt(number), truth, points=POINTS).dropped == 0
        os.kill(child, signal.SIGCONT)
        assert os.read(reading, 100) == b"(0, Saved(stored=0, present=0, dropped=16))"
        os.waitpid(child, 0)
        for number in (17, 18):  # and what it wrote when it woke up was served to nobody
            hit = mine.lookup(prompt(number))
            assert mine.load(hit, verify) <= hit.position
        mine.close()


def stopped_in_the_middle(socket: Path) -> tuple[int, Saved]:
    """Holds a lease and places, is stopped by its own hand, and goes on as if nothing had happened."""
    client = store(socket, workers=1)
    client.save(prompt(0), truth, points=POINTS)
    hit = client.lookup(prompt(0))
    stopped = threading.Event()

    def source(shard: Shard, chunk: int) -> Bytes:
        if not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGSTOP)
        return truth(shard, chunk)

    saved = client.save(prompt(1), source, points=[1024], shards=range(4))
    return client.load(hit, verify), saved


def test_a_blob_larger_than_the_arena_is_dropped_with_a_word(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=LARGEST - 4096)) as daemon:
        client = store(tmp_path / "kv.sock")
        largest = [number for number, shard in enumerate(SCHEMA.shards) if blob_bytes(shard) == LARGEST]
        assert client.save(prompt(), truth, shards=largest[:1], points=[256]) == Saved(dropped=1)
        assert used(daemon) == 0
        client.close()


def test_what_is_posted_while_another_thread_asks_is_sent_without_a_later_request(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        hit, is_held = client.lookup(prompt()), threading.Event()

        def hold() -> None:
            with client.client._lock:
                is_held.set()
                time.sleep(0.005)

        thread = threading.Thread(target=hold)
        thread.start()
        is_held.wait()
        client.client.post(protocol.Release([hit.lease]))
        thread.join()
        until(lambda: all(each.leases == 0 for each in daemon.report().clients))
        client.close()


def test_what_was_evicted_after_its_lease_is_fetched_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk", 64 << 20)
    with serving(settings(tmp_path, memory=4 * prompt_bytes(), disk=disk, lease_s=0.3)) as daemon:
        reader, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        assert writer.save(prompt(), truth, points=POINTS).dropped == 0
        hit = reader.lookup(prompt())
        assert hit.lease
        until(lambda: daemon.report().clients[0].leases == 0 == daemon.report().clients[1].leases)
        assert writer.flush()
        daemon.state.arena.clear()
        for number in range(1, 6):
            while writer.save(prompt(number), truth, points=POINTS).dropped:
                continue  # a busy machine took longer than places are lent
        assert reader.load(hit, verify) == 1024
        reader.close()
        writer.close()


def test_a_pin_stays_though_more_is_fetched_under_its_lease(tmp_path: Path) -> None:
    with serving(settings(tmp_path, lease_s=0.2)) as daemon:
        client = store(tmp_path / "kv.sock")
        for number in range(2):
            client.save(prompt(number), truth, points=POINTS)
        pin = client.pin(client.lookup(prompt(0), lease=False))
        client._prompt_session.ask(prompt(1), lambda sequence: protocol.Fetch(sequence, pin.lease, ALL))
        time.sleep(0.4)
        assert client.client.ask(protocol.PinLeases([pin.lease]), protocol.Alive).leases == [pin.lease]
        assert daemon.report().expired == 0
        client.close()

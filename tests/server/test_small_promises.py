"""What a daemon and its clients say of themselves is true: pins, prefetches, counts, logs."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import LeaseExpired, OperationCancelled, ServerGone
from kvweave.server import Client, Disk, Limits, RemoteStore, protocol
from kvweave.server.protocol import DIGEST, VERSION, frame
from kvweave.store import Shard
from kvweave.store.keys import Bytes
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, store, verify
from tests.store.models import truth


class Reusing:
    """A source that hands out one buffer again and again, read-only or not, and is slow to fill it."""

    def __init__(self, *, writable: bool) -> None:
        self._memory = np.empty(max(shard.payload_bytes for shard in SCHEMA.shards), np.uint8)
        self._writable = writable

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        payload = truth(shard, chunk)
        self._memory[: len(payload)] = payload
        view = self._memory[: len(payload)]
        view.flags.writeable = self._writable
        return view


@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
def test_a_source_may_use_its_memory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    monkeypatch.setattr("kvweave.server.arena_copier.THREADED_BYTES", 1)
    import kvweave.server.arena_writer as writing

    real = writing.write

    def slow(*job: object) -> bool:
        time.sleep(0.002)  # the source is asked again meanwhile
        return real(*job)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "write", slow)
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))):
        client = store(tmp_path / "kv.sock", workers=2)
        assert client.save(prompt(0), Reusing(writable=writable), points=POINTS).dropped == 0
        assert client.load(client.lookup(prompt(0)), verify) == 1024
        client.close()


def test_a_pin_whose_lease_is_over_is_an_error_and_not_a_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path, lease_s=0.1)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        hit, real = client.lookup(prompt(0)), client.client.ask

        def late(request: protocol.Message, *more: object) -> object:
            if isinstance(request, protocol.PinLeases):
                time.sleep(0.5)
            return real(request, *more)  # type: ignore[arg-type]

        monkeypatch.setattr(client.client, "ask", late)
        with pytest.raises(LeaseExpired, match="nothing is pinned"):
            client.pin(hit)
        monkeypatch.undo()
        assert client.pin(client.lookup(prompt(1))).position == 0  # a hit of nothing
        assert client.pin(client.lookup(prompt(0))).position == 1024
        client.close()


def test_a_prefetch_maps_no_arena_and_means_what_cancel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        monkeypatch.setattr("kvweave.server.client.map_arena", None)  # whoever maps one fails
        assert client.prefetch(client.lookup(prompt(0))).result(10) == 1024
        cancelled = client.prefetch(client.lookup(prompt(0)))
        if cancelled.cancel():  # it may be done by then, or notice too late
            with suppress(OperationCancelled):
                assert cancelled.result(10) == 1024
        client.close()


def test_a_connection_made_anew_keeps_the_mapped_arena(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = Client(tmp_path / "kv.sock")
        arena = client.arena
        for connection in [*daemon._connections]:
            daemon.state._loop.call_soon_threadsafe(connection.close)  # type: ignore[union-attr]
        generation = client.generation
        client.ask(protocol.Ping(), protocol.Done)
        until = time.monotonic() + 5
        while client.generation == generation and time.monotonic() < until:
            client.ask(protocol.Ping(), protocol.Done)
        assert client.generation > generation
        assert client.arena is arena
        client.close()


def test_a_client_that_hangs_up_is_no_bug_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(settings(tmp_path)) as daemon, caplog.at_level(logging.ERROR, "kvweave.server"):
        for with_arena in (True, False):
            for _ in range(50):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect(str(daemon.settings.socket))
                    raw.sendall(
                        frame(protocol.Hello(VERSION, DIGEST, "", "", with_arena))
                        + frame(protocol.StatsRequest(), 1) * 5
                    )
        client = store(tmp_path / "kv.sock")
        client.lookup(prompt(0))
        client.close()
    assert not caplog.records


def test_a_lookup_that_finds_nothing_is_a_miss_in_every_tier(tmp_path: Path) -> None:
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        client = store(tmp_path / "kv.sock")
        needed = sum(len([*shard.needs(1024)]) for shard in SCHEMA.shards)
        client.lookup(prompt(0))
        assert [tier.misses for tier in daemon.report().tiers] == [needed, needed]
        client.save(prompt(0), truth, points=POINTS)
        client.load(client.lookup(prompt(0)), verify)
        assert [tier.misses for tier in daemon.report().tiers] == [needed, needed], "and a hit is none"
        client.close()


def test_what_was_cleared_is_not_among_the_prefixes_used_most(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        for tenant in ("a", "b"):
            client.save(prompt(0, tenant), truth, points=POINTS)
            client.lookup(prompt(0, tenant))
        assert len(daemon.report().prefixes) == 2
        from kvweave.store.keys import tenant_id

        client.client.ask(protocol.Clear(tenant_id("a")), protocol.ClearReply)
        assert len(daemon.report().prefixes) == 1
        client.client.ask(protocol.Clear(None, "hybrid"), protocol.ClearReply)
        assert daemon.report().prefixes == ()
        client.close()


def test_what_the_daemon_refuses_is_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(settings(tmp_path, limits=Limits(keys=5))), caplog.at_level(logging.WARNING, "kvweave.server"):
        client = store(tmp_path / "kv.sock")
        for number in range(3):
            assert client.lookup(prompt(number)).position == 0
        assert client.unreachable == 3
        refusals = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
        assert len(refusals) == 1
        assert "keys" in refusals[0]
        client.close()


def test_a_flush_that_failed_does_not_forget_what_was_saved_before(tmp_path: Path) -> None:
    wish = settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))
    with serving(wish):
        client = store(wish.socket)
        client.save(prompt(0), truth, points=POINTS)
    assert not client.flush(1), "nobody is there"
    with serving(wish):
        until = time.monotonic() + 10
        while client.lookup(prompt(0)).position != 1024 and time.monotonic() < until:
            time.sleep(0.05)
        assert not client.flush(5), "that daemon may have died with it"
        assert client.flush(5)
        client.close()


def test_calls_to_a_closed_store_are_misses_and_make_no_connection(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        assert client.save(prompt(), truth).dropped == 0
        hit = client.lookup(prompt())
        client.submit_load(hit, verify).result(30)  # over a connection of its own
        client.close()
        assert client.lookup(prompt()).position == 0
        assert client.load(hit, verify) == 0
        assert client.save(prompt(1), truth).stored == 0
        assert client.gather(prompt(1), truth).commit().stored == 0
        assert client.stats().tiers == ()
        until = time.monotonic() + 30
        while daemon._connections and time.monotonic() < until:
            time.sleep(0.01)
        assert not daemon._connections


@pytest.mark.parametrize("model", ["/models/" + "m" * 300 + "/snapshot", "\udcff of a file system"])
def test_a_model_may_have_any_name(tmp_path: Path, model: str) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = RemoteStore(SCHEMA, tmp_path / "kv.sock", model=model)
        assert client.save(prompt(), truth).dropped == 0
        (found,) = daemon.report().models
        assert found.model[-9:] == model[-9:]
        assert client.describe().models[0].model == found.model
        client.close()


def test_leases_of_hits_that_could_not_be_used_are_released(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth)
        failing = client.submit_lookup([prompt()], then=lambda hit: hit.position // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(30)
        assert sum(each.leases for each in client.report().clients) == 0
        client.close()


@pytest.mark.parametrize("address", ["..:9400", "x" * 100 + ":9400", "/tmp/no such place:9400"])
def test_an_address_where_nobody_can_be_is_one_error(address: str) -> None:
    with pytest.raises(ServerGone, match="no daemon at"):
        Client(address)


def test_a_socket_may_have_a_colon_and_a_number_in_its_name(tmp_path: Path) -> None:
    with serving(replace(settings(tmp_path), socket=tmp_path / "kv:1")), Client(str(tmp_path / "kv:1")) as client:
        client.ask(protocol.Ping(), protocol.Done)

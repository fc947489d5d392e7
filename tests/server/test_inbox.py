"""Inboxes: clients that cannot write to the arena save all the same, and nothing but what they say they do."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import BadRequest, ConfigError, LeaseExpired
from kvweave.server import Client, Daemon, RemoteStore, Settings, protocol
from kvweave.server.arena_copier import ArenaCopier
from kvweave.server.channel import Channel
from kvweave.server.inbox import Inbox, inbox_starts
from kvweave.server.protocol import DIGEST, VERSION, packed
from kvweave.store import Saved
from tests.server.models import LARGEST, POINTS, prompt, prompt_bytes, serving, settings, store, verify
from tests.server.test_leases import until
from tests.server.test_operations import TestBehindADaemon as DaemonContract
from tests.store.models import truth

INBOX = 32 << 10


class TestBehindInboxes(DaemonContract):
    @pytest.fixture
    def daemon(self, tmp_path: Path) -> Iterator[Daemon]:
        with serving(settings(tmp_path, inbox=1 << 20)) as daemon:
            self.served = daemon
            yield daemon


def held(daemon: Daemon) -> bool:
    return daemon.state.arena.is_held


def wait_until(happens: threading.Event) -> None:
    assert happens.wait(10)


def test_the_arena_cannot_be_written_by_who_was_passed_it(tmp_path: Path) -> None:
    with serving(settings(tmp_path, inbox=INBOX)) as daemon:
        here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here.connect(str(daemon.settings.socket))
        welcome, descriptors = Channel(here).greet(protocol.Hello(VERSION, DIGEST), time.monotonic() + 5)
        arena, _, inbox = descriptors
        with pytest.raises(PermissionError):
            mmap.mmap(arena, welcome.arena_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(arena, b"forged", 0)
        for descriptor in (arena, inbox):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 4096)
        mmap.mmap(inbox, welcome.inbox_bytes)[:6] = b"my own"
        here.close()
        for descriptor in descriptors:
            os.close(descriptor)


def test_what_is_saved_through_inboxes_smaller_than_a_prompt_is_loaded_by_others(tmp_path: Path) -> None:
    assert inbox_starts([LARGEST])[-1] <= INBOX < prompt_bytes()
    with serving(settings(tmp_path, inbox=INBOX)) as daemon:
        writer, reader = store(daemon.settings.socket), store(daemon.settings.socket)
        assert writer.client.welcome.inbox_bytes == INBOX == writer.describe().inbox_bytes
        assert not writer.client.arena.flags.writeable
        assert writer.save(prompt(), truth, points=POINTS).dropped == 0
        assert reader.load(reader.lookup(prompt()), verify) == 1024
        assert reader.save(prompt(), truth, points=POINTS).stored == 0
        writer.close()
        reader.close()


def test_threads_that_share_an_inbox_do_not_mix_their_payloads(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=16 << 20, inbox=INBOX)) as daemon:
        client, saved = store(daemon.settings.socket), list[Saved]()

        def work(number: int) -> None:
            saved.append(client.save(prompt(number), truth, points=POINTS))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.dropped for each in saved] == [0] * 6
        for number in range(6):
            assert client.load(client.lookup(prompt(number)), verify) == 1024
        assert daemon.state.counts["memory damaged"] == 0
        client.close()


def test_a_blob_that_is_not_what_its_key_says_never_becomes_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings(tmp_path, inbox=INBOX)) as daemon:
        client, real = store(daemon.settings.socket), ArenaCopier.writes

        def forging(self: ArenaCopier, batches: Any, source: Any) -> Any:
            for batch, fine in real(self, batches, source):
                batch.jobs[-1].place[4100] ^= 1
                yield batch, fine

        monkeypatch.setattr(ArenaCopier, "writes", forging)
        saved = client.save(prompt(), truth, points=[256])
        assert (saved.stored, saved.present) == (0, 0)
        monkeypatch.undo()
        assert client.lookup(prompt()).position == 0
        assert not held(daemon)
        assert client.save(prompt(), truth, points=[256]).dropped == 0
        assert client.load(client.lookup(prompt()), verify) == 256
        client.close()


def reserved(client: RemoteStore, pieces: list[tuple[int, int]]) -> tuple[int, int]:
    """The numbers of an open sequence and of a reservation of its pieces."""
    session, number, asked = client._prompt_session, client.client.number(), list[int]()

    def request(sequence: int) -> protocol.Message:
        asked.append(sequence)
        return protocol.Reserve(sequence, number, packed(pieces, "<i4"))

    session.ask(prompt(), request)
    return asked[-1], number


def test_nothing_is_committed_that_the_daemon_did_not_copy(tmp_path: Path) -> None:
    with serving(settings(tmp_path, inbox=INBOX)) as daemon:
        client = store(daemon.settings.socket)
        ask, (sequence, number) = client.client.ask, reserved(client, [(0, 0), (1, 0)])
        with pytest.raises(BadRequest, match="CopyIn comes first"):
            ask(protocol.Commit(number), protocol.Done)
        with pytest.raises(BadRequest, match="1 blobs are not the 2 that were reserved"):
            ask(protocol.CopyIn(sequence, number, packed([(0, 0)], "<i4")), protocol.Done)
        with pytest.raises(LeaseExpired):
            ask(protocol.Commit(number), protocol.Done)
        assert not held(daemon)
        assert client.lookup(prompt()).position == 0
        client.close()


def test_where_clients_write_to_the_arena_there_is_nothing_to_copy(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(daemon.settings.socket)
        sequence, number = reserved(client, [(0, 0)])
        with pytest.raises(BadRequest, match="no inbox"):
            client.client.ask(protocol.CopyIn(sequence, number, packed([(0, 0)], "<i4")), protocol.Done)
        assert client.client.arena.flags.writeable
        client.close()


def test_extents_stay_reserved_until_nobody_writes_to_them_when_a_client_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, real = threading.Event(), threading.Event(), Inbox.copy

    def slow(*args: object) -> bool:
        began.set()
        wait_until(go_on)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Inbox, "copy", slow)
    with serving(settings(tmp_path, inbox=INBOX)) as daemon:
        client = store(daemon.settings.socket)
        assert client.save(prompt(), truth, points=[256], budget_s=0.2).stored == 0
        wait_until(began)
        client.close()
        time.sleep(0.2)
        assert held(daemon), "an extent was freed while a thread writes to it"
        go_on.set()
        end = time.monotonic() + 10
        while held(daemon) and time.monotonic() < end:
            time.sleep(0.01)
        assert not held(daemon)
        assert store(daemon.settings.socket).lookup(prompt()).position == 0


def test_a_blob_that_no_inbox_holds_is_dropped_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(settings(tmp_path, inbox=8192)) as daemon, caplog.at_level(logging.WARNING):
        client = store(daemon.settings.socket)
        saved = client.save(prompt(), truth, points=[256])
        assert 0 < saved.stored < saved.stored + saved.dropped == 12
        assert "take a larger --inbox" in caplog.text
        client.close()
        assert not held(daemon)


def test_inboxes_are_small_beside_the_arena(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a quarter of the arena's"):
        settings(tmp_path, inbox=4 << 20)
    assert Settings().changed(memory="1GiB", inbox="64MiB").inbox == 64 << 20


def test_the_inboxes_of_clients_that_left_are_freed_at_once(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=8 << 20, inbox=1 << 20)) as daemon:
        gc.collect()
        gc.disable()  # a daemon collects seldom what is old
        try:
            for _ in range(5):
                client = store(tmp_path / "kv.sock")
                client.save(prompt(0), truth, points=[512])
                client.close()
            until(lambda: not daemon._connections)
            assert not [each for each in gc.get_objects() if type(each) is Inbox]
        finally:
            gc.enable()


def test_a_connection_made_anew_has_an_inbox_of_its_own(tmp_path: Path) -> None:
    with serving(settings(tmp_path, inbox=INBOX)) as daemon:
        one, other = Client(daemon.settings.socket), Client(daemon.settings.socket)
        one.mapped.inbox[:4] = 7
        assert not np.any(other.mapped.inbox[:4])
        before = one.mapped.inbox
        one._hang_up()
        one.ask(protocol.Ping(), protocol.Done)
        assert one.mapped.inbox is not before
        one.close()
        other.close()

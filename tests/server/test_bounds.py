"""No client takes what all need: schemas, memory, file descriptors, the loop's time."""

from __future__ import annotations

import inspect
import json
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvweave.errors import BadRequest, OverLimit, ServerError
from kvweave.server import Client, Daemon, Disk, Limits, protocol
from kvweave.server.client_session import ClientSession
from kvweave.server.model_registry import MOST, MOST_BYTES
from kvweave.server.open_sequence import OpenSequence
from kvweave.server.registered_model import RegisteredModel, registration
from kvweave.server.shared_arena import Pinned, SharedArena
from kvweave.store.arena_tier import STEP_KEYS
from kvweave.store.blob import header_bytes
from kvweave.store.catalog import Catalog, Slots
from kvweave.store.keys import shard_id
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, store, verify
from tests.server.test_leases import until
from tests.store.models import truth


def schema(number: int, padding: int = 0) -> protocol.Register:
    """One of many, as large as wanted."""
    facts: dict[str, Any] = {"chunk_tokens": 256, "layers": [number], "part": 0, "parts": 1, "pad": " " * padding}
    role = {"name": "key", "rows": 256, "shape": [4], "dtype": "bfloat16"}
    meta = json.dumps(facts | {"roles": [role]}).encode()
    size = header_bytes(Shard(meta)) + 2048
    shard = protocol.ShardInfo(shard_id(meta), size, meta)
    return protocol.Register(1, f"model {number}", 256, [shard], [protocol.GroupInfo("full", 1, {"kind": "full"})])


class Shard:
    payload_bytes = chunk_tokens = 0
    is_keyed = False

    def __init__(self, meta: bytes) -> None:
        self.meta = meta


def test_no_number_of_schemas_locks_out_a_new_engine(tmp_path: Path) -> None:
    wish = settings(tmp_path, limits=Limits(requests_per_s=1e6))
    with serving(wish) as daemon, Client(wish.socket) as greedy:
        for first in range(0, MOST + 100, 100):
            replies = greedy.exchange([schema(number) for number in range(first, first + 100)]).replies
            assert all(isinstance(reply, protocol.Done) for reply in replies)
        assert len(daemon.state.models.named(None)) <= MOST
        engine = store(wish.socket)
        engine.save(prompt(), truth, points=POINTS)
        assert engine.load(engine.lookup(prompt()), verify) == 1024
        engine.close()


def test_schemas_take_so_much_memory_and_no_more(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon, Client(tmp_path / "kv.sock") as greedy:
        for number in range(100):
            greedy.ask(schema(number, 1_000_000), protocol.Done)
        kept = daemon.state.models.named(None)
        assert sum(each.num_bytes for each in kept) <= MOST_BYTES
        held = [msgspec.structs.replace(schema(number, 1_000_000), schema=number) for number in range(15)]
        replies = [greedy.exchange([each]).replies[0] for each in held]
        assert isinstance(replies[-1], protocol.Failed)
        assert "bytes of schemas" in replies[-1].message


def test_a_schema_in_use_is_never_forgotten(tmp_path: Path) -> None:
    with serving(settings(tmp_path, limits=Limits(requests_per_s=1e6))) as daemon:
        engine = store(tmp_path / "kv.sock")
        engine.save(prompt(), truth, points=POINTS)
        with Client(tmp_path / "kv.sock") as greedy:
            for first in range(0, MOST + 100, 100):
                greedy.exchange([schema(number) for number in range(first, first + 100)])
        assert "hybrid" in {each.model for each in daemon.state.models.named(None)}
        assert engine.load(engine.lookup(prompt()), verify) == 1024
        engine.close()
        until(lambda: all(each.users == 0 for each in daemon.state.models.named(None)))


def test_a_row_that_says_another_size_than_it_has_is_refused(tmp_path: Path) -> None:
    right = registration(1, "m", SCHEMA)
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        for wrong in (right.shards[0].blob_bytes - 1, right.shards[0].blob_bytes + 4096, 1):
            shard = protocol.ShardInfo(right.shards[0].id, wrong, right.shards[0].meta)
            with pytest.raises(BadRequest, match=f"describes blobs of {right.shards[0].blob_bytes} bytes"):
                client.ask(
                    protocol.Register(1, "m", right.chunk_tokens, [shard, *right.shards[1:]], right.groups),
                    protocol.Done,
                )
        client.ask(right, protocol.Done)


def test_the_event_loop_starts_no_thread_while_it_serves(tmp_path: Path) -> None:
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 4 << 20))) as daemon:
        engine = store(daemon.settings.socket)
        before = {*threading.enumerate()}
        engine.save(prompt(), truth, points=POINTS)
        assert engine.flush()
        daemon.state.arena.clear()
        assert engine.load(engine.lookup(prompt()), verify) == 1024, "read from disk"
        started = {each.name for each in {*threading.enumerate()} - before}
        assert not [name for name in started if name.startswith(("kvweave-read", "kvweave-write", "kvweave-flush"))]
        engine.close()


def test_keys_of_a_long_sequence_are_made_and_found_in_steps(tmp_path: Path) -> None:
    request = registration(1, "m", SCHEMA)
    chunks = 20_000
    ask = protocol.Open(
        1, 1, b"tenant00", 256 * chunks, b"".join(number.to_bytes(32, "big") for number in range(chunks))
    )
    sequence = OpenSequence(RegisteredModel(request), ask)
    sizes = [0]
    for _ in sequence.steps():
        sizes.append(len(sequence.keys))
    assert len(sequence.keys) == sequence.num_keys == 12 * chunks
    assert max(after - before for before, after in pairwise(sizes)) <= STEP_KEYS
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        client.exchange([request, ask])
        assert client.ask(protocol.Lookup(1, 0), protocol.Found).position == 0
        with pytest.raises(OverLimit, match="keys in open sequences"):
            client.ask(protocol.Open(2, 1, b"tenant00", 256 * chunks, ask.prefixes), protocol.Done)


def long_prompt() -> tuple[protocol.Register, protocol.Open, OpenSequence]:
    """Of four times as many keys as are processed in one step."""
    request, chunks = registration(1, "m", SCHEMA), 4 * STEP_KEYS // len(SCHEMA.shards)
    prefixes = b"".join(number.to_bytes(32, "big") for number in range(chunks))
    ask = protocol.Open(1, 1, b"tenant00", 256 * chunks + 1, prefixes)
    sequence = OpenSequence(RegisteredModel(request), ask)
    for _ in sequence.steps():
        pass
    return request, ask, sequence


def test_a_long_sequence_is_opened_in_steps_between_which_others_are_served(tmp_path: Path) -> None:
    request, ask, _ = long_prompt()
    with serving(settings(tmp_path)) as daemon:
        session = ClientSession(daemon.state)
        session._register(request)
        opening = session._open(ask)
        assert inspect.iscoroutine(opening)
        steps = 0
        with pytest.raises(StopIteration, match="Done"):
            while True:
                opening.send(None)
                steps += 1
        assert steps >= 4
        session.give_back()


def test_names_of_clients_and_models_have_no_control_characters(tmp_path: Path) -> None:
    evil = "\x1b[2Jx\x07"
    with serving(settings(tmp_path)) as daemon, Client(tmp_path / "kv.sock", name=evil) as client:
        client.ask(registration(1, evil, SCHEMA), protocol.Done)
        (me,), (model,) = daemon.report().clients, daemon.report().models
        assert me.name.isprintable()
        assert model.model.isprintable()
        assert all(connection.label.isprintable() for connection in daemon._connections), "as the log has it"


@pytest.mark.parametrize("lease", [0, 7])
def test_what_a_long_hit_uses_is_told_to_tiers_and_leased_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: int
) -> None:
    request, ask, sequence = long_prompt()
    chunks = sequence.num_chunks
    found: list[tuple[str, int]] = []
    finding = Catalog.find

    def find(self: Catalog, keys: Sequence[bytes]) -> Slots:
        found.append((threading.current_thread().name, len(keys)))
        return finding(self, keys)

    with serving(settings(tmp_path)) as daemon, Client(tmp_path / "kv.sock") as client:
        catalog = daemon.state.arena._catalog
        for key in sequence.keys:
            catalog.add(key, 0, 1, 0)
        client.exchange([request, ask])
        monkeypatch.setattr(Catalog, "find", find)
        found_there = client.ask(protocol.Lookup(1, lease), protocol.Found)
        assert found_there.position == sequence.limit > 0
        assert max(number for _, number in found) <= STEP_KEYS
        beside = [number for thread, number in found if thread.startswith("kvweave-touch")]
        assert sum(beside) > STEP_KEYS
        slots = finding(catalog, sequence.keys)
        ticks = catalog.ticks[slots[catalog.hits[slots] == 1]]
        assert len(ticks) > chunks
        needed = len(found_there.starts) // 8
        assert catalog.pins.sum() == needed
        assert (ticks[:-1] > ticks[1:]).all(), "earlier ones are worth more"
        if lease:
            assert needed > STEP_KEYS
            assert client.ask(protocol.Release([lease]), protocol.Done).count == 1
            assert not catalog.pins.any()


def test_a_client_that_leaves_while_it_is_leased_much_leaves_nothing_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, ask, sequence = long_prompt()
    pinning, steps = SharedArena.pin, list[int]()
    with serving(settings(tmp_path)) as daemon, Client(tmp_path / "kv.sock") as client:
        catalog = daemon.state.arena._catalog
        for key in sequence.keys:
            catalog.add(key, 0, 1, 0)
        client.exchange([request, ask])

        def pin(self: SharedArena, keys: Sequence[bytes], *, is_use: bool = True) -> Pinned:
            steps.append(len(keys))
            assert client._channel is not None
            client._channel._socket.shutdown(socket.SHUT_RDWR)
            return pinning(self, keys, is_use=is_use)

        monkeypatch.setattr(SharedArena, "pin", pin)
        with pytest.raises(ServerError):
            client.ask(protocol.Lookup(1, 7), protocol.Found, 5.0)
        until(lambda: bool(steps) and not catalog.pins.any(), 10)
        assert sum(steps) < sequence.num_keys // 2, "it ended before all were pinned"


@contextmanager
def silent(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Connections that never say anything."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(number)]


def is_closed(there: socket.socket) -> bool:
    there.setblocking(False)
    try:
        return not there.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_to_the_metrics_are_bounded_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.http.WAIT_S", 5.0)
    with serving(settings(tmp_path, http="127.0.0.1:0")) as daemon, silent(daemon.ports[0], 100) as sockets:
        until(lambda: sum(map(is_closed, sockets)) >= 68, 4.0)  # at once, and not when they have waited for too long
        assert daemon._listeners[0].num_open <= 32
        until(lambda: daemon._listeners[0].num_open == 0)
        page = urllib.request.urlopen(f"http://127.0.0.1:{daemon.ports[0]}/health", timeout=5)
        assert page.read() == b"ok\n"
        page.close()
        until(lambda: daemon._listeners[0].num_open == 0)


def test_handshakes_that_never_begin_are_bounded_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.listener.HANDSHAKE_S", 5.0)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    made = [*command.split(), "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    if subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("no openssl to make a certificate with")
    (tmp_path / "token").write_text("sesame")
    wish = settings(
        tmp_path, listen="127.0.0.1:0", token_file=tmp_path / "token", tls_cert=cert, tls_key=key,
        limits=Limits(connections=8),
    )  # fmt: skip
    with serving(wish) as daemon, silent(daemon.ports[0], 60) as sockets:
        until(lambda: sum(map(is_closed, sockets)) >= 52, 4.0)
        assert daemon._listeners[0].num_open <= 8
        with Client(wish.socket) as near:
            near.ask(protocol.Ping(), protocol.Done)
        until(lambda: daemon._listeners[0].num_open == 0)
        trusting = ssl.create_default_context(cafile=str(cert))
        with Client(f"localhost:{daemon.ports[0]}", token="sesame", tls=trusting) as backing:
            backing.ask(protocol.Ping(), protocol.Done)


def raw(daemon: Daemon, number: int, stack: ExitStack) -> list[socket.socket]:
    """Connections to the Unix socket that say nothing."""
    sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(number)]
    for each in sockets:
        each.connect(str(daemon.settings.socket))
    return sockets


def test_connections_that_are_refused_do_not_pile_up(tmp_path: Path) -> None:
    with serving(settings(tmp_path, limits=Limits(connections=2))) as daemon, ExitStack() as stack:
        sockets = raw(daemon, 200, stack)
        until(lambda: sum(map(is_closed, sockets)) >= 200 - 2 - 64)
        until(lambda: sum(map(is_closed, sockets)) >= 198)  # those that were to be told had their time


def test_connections_that_are_refused_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.connection.REFUSAL_S", 60.0)
    with serving(settings(tmp_path, limits=Limits(connections=2))) as daemon, ExitStack() as stack:
        accepted = raw(daemon, 2, stack)
        refused = raw(daemon, 100, stack)
        until(lambda: sum(map(is_closed, refused)) == 36)
        accepted[0].close()
        until(lambda: len(daemon._connections) == 1)
        Client(daemon.settings.socket).close()

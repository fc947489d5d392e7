"""Whatever comes in is answered, by name if it is an error; and the daemon goes on serving others."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvweave.errors import BadRequest, OverLimit, ServerGone
from kvweave.server import Client, Daemon, Disk, Limits, protocol
from kvweave.server.protocol import DIGEST, ID_BYTES, LENGTH_BYTES, VERSION, Failed, Message, frame, packed, read_reply
from kvweave.server.registered_model import registration
from kvweave.store import Quota
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import shard_id
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, store, verify
from tests.store.models import truth

HELLO = protocol.Hello(VERSION, DIGEST, "test", "", arena=False)


def replaced(message: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(message, **fields)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(settings(tmp_path_factory.mktemp("daemon"))) as daemon:
        yield daemon


def spoken(daemon: Daemon, *data: bytes, wait_s: float = 2.0) -> list[protocol.Reply]:
    """All answers to these bytes, until the daemon hangs up or says nothing more."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(daemon.settings.socket))
        raw.settimeout(wait_s)
        heard = b""
        try:
            raw.sendall(b"".join(data))
            raw.shutdown(socket.SHUT_WR)
            while piece := raw.recv(1 << 16):
                heard += piece
        except OSError:
            pass
    replies: list[protocol.Reply] = []
    while heard:
        length, ids = int.from_bytes(heard[:4], "little"), ID_BYTES if replies else 0  # the first one has no id
        replies.append(read_reply(heard[4 + ids : 4 + length]))
        heard = heard[4 + length :]
    return replies


def still_serves(daemon: Daemon) -> None:
    client = store(daemon.settings.socket)
    client.save(prompt(), truth, points=POINTS)
    assert client.load(client.lookup(prompt()), verify) == 1024
    client.close()


def error(reply: protocol.Reply) -> str:
    assert isinstance(reply, Failed)
    return reply.error


# ---- named errors


def test_another_version_is_refused_by_name(daemon: Daemon) -> None:
    (reply,) = spoken(daemon, frame(replaced(HELLO, version=99)))
    assert error(reply) == "Refused"
    assert "version 99" in reply.message  # type: ignore[union-attr]


def test_a_version_with_other_fields_is_still_told_its_version(daemon: Daemon) -> None:
    body = msgspec.msgpack.encode(["hello", 1, {"old": "shape"}])
    (reply,) = spoken(daemon, struct.pack("<I", len(body)) + body)
    assert error(reply) == "Refused"


def test_messages_of_another_shape_are_refused(daemon: Daemon) -> None:
    assert [error(reply) for reply in spoken(daemon, frame(replaced(HELLO, digest=b"othershp")))] == ["Refused"]


def test_nothing_is_answered_before_hello(daemon: Daemon) -> None:
    assert [error(reply) for reply in spoken(daemon, frame(protocol.Ping()))] == ["BadRequest"]


def test_a_second_hello_is_an_error_and_the_connection_goes_on(daemon: Daemon) -> None:
    replies = spoken(daemon, frame(HELLO), frame(HELLO, 1), frame(protocol.Ping(), 2))
    assert isinstance(replies[0], protocol.Welcome)
    assert error(replies[1]) == "BadRequest"
    assert replies[2] == protocol.Done()


def test_an_oversized_message_is_answered_before_it_was_sent(daemon: Daemon) -> None:
    replies = spoken(daemon, frame(HELLO), struct.pack("<I", 1 << 30))
    assert error(replies[1]) == "OverLimit"
    assert len(replies) == 2


def test_a_damaged_message_is_answered_and_the_connection_goes_on(daemon: Daemon) -> None:
    replies = spoken(daemon, frame(HELLO), struct.pack("<I", 3) + b"\xc1\xff\x00", frame(protocol.Ping(), 1))
    assert error(replies[1]) == "BadRequest"
    assert replies[2] == protocol.Done()


def test_a_foreign_schema_is_an_error(daemon: Daemon) -> None:
    right = registration(1, "m", SCHEMA)
    with Client(daemon.settings.socket) as client:
        for wrong, words in (
            (replaced(right, chunk_tokens=16), "chunks of 256 tokens"),
            (replaced(right, shards=[replaced(right.shards[0], id=b"notadigs"), *right.shards[1:]]), "another digest"),
            (replaced(right, groups=right.groups[:1]), "shards in all"),
            (replaced(right, groups=[replaced(g, reach={"kind": "telepathy"}) for g in right.groups]), "telepathy"),
            (replaced(right, groups=[replaced(g, reach={"kind": "window", "tokens": -4}) for g in right.groups]), "-4"),
            (
                replaced(right, groups=[replaced(g, reach={"kind": "window", "tokens": 2**62}) for g in right.groups]),
                "40",
            ),
        ):
            with pytest.raises(BadRequest, match=words if words != "40" else "beyond"):
                client.ask(wrong, protocol.Done)
        assert client.ask(right, protocol.Done).count == len(SCHEMA.shards)


def test_a_schema_that_lies_about_itself_is_an_error_for_its_client_alone(daemon: Daemon) -> None:
    right = registration(1, "m", SCHEMA)
    with Client(daemon.settings.socket) as client:
        for meta in (b"[]", b"{}", b"7", b"[" * 50_000, b'{"chunk_tokens": 256, "layers": 5}', b"\xff"):
            shard = protocol.ShardInfo(shard_id(meta), 5000, meta)
            with pytest.raises(BadRequest, match="cannot be read"):
                client.ask(replaced(right, shards=[shard, *right.shards[1:]]), protocol.Done)
        client.ask(protocol.StatsRequest(), protocol.StatsReply)


def test_a_sequence_of_too_many_keys_is_refused_before_they_are_made(daemon: Daemon) -> None:
    with Client(daemon.settings.socket) as client:
        client.ask(registration(1, "m", SCHEMA), protocol.Done)
        with pytest.raises(OverLimit, match="keys"):
            client.ask(protocol.Open(1, 1, b"tenant00", 2**50, bytes(32) * 130_000), protocol.Done)
        client.ask(protocol.Open(1, 1, b"tenant00", 1024, bytes(32) * 4), protocol.Done)
        with pytest.raises(OverLimit, match="pieces in one message"):
            client.ask(protocol.Reserve(1, 1, packed([(0, 0)] * 70_000, "<i4")), protocol.Places)


def test_what_was_never_opened_or_registered_is_an_error(daemon: Daemon) -> None:
    piece = packed([(0, 0)], "<i4")
    with Client(daemon.settings.socket) as client:
        for request in (
            protocol.Lookup(5, 1), protocol.Fetch(5, 1, piece), protocol.Reserve(5, 1, piece),
            protocol.Damaged(5, piece),
            protocol.Open(5, 9, b"tenant00", 10, b""),
        ):  # fmt: skip
            with pytest.raises(BadRequest, match="not (open|registered)"):
                client.ask(request, protocol.Done)
        client.ask(registration(1, "m", SCHEMA), protocol.Done)
        with pytest.raises(BadRequest, match="no digests"):
            client.ask(protocol.Open(5, 1, b"tenant00", 10, b"123"), protocol.Done)
        with pytest.raises(BadRequest, match="but 10"):
            client.ask(protocol.Open(5, 1, b"tenant00", 10, bytes(32)), protocol.Done)
        client.ask(protocol.Open(5, 1, b"tenant00", 300, bytes(32)), protocol.Done)
        for pieces in ([(0, 1)], [(99, 0)], [(-1, 0)], [(0, 2**31 - 1)]):
            with pytest.raises(BadRequest, match="beyond"):
                client.ask(protocol.Reserve(5, 1, packed(pieces, "<i4")), protocol.Places)
        with pytest.raises(BadRequest, match="array"):
            client.ask(protocol.Reserve(5, 1, b"123"), protocol.Places)


def test_limits_of_a_connection_are_errors_by_name(tmp_path: Path) -> None:
    limits = Limits(sequences=2, keys=200, schemas=1, leases=2)
    with serving(settings(tmp_path, limits=limits)), Client(tmp_path / "kv.sock") as client:
        client.ask(registration(1, "m", SCHEMA), protocol.Done)
        with pytest.raises(OverLimit, match="1 schemas"):
            client.ask(registration(2, "m", SCHEMA), protocol.Done)
        opening = protocol.Open(1, 1, b"tenant00", 1024, bytes(range(128)))
        client.ask(opening, protocol.Done)
        client.ask(replaced(opening, sequence=2), protocol.Done)
        with pytest.raises(OverLimit, match="2 sequences"):
            client.ask(replaced(opening, sequence=3), protocol.Done)
        client.ask(protocol.Close([2]), protocol.Done)
        with pytest.raises(OverLimit, match="200 keys"):
            client.ask(protocol.Open(2, 1, b"tenant00", 1 << 20, bytes(32) * 40), protocol.Done)
        everything = packed([(shard, chunk) for shard in range(12) for chunk in range(4)], "<i4")
        client.ask(protocol.Reserve(1, 1, everything), protocol.Places)
        client.ask(protocol.Commit(1), protocol.Done)
        one = packed([(0, 0)], "<i4")
        for lease in (1, 2):
            client.ask(protocol.Fetch(1, lease, one), protocol.Places)
        with pytest.raises(OverLimit, match="2 leases"):
            client.ask(protocol.Fetch(1, 3, one), protocol.Places)
        client.ask(protocol.Release([1, 2]), protocol.Done)
        assert client.ask(protocol.Clear(), protocol.ClearReply).entries == 48
        assert client.ask(protocol.StatsRequest(), protocol.StatsReply).report.tiers[0].tier.used_bytes == 0


def test_more_than_a_share_of_the_arena_at_once_is_an_error(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=200_000)), Client(tmp_path / "kv.sock") as client:
        client.ask(registration(1, "m", SCHEMA), protocol.Done)
        client.ask(protocol.Open(1, 1, b"tenant00", 1024, bytes(32) * 4), protocol.Done)
        everything = packed([(shard, chunk) for shard in range(12) for chunk in range(4)], "<i4")
        with pytest.raises(OverLimit, match="at once"):
            client.ask(protocol.Reserve(1, 1, everything), protocol.Places)


def test_a_flood_is_read_slower_and_others_are_answered(tmp_path: Path) -> None:
    with serving(settings(tmp_path, limits=Limits(requests_per_s=500))):
        began = time.monotonic()  # an idle connection has saved up requests since it was made
        flood, other = Client(tmp_path / "kv.sock"), Client(tmp_path / "kv.sock")
        flooding = threading.Thread(target=flood.exchange, args=([protocol.Ping()] * 1000, 60))
        flooding.start()
        other.ask(protocol.Ping(), protocol.Done)
        assert flooding.is_alive(), "others wait for its end"
        flooding.join()
        assert time.monotonic() - began > 1.2
        flood.close()
        other.close()


def test_a_client_that_does_not_read_its_answers_holds_up_only_itself(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(daemon.settings.socket))
        deaf.setblocking(False)
        ping = frame(protocol.StatsRequest(), 1) * 1000
        deaf.send(frame(HELLO))
        with pytest.raises(BlockingIOError):  # the daemon stops reading: as it should
            for _ in range(200):
                deaf.send(ping)
        still_serves(daemon)


def test_too_many_connections_are_told_so(tmp_path: Path) -> None:
    one = Limits(connections=1)
    with (
        serving(settings(tmp_path, limits=one)),
        Client(tmp_path / "kv.sock"),
        pytest.raises(OverLimit, match="1 conn"),
    ):
        Client(tmp_path / "kv.sock")


# ---- what a daemon is


def test_describe_says_what_was_registered_and_on_what_terms(tmp_path: Path) -> None:
    disk, quotas = Disk(tmp_path / "disk", 64 << 20), {"team": Quota(1 << 20, 2 << 20)}
    with serving(settings(tmp_path, disk=disk, quotas=quotas, lease_s=7.0)) as daemon:
        client = store(tmp_path / "kv.sock")
        client.lookup(prompt())
        found = client.describe()
        assert (found.lease_s, found.arena_bytes, found.reserve_bytes) == (7.0, 4 << 20, 1 << 20)
        assert found.limits == Limits()
        assert found.quotas == quotas
        assert [(tier.name, tier.kind, tier.capacity_bytes, tier.write) for tier in found.tiers] == [
            ("memory", "memory", 4 << 20, "through"), ("disk", "disk", 64 << 20, "back"),
        ]  # fmt: skip
        (model,) = found.models
        assert (model.model, model.chunk_tokens) == ("hybrid", SCHEMA.chunk_tokens)
        assert model.schema == daemon.report().models[0].schema
        shards = [shard for group in model.groups for shard in group.rows]
        assert [shard.id for shard in shards] == [shard.id.hex() for shard in SCHEMA.shards]
        assert [(shard.part, shard.parts) for shard in shards] == [(shard.part, shard.parts) for shard in SCHEMA.shards]
        assert [shard.blob_bytes for shard in shards] == [blob_bytes(shard) for shard in SCHEMA.shards]
        full = next(group for group in model.groups if group.tag == "full")
        assert (full.reach, len(full.layers), len(full.rows)) == ("full", 1, 4)
        assert full.rows[0].roles[0].startswith("key [256, ")
        assert client.client.ask(protocol.Describe("nobody"), protocol.DescribeReply).description.models == ()
        client.close()


def test_describe_is_answered_over_tcp_too(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    with serving(settings(tmp_path, listen="127.0.0.1:0", token_file=tmp_path / "token")) as daemon:
        client = Client(f"127.0.0.1:{daemon.ports[0]}", token="sesame")
        assert client.ask(protocol.Describe(), protocol.DescribeReply).description.protocol == VERSION
        client.close()


def test_an_answer_that_would_be_too_long_is_an_error_instead(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.connection.MESSAGE_BYTES", 200)
    with Client(daemon.settings.socket, arena=False) as client:
        with pytest.raises(OverLimit, match="200 at most"):
            client.ask(protocol.Describe(), protocol.DescribeReply)
        client.ask(protocol.Ping(), protocol.Done)


# ---- fuzz


@given(st.binary(max_size=300))
def test_garbage_instead_of_hello_never_stops_the_daemon(daemon: Daemon, data: bytes) -> None:
    spoken(daemon, data, wait_s=0.2)
    still_serves(daemon)


@given(st.lists(st.binary(max_size=100), max_size=8))
def test_garbage_in_frames_is_answered_each_time(daemon: Daemon, bodies: list[bytes]) -> None:
    frames = [struct.pack("<I", len(body)) + body for body in bodies]
    replies = spoken(daemon, frame(HELLO), *frames, frame(protocol.Ping(), 1))
    assert len(replies) == len(bodies) + 2
    assert replies[-1] == protocol.Done()
    still_serves(daemon)


def messages() -> st.SearchStrategy[Message]:
    """Well-formed questions with any content: small numbers often, so that they refer to one another."""
    number = st.one_of(st.integers(0, 3), st.integers(0, 2**53))
    pieces = st.lists(st.tuples(st.integers(-1, 12), st.integers(-1, 5)), max_size=6).map(lambda p: packed(p, "<i4"))
    data = st.one_of(pieces, st.binary(max_size=40))
    right = registration(1, "m", SCHEMA)
    registers = st.builds(replaced, st.just(right), schema=number, chunk_tokens=st.sampled_from([1, 256, 1 << 24]))
    lists = st.lists(number, max_size=4)
    opens = st.builds(
        protocol.Open, number, number, st.binary(min_size=8, max_size=8), number,
        st.one_of(st.binary(max_size=70), st.just(bytes(32) * 4)),
    )  # fmt: skip
    seconds = st.one_of(st.none(), st.floats(-1, 0.05))
    return st.one_of(
        st.just(protocol.Ping()), registers, st.just(right), opens,
        st.just(protocol.Open(1, 1, b"tenant00", 1030, bytes(32) * 4)),
        st.builds(protocol.Close, lists), st.builds(protocol.Release, lists),
        st.builds(protocol.PinLeases, lists), st.builds(protocol.Describe, st.sampled_from([None, "m", "x"])),
        st.builds(protocol.Lookup, number, number, st.one_of(st.none(), data), seconds),
        st.builds(protocol.Fetch, number, number, data, seconds),
        st.builds(protocol.Reserve, number, number, data), st.builds(protocol.Commit, number, st.booleans()),
        st.builds(protocol.Damaged, number, data), st.builds(protocol.Flush, st.floats(-1, 0.01)),
        st.just(protocol.StatsRequest()),
        st.builds(protocol.RemovedSince, st.integers(-1, 99), st.binary(max_size=24)),
        st.builds(protocol.Observed, st.sampled_from(["load", "save", "x"]), st.floats(-1, 1e6), number),
        st.builds(protocol.Clear, st.one_of(st.none(), st.binary(min_size=8, max_size=8)), st.sampled_from(["m", "x"]),
            st.floats(-1, 0.05)),
    )  # fmt: skip


@given(st.lists(messages(), min_size=1, max_size=25))
@hypothesis_settings(max_examples=60)
def test_any_order_of_any_messages_is_answered_one_by_one_and_leaves_nothing(
    daemon: Daemon, requests: list[Message]
) -> None:
    client = Client(daemon.settings.socket)
    replies = client.exchange(requests).replies
    assert len(replies) == len(requests)
    assert not any("bug" in reply.message for reply in replies if isinstance(reply, Failed))
    client.close()
    until = time.monotonic() + 5
    while daemon.report().clients and time.monotonic() < until:
        time.sleep(0.001)
    arena = daemon.state.arena
    assert not arena._writing
    assert not arena._catalog.pins.any()
    still_serves(daemon)


def test_the_fuzz_knows_every_question() -> None:
    assert {kind.__name__ for kind in get_args(protocol.Request)} == {
        "Hello", "Ping", "Register", "Open", "Close", "Lookup", "Fetch", "PinLeases",
        "Release", "Reserve", "CopyIn", "Commit", "Damaged", "Flush", "Observed", "StatsRequest", "Describe", "Clear",
        "RemovedSince",
    }  # fmt: skip


def test_an_unreachable_daemon_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ServerGone, match="no daemon at"):
        Client(tmp_path / "nobody.sock")


def test_neither_names_nor_docstrings_of_messages_change_what_is_said() -> None:
    assert (VERSION, DIGEST.hex()) == (7, "8b525b47458fbf18"), "messages changed: raise VERSION, or undo it"
    assert frames([protocol.Fetch(1, 2, b""), protocol.PinLeases([3]), protocol.StatsRequest()]) == [
        ["bring", 1, 2, b"", None], ["pin", [3]], ["stats"],
    ]  # fmt: skip
    assert frames([protocol.ClearReply([]), protocol.Alive([])]) == [["cleared", []], ["alive", []]]


def frames(messages: list[Message]) -> list[object]:
    return [msgspec.msgpack.decode(frame(message)[LENGTH_BYTES:]) for message in messages]

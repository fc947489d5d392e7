"""Requests and answers belong together: whatever happens between the two, an answer is never taken for another's."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from asyncio import selector_events
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import ServerTimeout
from kvweave.server import Client, connection, protocol
from kvweave.server.byte_limiter import HeldBytes
from kvweave.server.channel import Channel
from kvweave.server.connection import AT_ONCE
from kvweave.server.protocol import packed
from kvweave.server.shared_arena import SharedArena
from kvweave.store.tier_stack import UNLIMITED
from tests.server.models import POINTS, SCHEMA, prompt, serving, settings, store, verify
from tests.server.test_kill import daemon_process
from tests.store.interrupts import interrupt_everywhere
from tests.store.models import truth


class Interrupt(BaseException):
    """What a signal handler raises: between any two instructions."""


@contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Raises `Interrupt` in this thread after a while, if it is not over by then."""

    def strike(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, 0.5)  # again, where the first was lost in a destructor
        yield
    except Interrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_between_question_and_answer_never_shifts_the_answers(tmp_path: Path) -> None:
    chance = random.Random(4)
    with daemon_process(settings(tmp_path, 16 << 20)):
        client = store(tmp_path / "kv.sock", workers=1)
        client.save(prompt(0), truth, points=POINTS)
        for number in range(150):
            with interrupted(chance.uniform(0.0001, 0.002)):
                while True:
                    client.load(client.lookup(prompt(0)), verify)
                    client.save(prompt(1), truth, points=POINTS, budget_s=5)
            assert client.lookup(prompt(1000 + number)).position == 0, "a prompt that nobody saved was found"
            time.sleep(0)
        for number in range(3):
            assert client.save(prompt(number), truth, points=POINTS).dropped == 0
            hit = client.lookup(prompt(number))
            assert client.load(hit, verify) == hit.position == 1024
        assert client.report().tiers[0].damaged == 0
        client.close()


def test_after_half_a_request_the_connection_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        generation, send = client.client.generation, Channel._send

        def half(channel: Channel, data: bytes, until: float) -> None:
            send(channel, data[: len(data) // 2], until)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Channel, "_send", half)
            client.lookup(prompt(1))
        assert client.lookup(prompt(0), budget_s=5).position == 1024
        assert client.client.generation != generation
        client.close()


def test_no_interrupt_leaves_a_client_locked(tmp_path: Path) -> None:
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        for call in (
            lambda: client.ask(protocol.Ping(), protocol.Done),
            lambda: client.post(protocol.Release([1])),
        ):
            interrupt_everywhere(call, client._lock)
        held = HeldBytes(1)
        for part in (lambda: client.reserving.hold(held, 1, 0.0, UNLIMITED), lambda: client.reserving.give_back(held)):
            interrupt_everywhere(part, client.reserving._lock)
        client.ask(protocol.Ping(), protocol.Done)


def test_replies_to_requests_that_came_together_are_sent_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    sent, write = list[int](), transport.write

    def counted(self: object, data: bytes) -> None:
        sent.append(len(data))
        write(self, data)

    monkeypatch.setattr(transport, "write", counted)
    monkeypatch.setattr(connection, "REPLY_BYTES", 4096)
    with serving(settings(tmp_path)), Client(tmp_path / "kv.sock") as client:
        client.exchange([protocol.Ping()] * 20)
        assert len(sent) == 1
        reports = client.exchange([protocol.StatsRequest()] * AT_ONCE).replies
        assert len(reports) == AT_ONCE
        longest = max(len(protocol.frame(reply, 1)) for reply in reports)
    assert max(sent) <= 4096 + longest < sum(sent) / 2, "replies that the client does not read have a bound"


def test_what_a_hit_uses_is_noted_after_its_reply_and_before_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    events, write, touch = list[str](), transport.write, SharedArena.touch

    def writing(self: object, data: bytes) -> None:
        events.append("reply")
        write(self, data)

    def touching(self: SharedArena, keys: Sequence[bytes], *, is_hit: bool = False) -> None:
        events.append("hit" if is_hit else "use")
        touch(self, keys, is_hit=is_hit)

    with serving(settings(tmp_path)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        monkeypatch.setattr(transport, "write", writing)
        monkeypatch.setattr(SharedArena, "touch", touching)
        hit = client.lookup(prompt(0))
        client.client.ask(protocol.Ping(), protocol.Done)
        noted = [event for event in events if event != "use"]  # of windows that the hit does not need
        assert noted == ["reply", "hit", "reply"]
        assert client.load(hit, verify) == 1024
        client.close()


def test_an_answer_that_comes_late_is_dropped(tmp_path: Path) -> None:
    with daemon_process(settings(tmp_path)) as pid, Client(tmp_path / "kv.sock") as client:
        generation = client.generation
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ServerTimeout, match="in time"):
            client.ask(protocol.Describe(), protocol.DescribeReply, 0.05)
        os.kill(pid, signal.SIGCONT)
        assert client.ask(protocol.Ping(), protocol.Done) == protocol.Done()
        assert isinstance(client.ask(protocol.StatsRequest(), protocol.StatsReply), protocol.StatsReply)
        assert client.generation == generation, "the connection was never in doubt"


def test_what_a_late_question_took_is_given_back(tmp_path: Path) -> None:
    with daemon_process(settings(tmp_path)) as pid:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        client.lookup(prompt(0))
        everything = packed([(shard, 3) for shard in range(len(SCHEMA.shards))], "<i4")
        os.kill(pid, signal.SIGSTOP)
        assert client.lookup(prompt(0), budget_s=0.05).position == 0
        with pytest.raises(ServerTimeout):
            client.client.exchange([protocol.Reserve(2, 9999, everything)], 0.05)
        os.kill(pid, signal.SIGCONT)
        (mine,) = client.report().clients
        assert (mine.leases, mine.leased_bytes, mine.reserved_bytes) == (0, 0, 0)
        assert client.stats().unanswered == 1
        assert client.load(client.lookup(prompt(0)), verify) == 1024
        client.close()


def test_a_forked_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    with daemon_process(settings(tmp_path, 16 << 20)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        hit = client.lookup(prompt(0))
        child = os.fork()
        if not child:
            try:
                os._exit(not asks_for_a_while(client))
            finally:
                os._exit(2)
        assert asks_for_a_while(client)
        assert os.waitpid(child, 0)[1] == 0
        assert client.load(hit, verify) == 1024  # the child gave back nothing of ours
        assert client.report().tiers[0].damaged == 0
        client.close()


def asks_for_a_while(client: object) -> bool:
    for number in range(200):
        if client.lookup(prompt(0)).position != 1024 or client.lookup(prompt(1000 + number)).position:  # type: ignore[attr-defined]
            return False
    mine = os.getpid() % 1000
    saved = client.save(prompt(10 + mine), truth, points=POINTS)  # type: ignore[attr-defined]
    return bool(saved.dropped == 0 and client.load(client.lookup(prompt(10 + mine)), verify) == 1024)  # type: ignore[attr-defined]


def test_a_child_forked_while_another_thread_asks_can_ask(tmp_path: Path) -> None:
    with daemon_process(settings(tmp_path)) as pid:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        os.kill(pid, signal.SIGSTOP)
        asking = threading.Thread(target=client.lookup, args=(prompt(0),), kwargs={"budget_s": 0.5})
        asking.start()
        time.sleep(0.1)
        child = os.fork()
        if not child:
            try:
                os.kill(pid, signal.SIGCONT)
                os._exit(client.lookup(prompt(0), budget_s=10).position != 1024)
            finally:
                os._exit(2)
        asking.join()
        assert os.waitpid(child, 0)[1] == 0
        client.close()


def test_a_claim_of_damage_is_checked_before_anything_is_forgotten(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        hit = client.lookup(prompt(0))
        everything = packed([(shard, 3) for shard in range(len(SCHEMA.shards))], "<i4")
        wrong = client._prompt_session.ask(prompt(0), lambda sequence: protocol.Damaged(sequence, everything))[0]
        assert wrong == protocol.Done(0)
        client.client.arena[hit.places[0, 3] + 5000] ^= 1
        right = client._prompt_session.ask(prompt(0), lambda sequence: protocol.Damaged(sequence, everything))[0]
        assert right == protocol.Done(1)
        assert daemon.report().tiers[0].damaged == 1
        client.close()

"""Advances: places that a connection holds ahead, so that a GPU's pages are copied before the daemon is asked. What is
lent is given back however a connection goes on, and is never lent twice."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import LeaseExpired, ServerTimeout, StoreError
from kvweave.server import Daemon, RemoteStore, protocol, save_operation
from kvweave.server.channel import Channel
from kvweave.server.client import Advance
from kvweave.server.client_session import ROOM_S
from kvweave.server.protocol import ADVANCE_S
from kvweave.server.settings import Limits
from kvweave.server.shared_arena import LENT_SHARE, ArenaRun, SharedArena
from kvweave.store import PagePayloads, Quota, Saved
from kvweave.store.tier import Blob
from tests.server.models import LARGEST, POINTS, SCHEMA, prompt, prompt_bytes, serving, settings, spawned, store, verify
from tests.server.test_staged import TOKENS, StagingCopier, engine
from tests.store.models import Rank, fill, truth

MEMORY = 16 << 20


class Engine:
    """A store of its own, over pages that are reached through staging memory."""

    def __init__(self, socket: Path) -> None:
        self.store: RemoteStore = store(socket)
        made: tuple[Rank, PagePayloads, StagingCopier] = engine()
        self.made, self.pages, self.copier = made
        fill(SCHEMA, self.made, TOKENS // SCHEMA.chunk_tokens)

    def save(self, number: int = 0, budget_s: float | None = None, tenant: str = "") -> Saved:
        source = self.pages.source(self.made.table)
        return self.store.save(prompt(number, tenant), source, points=POINTS, budget_s=budget_s)

    def loads(self, number: int = 0) -> bool:
        return self.store.load(self.store.lookup(prompt(number)), verify) == TOKENS

    @property
    def advance(self) -> Advance | None:
        return self.store.client.advances[0] if self.store.client.advances else None


def books_balance(daemon: Daemon) -> bool:
    """Whether every byte of the arena is free, an entry's, reserved or lent, and nothing is the last two."""
    arena = daemon.state.arena
    used = int(arena._catalog.sizes[[*arena._catalog.slot_of.values()]].sum())
    return not arena._writing and not arena.lent_bytes and used + arena._extents.free_bytes == arena._extents.capacity


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def test_a_copy_begins_in_the_advance_before_the_daemon_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one, sent, send = Engine(daemon.settings.socket), list[int](), Channel.send
        assert one.save().dropped == 0
        advance = one.advance
        assert advance

        def sending(self: Channel, messages: Sequence[protocol.Message], until: float) -> list[int]:
            sent.append(one.copier.calls)
            return send(self, messages, until)

        one.copier.calls, one.copier.seen = 0, []
        monkeypatch.setattr(Channel, "send", sending)
        assert one.save(1).dropped == 0
        monkeypatch.undo()
        assert sent[0] == 1
        run = one.store.client.arena[advance.start : advance.start + advance.num_bytes]
        assert sum(np.may_share_memory(payload, run) for payload in one.copier.seen) > 1
        assert one.loads(0)
        assert one.loads(1)
        one.store.close()


def test_who_reads_nothing_from_a_gpu_gets_no_advance(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        client = store(daemon.settings.socket)
        assert client.save(prompt(), truth).dropped == 0
        assert daemon.state.arena.lent_bytes == 0
        client.close()
    with serving(settings(tmp_path, memory=MEMORY, inbox=1 << 20)) as daemon:
        one = Engine(daemon.settings.socket)
        assert one.save().dropped == 0
        assert daemon.state.arena.lent_bytes == 0, "clients do not write to the arena"
        one.store.close()


def test_an_advance_is_given_back_at_the_end_of_its_connection(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        one.save()
        assert daemon.state.arena.lent_bytes > 0
        assert daemon.report().clients[0].reserved_bytes == daemon.state.arena.lent_bytes
        one.store.close()
        assert within(ADVANCE_S / 2, lambda: books_balance(daemon))


def test_an_advance_is_given_back_when_its_connection_is_idle(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        one.save()
        assert within(ADVANCE_S + 1, lambda: books_balance(daemon))
        assert one.advance, "the client has it still, and does not use it"
        one.copier.seen = []
        before = one.advance.until
        assert one.save(1).dropped == 0
        assert one.advance.until > before
        assert one.loads(1)
        one.store.close()


def test_another_clients_save_gets_an_advance_when_memory_is_short(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one, other, arena = Engine(daemon.settings.socket), store(daemon.settings.socket), daemon.state.arena
        one.save()
        assert arena.lent_bytes > LARGEST
        for number in range(MEMORY // 4096):
            arena.reserve([number.to_bytes(48, "little")], [4096])  # all but the advance, by others
        assert not arena._extents.free_bytes
        began = time.monotonic()
        assert other.save(prompt(7), truth, points=[256]).stored > 0, "it waits for what is lent, and gets it"
        assert time.monotonic() - began < ADVANCE_S + ROOM_S / 2
        assert arena.lent_bytes == 0
        one.store.close()
        other.close()


def test_nothing_is_lent_while_others_wait_for_room_nor_beyond_a_share(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        daemon.state.waiting_for_room = 1
        one.save()
        assert daemon.state.arena.lent_bytes == 0
        daemon.state.waiting_for_room = 0
        one.save(1)
        lent = daemon.state.arena.lent_bytes
        assert lent
        others = [Engine(daemon.settings.socket) for _ in range(int(LENT_SHARE * MEMORY) // lent + 1)]
        for number, other in enumerate(others):
            assert other.save(number + 2).dropped == 0
        assert lent < daemon.state.arena.lent_bytes <= LENT_SHARE * MEMORY
        for each in (one, *others):
            each.store.close()
        assert within(5, lambda: books_balance(daemon))


def test_what_is_present_already_is_copied_in_vain_and_its_places_are_free_again(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one, other = Engine(daemon.settings.socket), store(daemon.settings.socket)
        one.save()
        other.save(prompt(1), truth, points=[256])
        saved = one.save(1)
        assert (saved.stored > 0, saved.present > 0, saved.dropped) == (True, True, 0)
        calls = one.copier.calls
        saved = one.save(1)
        assert (saved.stored, saved.dropped) == (0, 0)
        assert one.copier.calls > calls
        assert one.loads(1)
        one.store.close()
        assert within(5, lambda: books_balance(daemon))
        assert other.load(other.lookup(prompt(1)), verify) == TOKENS
        other.close()


def test_places_that_are_written_in_vain_are_nobodys_until_the_reservation_ends(tmp_path: Path) -> None:
    arena = SharedArena(64 * 4096)
    assert not arena.is_held
    run = arena.lend(8 * 4096)
    assert run
    assert arena.is_held, "a reservation may wait for it"
    keys = [bytes([number]) * 48 for number in range(3)]
    arena.put([keys[1]], [Blob(np.zeros(100, np.uint8), 0, lambda _: b"")])
    found, unused = arena.reserve_in(run, keys, [100, 100, 5000])
    assert found.tolist() == [run.start, protocol.PRESENT, run.start + 2 * 4096]
    assert unused == [ArenaRun(run.start + 4096, 4096), ArenaRun(run.start + 4 * 4096, 4 * 4096)]
    taken = [arena.reserve([bytes([9, number]) * 24], [4096])[0] for number in range(64)]
    assert not {*taken} & {run.start + 4096 * page for page in range(8)}
    assert arena.is_held
    for each in unused:
        arena.take_back(each)
    assert arena.lent_bytes == 0
    assert arena.reserve([b"8" * 48], [4096])[0] == run.start + 4096
    arena.close()


def test_a_tenant_gets_no_more_in_an_advance_than_its_limit(tmp_path: Path) -> None:
    quotas = {"small": Quota(limit_bytes=2 * LARGEST)}
    with serving(settings(tmp_path, memory=MEMORY, quotas=quotas)) as daemon:
        one = Engine(daemon.settings.socket)
        for number in range(3):
            one.save(number, tenant="small")
            assert one.advance or not number
            assert daemon.state.arena._catalog.used[1] <= 2 * LARGEST
        one.store.close()
        assert within(5, lambda: books_balance(daemon))


def test_an_advance_that_the_daemon_took_back_is_asked_for_anew(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        one.save()
        assert one.advance
        assert within(ADVANCE_S + 1, lambda: not daemon.state.arena.lent_bytes)
        late = one.advance._replace(until=time.monotonic() + 60)  # as a client whose request took too long
        one.store.client.advances[0] = late
        assert one.save(1).dropped == 0
        assert one.loads(1)
        with pytest.raises(LeaseExpired):
            asked(one.store, in_advance=1, client_has=False)
        one.store.close()
        assert within(5, lambda: books_balance(daemon))


def asked(client: RemoteStore, in_advance: int, *, client_has: bool) -> object:
    """What the daemon says of a reservation in an advance that the connection has, or has not."""
    session = client._prompt_session
    if not client_has:
        client.client.close()

    def request(sequence: int) -> protocol.Message:
        return protocol.Reserve(
            sequence, client.client.number(), protocol.packed([(0, 0)], "<i4"), None, True, in_advance
        )

    return client.client.check(session.ask(prompt(9), request)[0], protocol.Places)


def test_pieces_beyond_an_advance_are_refused(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        one.save()
        with pytest.raises(LeaseExpired, match="2 pieces"):
            asked(one.store, 2, client_has=True)
        assert daemon.state.arena.lent_bytes, "it is as it was"
        one.store.close()


def test_a_page_that_is_not_there_is_an_error_of_the_save_also_while_the_daemon_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_operation, "FIRST_CALL_BYTES", 1)
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        one.save()
        assert one.advance
        generation = one.store.client.generation
        tables = {name: np.where(np.arange(len(table)) < 4, table, 0) for name, table in one.made.table.items()}
        calls = one.copier.calls
        with pytest.raises(StoreError, match="NULL"):
            one.store.save(prompt(1), one.pages.source(tables), points=[TOKENS])
        assert one.copier.calls > calls, "its first call had begun"
        one.store.report()
        assert one.store.client.generation == generation
        assert not daemon.state.arena._writing
        assert one.save(2).dropped == 0
        one.store.close()


def test_one_thread_has_an_advance(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=4 * MEMORY)) as daemon:
        one, places, real = Engine(daemon.settings.socket), list[int](), SharedArena.reserve_in
        one.save()

        def noting(self: SharedArena, run: ArenaRun, *args: object) -> object:
            places.append(run.start)
            return real(self, run, *args)  # type: ignore[arg-type]

        SharedArena.reserve_in = noting  # type: ignore[method-assign, assignment]
        try:
            threads = [threading.Thread(target=one.save, args=(number,)) for number in range(1, 9)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        finally:
            SharedArena.reserve_in = real  # type: ignore[method-assign]
        assert places
        assert all(one.loads(number) for number in range(9))
        assert daemon.state.counts["memory damaged"] == 0
        one.store.close()
        assert within(5, lambda: books_balance(daemon))


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_threads_that_share_little_wait_for_each_other_also_with_an_advance(tmp_path: Path, share: float) -> None:
    limits = replace(Limits(), reserve_share=share)
    with serving(settings(tmp_path, memory=4 * MEMORY, limits=limits)) as daemon:
        one, dropped = Engine(daemon.settings.socket), list[int]()
        for _ in range(4):
            threads = [
                threading.Thread(target=lambda number=number: dropped.append(one.save(number).dropped))
                for number in range(len(dropped), len(dropped) + 4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert dropped == [0] * 16
        assert one.store.client.reserving._held == 0
        one.store.close()
        assert within(5, lambda: books_balance(daemon))


def test_what_is_gathered_is_one_batch_to_its_end_also_in_an_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_operation, "LAST_BYTES", 1)
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        for number in range(2):
            gathered = one.store.gather(prompt(number), one.pages.source(one.made.table), points=POINTS)
            assert gathered.failed == ()
            assert not one.loads(number)
            assert gathered.commit().dropped == 0
            assert one.loads(number)
        one.store.close()


def test_a_forked_child_has_no_advance(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one = Engine(daemon.settings.socket)
        one.save()
        assert one.advance
        one.store.client.after_fork()
        assert not one.advance
        one.store.close()


def test_a_daemon_that_is_killed_between_copy_and_commit_costs_the_save_and_nothing_else(tmp_path: Path) -> None:
    socket = tmp_path / "kv.sock"
    with spawned(socket, "--memory", str(MEMORY)) as process:
        one = Engine(socket)
        assert one.save().dropped == 0
        assert one.advance

        def kill() -> None:
            process.kill()
            process.wait()

        one.copier.behind = kill
        assert one.save(1).stored == 0
    one.copier.behind = lambda: None
    with spawned(socket, "--memory", str(MEMORY)):
        time.sleep(0.6)  # until the client connects again
        assert one.save(1).dropped == 0, "an advance of the daemon before is not used"
        assert one.loads(1)
        one.store.close()


def test_a_stopped_daemon_costs_a_save_in_an_advance_its_budget_and_no_more(tmp_path: Path) -> None:
    socket = tmp_path / "kv.sock"
    with spawned(socket, "--memory", str(MEMORY)) as process:
        one = Engine(socket)
        assert one.save().dropped == 0
        assert one.advance
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert one.save(1, budget_s=0.3).stored == 0
            assert time.monotonic() - began < 1.0
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert within(5, lambda: one.save(2).dropped == 0)
        assert one.loads(2)
        assert within(ADVANCE_S + 1, lambda: one.store.report().clients[0].reserved_bytes == 0), "long before its lease"
        one.store.close()


def test_what_a_late_reply_reserved_in_an_advance_is_given_back_by_who_writes_there_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings(tmp_path, memory=MEMORY)) as daemon:
        one, receive, kept = Engine(daemon.settings.socket), Channel.receive, list[int]()
        one.save()

        def late(self: Channel, request_ids: Sequence[int], until: float) -> list[protocol.Reply]:
            receive(self, request_ids, until)
            raise ServerTimeout("late")

        def others_ask() -> None:
            monkeypatch.setattr(Channel, "receive", receive)
            one.store.client.ask(protocol.Ping(), protocol.Done)  # as another thread does while this one copies
            kept.append(len(daemon.state.arena._writing))

        monkeypatch.setattr(Channel, "receive", late)
        one.copier.between = others_ask
        assert one.save(1).stored == 0
        assert kept
        assert min(kept) > 0, "places were free while a copy was on its way there"
        one.store.report()
        assert not daemon.state.arena._writing
        one.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_clients_do_no_byte_is_wrong_and_no_place_is_lost(tmp_path: Path, seed: int) -> None:
    """Saves, loads, pauses and ends in disorder, of engines that save in advances and of others; some are killed."""
    chance, limits = random.Random(seed), replace(Limits(), reserve_share=0.5)
    with serving(settings(tmp_path, memory=4 * prompt_bytes(), limits=limits, lease_s=2.0)) as daemon:
        engines, plain = [Engine(daemon.settings.socket) for _ in range(3)], store(daemon.settings.socket)
        for step in range(250):
            number, at = chance.randrange(12), chance.randrange(len(engines))
            what = chance.choice(["save", "save", "load", "plain", "threads", "child", "close", "wait"])
            if what == "save":
                engines[at].save(number)
            elif what == "load":
                engines[at].loads(number)  # `verify` compares every byte
            elif what == "plain":
                plain.save(prompt(number), truth, points=POINTS)
            elif what == "threads":
                both = [threading.Thread(target=each.save, args=(number + i,)) for i, each in enumerate(engines[:2])]
                for thread in both:
                    thread.start()
                for thread in both:
                    thread.join(60)
            elif what == "child" and not step % 4:
                killed_in_a_save(daemon.settings.socket, number, chance.random() * 0.02)
            elif what == "close":
                engines[at].store.close()
            elif what == "wait" and not step % 16:
                time.sleep(ADVANCE_S * chance.random())
        assert daemon.state.counts["memory damaged"] == 0
        for each in engines:
            each.store.close()
        plain.close()
        assert within(10, lambda: books_balance(daemon))


def killed_in_a_save(socket: Path, number: int, after_s: float) -> None:
    """A process that saves again and again, and is killed."""
    child = os.fork()
    if not child:
        try:
            one = Engine(socket)
            while True:
                one.save(number)
                number += 1
        finally:
            os._exit(0)
    time.sleep(0.05 + after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

"""Leases have a share of the arena, so that others find room to write; and finding it takes no time."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import OverLimit
from kvweave.server import Daemon, Disk, Limits, RemoteStore, protocol
from kvweave.server.protocol import packed
from kvweave.server.shared_arena import SharedArena
from kvweave.store import DiskTier, Quota, TierPolicy, TierStack
from kvweave.store.catalog import Catalog
from kvweave.store.keys import tenant_id
from tests.server.models import POINTS, SCHEMA, prompt, prompt_bytes, serving, settings, store, verify
from tests.store.models import truth


def test_lookups_without_a_lease_hold_nothing_and_load_all_the_same(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        hit = client.lookup(prompt(0), lease=False)
        assert (hit.position, hit.lease) == (1024, 0)
        assert daemon.report().clients[0].leased_bytes == 0
        assert client.load(hit, verify) == 1024
        client.close()


def test_honest_lookups_never_hold_the_whole_arena(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=12 * prompt_bytes())) as daemon:
        readers = [store(tmp_path / "kv.sock") for _ in range(4)]
        for number in range(10):
            readers[0].save(prompt(number), truth, points=POINTS)
        hits = [(reader, reader.lookup(prompt(number))) for reader in readers for number in range(10)]
        assert all(hit.position == 1024 for _, hit in hits), "found, with a lease or without"
        arena = daemon.state.arena.num_bytes
        held = [client.leased_bytes for client in daemon.report().clients]
        assert 0 < max(held) <= arena // 4
        assert sum(held) <= arena // 2
        writer = store(tmp_path / "kv.sock")
        began = time.monotonic()
        assert writer.save(prompt(100), truth, points=POINTS).dropped == 0
        assert time.monotonic() - began < 2, "it did not wait for anybody's lease"
        for reader, hit in hits[:3]:
            assert reader.load(hit, verify) == 1024
        for each in (*readers, writer):
            each.close()


EVERYTHING = packed([(shard, chunk) for shard in range(len(SCHEMA.shards)) for chunk in range(4)], "<i4")


def fetch(client: RemoteStore, number: int, lease: int) -> protocol.Reply:
    """All of a prompt, under a lease."""
    reply, _ = client._prompt_session.ask(prompt(number), lambda sequence: protocol.Fetch(sequence, lease, EVERYTHING))
    return reply


def reserve(client: RemoteStore, number: int, shard: int) -> None:
    """One piece of a prompt."""
    one, reservation = packed([(shard, 0)], "<i4"), client.client.number()
    client._prompt_session.ask(prompt(number), lambda sequence: protocol.Reserve(sequence, reservation, one))


def test_fetches_of_one_connection_never_hold_more_than_its_share(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=12 * prompt_bytes())) as daemon:
        greedy, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        for number in range(10):
            greedy.save(prompt(number), truth, points=POINTS)
        replies = [fetch(greedy, number, lease) for number, lease in enumerate([7, 7, 8, 9, 10, 11, 12, 13, 14, 15])]
        assert {type(reply) for reply in replies} == {protocol.Places, protocol.Failed}
        arena = daemon.state.arena.num_bytes
        assert 0 < max(client.leased_bytes for client in daemon.report().clients) <= arena // 4
        began = time.monotonic()
        assert writer.save(prompt(100), truth, points=POINTS).dropped == 0
        assert time.monotonic() - began < 2, "it did not wait for anybody's lease"
        greedy.client.ask(protocol.Release([7, 8, 9]), protocol.Done)
        assert isinstance(fetch(greedy, 9, 16), protocol.Places), "what was released can be leased again"
        greedy.close()
        writer.close()


def test_fetches_of_all_connections_leave_room_to_write_and_are_served_all_the_same(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=12 * prompt_bytes())) as daemon:
        readers = [store(tmp_path / "kv.sock") for _ in range(6)]
        for number in range(10):
            readers[0].save(prompt(number), truth, points=POINTS)
        replies = [fetch(reader, 2 * i + j, 7 + j) for i, reader in enumerate(readers[:5]) for j in range(2)]
        assert {type(reply) for reply in replies} == {protocol.Places}
        arena = daemon.state.arena.num_bytes
        held = sum(client.leased_bytes for client in daemon.report().clients)
        assert arena // 2 < held <= arena * 3 // 4
        began, writer = time.monotonic(), readers[-1]
        assert writer.load(writer.lookup(prompt(9)), verify) == 1024, "it needs no lease"
        assert writer.save(prompt(100), truth, points=POINTS).dropped == 0
        assert time.monotonic() - began < 2, "it did not wait for anybody's lease"
        for each in readers:
            each.close()
        until_nothing_is_leased(daemon)


def until_nothing_is_leased(daemon: Daemon) -> None:
    until = time.monotonic() + 10
    while daemon.state.leased.held_bytes and time.monotonic() < until:
        time.sleep(0.01)
    leased = daemon.state.leased
    assert (leased.held_bytes, leased.permanent_bytes) == (0, 0), "what is charged is given back"


def test_a_pinned_lease_does_not_grow_beyond_the_share_of_fetches(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=12 * prompt_bytes())) as daemon:
        client = store(tmp_path / "kv.sock")
        for number in range(10):
            client.save(prompt(number), truth, points=POINTS)
        pin = client.pin(client.lookup(prompt(0), lease=False))
        again = client.client.ask(protocol.PinLeases([pin.lease] * 2), protocol.Alive)
        assert again.leases == [pin.lease]
        assert daemon.state.leased.permanent_bytes == daemon.state.leased.held_bytes > 0, "however often it is pinned"
        for number in range(1, 10):
            fetch(client, number, pin.lease)
        assert daemon.report().clients[0].leased_bytes <= prompt_bytes() + daemon.state.arena.num_bytes // 4
        client.close()
        until_nothing_is_leased(daemon)


def test_pins_of_all_connections_leave_room_to_load_and_to_save(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=12 * prompt_bytes(), disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        clients = [store(tmp_path / "kv.sock") for _ in range(6)]
        for number in range(40):
            assert clients[0].save(prompt(number), truth, points=POINTS).dropped == 0
        assert clients[0].flush()
        pinned = [pinned_by(each, range(6 * at, 6 * at + 6)) for at, each in enumerate(clients[:5])]
        assert pinned[0], "some can be pinned"
        assert not pinned[-1], "all that may be pinned is"
        held = sum(each.leased_bytes for each in daemon.report().clients)
        assert daemon.state.arena.num_bytes // 3 < held <= daemon.state.arena.num_bytes // 2
        reader, began = clients[-1], time.monotonic()
        for number in range(30, 40):
            assert reader.load(reader.lookup(prompt(number)), verify) == 1024
        assert reader.save(prompt(100), truth, points=POINTS).dropped == 0
        assert time.monotonic() - began < 2, "it did not wait for anybody"
        for each in clients:
            each.close()
        until_nothing_is_leased(daemon)


def pinned_by(client: RemoteStore, numbers: range) -> int:
    """How many of these prompts a client could pin."""
    for count, number in enumerate(numbers):
        try:
            assert client.pin(client.lookup(prompt(number), lease=False)).position == 1024
        except OverLimit:
            return count
    return len(numbers)


def test_single_blobs_are_not_reserved_beyond_the_share_either(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=12 * prompt_bytes())) as daemon:
        client = store(tmp_path / "kv.sock")
        for number in range(40):
            for shard in range(len(SCHEMA.shards)):
                reserve(client, number, shard)
        assert 0 < daemon.report().clients[0].reserved_bytes <= daemon.state.arena.num_bytes // 4
        client.close()


def test_saves_and_loads_of_one_client_wait_for_each_other_and_are_not_refused(tmp_path: Path) -> None:
    """Each alone takes what a connection may hold."""
    backing = TierStack((DiskTier(tmp_path / "disk", 64 << 20), TierPolicy(write="back", deadline_s=60)))
    with serving(settings(tmp_path, memory=4 * prompt_bytes()), backing):
        client = store(tmp_path / "kv.sock")
        saves = [client.submit_save(prompt(number), truth, points=POINTS) for number in range(12)]
        assert sum(save.result().dropped for save in saves) == 0
        assert client.flush()
        hits = [client.lookup(prompt(number), lease=False) for number in range(12)]
        loads = [client.submit_load(hit, verify) for hit in hits]
        assert [load.result() for load in loads] == [1024] * 12
        assert client.unreachable == 0
        client.close()


def test_what_is_given_back_can_be_leased_again(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=8 * prompt_bytes(), limits=Limits(lease_share=0.125))) as daemon:
        client = store(tmp_path / "kv.sock")
        for number in range(4):
            client.save(prompt(number), truth, points=POINTS)
        for _ in range(3):
            hits = [client.lookup(prompt(number)) for number in range(4)]
            assert [bool(hit.lease) for hit in hits] == [True, False, False, False]
            for hit in hits:
                client.release(hit)
        assert daemon.state.leased.held_bytes == 0
        client.close()


def test_a_tenant_cannot_beat_its_limit_by_leases_and_claims_of_damage(tmp_path: Path) -> None:
    quotas = {"greedy": Quota(limit_bytes=2 * prompt_bytes())}
    with serving(settings(tmp_path, memory=16 * prompt_bytes(), quotas=quotas)) as daemon:
        client = store(tmp_path / "kv.sock")
        arena = daemon.state.arena
        for number in range(6):
            mine = prompt(number, "greedy")
            client.save(mine, truth, points=POINTS)
            hit = client.lookup(mine)
            for at in hit.places[hit.places >= 0].tolist():
                client.client.arena[at + 100] ^= 1
            everything = packed([(shard, chunk) for shard in range(len(SCHEMA.shards)) for chunk in range(4)], "<i4")
            client._prompt_session.ask(mine, lambda sequence, what=everything: protocol.Damaged(sequence, what))  # type: ignore[misc]
            assert (arena.stats().used_bytes or 0) <= quotas["greedy"].limit_bytes  # type: ignore[operator]
        client.close()


def filled(pages: int) -> tuple[SharedArena, list[bytes]]:
    """An arena that is full, and its keys."""
    arena, keys = SharedArena(pages * 4096), [number.to_bytes(48, "big") for number in range(pages)]
    for key, start in zip(keys, arena.reserve(keys, [4096] * pages).tolist(), strict=True):
        arena.commit(key, start, 4096)
    return arena, keys


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one whenever all entries are searched for the next ones to evict."""
    counts, real = list[object](), Catalog._least

    def counted(self: Catalog, *scope: object) -> object:
        counts.append(scope)
        return real(self, *scope)  # type: ignore[arg-type]

    monkeypatch.setattr(Catalog, "_least", counted)
    return counts


def test_a_reservation_looks_at_all_entries_once_not_once_for_each_piece(looks: list[object]) -> None:
    """102,400 leased entries, 2,000 pieces: 2,000 looks took 7 s, in which nobody was answered."""
    arena, keys = filled(8192)
    arena.pin(keys)
    wanted = [number.to_bytes(48, "big") for number in range(10_000, 12_000)]
    assert (arena.reserve(wanted, [4096] * len(wanted)) == protocol.NO_ROOM).all()
    assert len(looks) <= 2
    one = arena.pin(keys[:1])
    arena.unpin(one.slots)
    arena.unpin(one.slots)
    assert np.count_nonzero(arena.reserve(wanted, [4096] * len(wanted)) >= 0) == 1
    assert len(looks) <= 5
    arena.close()


def test_one_look_at_all_entries_serves_as_many_evictions_as_a_sixteenth_of_them(looks: list[object]) -> None:
    """Threads that run during its sort wait for the tier's lock, and the event loop then waits for them."""
    arena, _ = filled(2048)
    for number in range(10_000, 10_240):
        assert arena.reserve([number.to_bytes(48, "big")], [4096]).min() >= 0
    assert len(looks) == 2
    arena.close()


def test_a_key_that_is_pinned_twice_is_kept_until_it_is_unpinned_twice() -> None:
    arena, keys = filled(1)
    pinned, wanted = arena.pin([keys[0], keys[0]]), [bytes(47) + b"x"]
    arena.unpin(pinned.slots[:1])
    assert arena.reserve(wanted, [4096]).tolist() == [protocol.NO_ROOM]
    arena.unpin(pinned.slots[1:])
    assert arena.reserve(wanted, [4096]).min() >= 0
    arena.close()


def test_while_entries_are_pinned_no_other_thread_runs() -> None:
    """It would wait for the lock, have it next, and hold up the event loop."""
    arena, keys = filled(32)
    begin, ran, before = threading.Event(), list[bool](), sys.getswitchinterval()
    thread = threading.Thread(target=lambda: ran.append(begin.wait()))
    thread.start()
    time.sleep(0.05)  # it waits
    sys.setswitchinterval(100.0)
    try:
        begin.set()
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            arena.unpin(arena.pin(keys).slots)
        assert not ran
    finally:
        sys.setswitchinterval(before)
        thread.join()
        arena.close()


def test_what_rose_above_its_floor_by_a_reservation_can_be_evicted() -> None:
    page, floor = 4096, Quota(floor_bytes=2 * 4096)
    arena = SharedArena(5 * page, quotas={"floor": floor})
    mine = [tenant_id("floor") + bytes([number]) * 40 for number in range(3)]
    theirs = [tenant_id("other") + bytes([number]) * 40 for number in range(3)]
    for key in (*mine[:2], *theirs[:2]):
        (start,) = arena.reserve([key], [page]).tolist()
        arena.commit(key, start, page)
    arena.pin(theirs[:2])
    assert arena.reserve(theirs[2:], [2 * page]).tolist() == [protocol.NO_ROOM], "one is free, the others are kept"
    assert arena.reserve(mine[2:], [page]).min() >= 0
    assert arena.reserve(theirs[2:], [page]).min() >= 0, "of three, one is above the floor"
    arena.close()

"""Tiers behind the arena: restarts, what does not fit in memory, damage, and tiers that hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave.errors import BadRequest, TierError
from kvweave.server import Daemon, Disk, RemoteStore, protocol
from kvweave.store import DictTier, DiskTier, TierPolicy, TierStack
from kvweave.store.keys import Bytes
from kvweave.store.tier import ALL, Blob, ChecksumObserver, KeyFilter
from tests.server.models import POINTS, SCHEMA, prompt, prompt_bytes, serving, settings, store, verify
from tests.server.test_leases import until
from tests.store.models import truth
from tests.store.test_jobs import SlowWrites
from tests.store.test_unreadable import Sectors, place


def disk(folder: Path) -> dict[str, Any]:
    return {"disk": Disk(folder / "disk", 64 << 20)}


def dropped_from_memory(daemon: Daemon, client: RemoteStore) -> None:
    assert client.flush()
    arena = daemon.state.arena
    arena.delete(arena.keys())


def test_a_restart_serves_what_was_saved(tmp_path: Path) -> None:
    client = None
    for number in range(3):
        with serving(settings(tmp_path, **disk(tmp_path))):
            client = client or store(tmp_path / "kv.sock")  # the same client: it connects anew
            for earlier in range(number):
                assert client.load(client.lookup(prompt(earlier)), verify) == 1024
            assert client.save(prompt(number), truth, points=POINTS).dropped == 0
    assert client is not None
    assert client.lookup(prompt(0)).position == 0  # nobody is there
    assert client.unreachable > 0
    client.close()


def test_nothing_is_refused_after_a_restart_with_a_smaller_arena(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk", 64 << 20)
    with serving(settings(tmp_path, memory=32 * prompt_bytes(), disk=disk)):
        client = store(tmp_path / "kv.sock")
        assert client.save(prompt(0), truth, points=POINTS).dropped == 0
        client.submit_save(prompt(1), truth, points=POINTS).result()
    for memory in (3 * prompt_bytes(), 2 * prompt_bytes()):
        with serving(settings(tmp_path, memory=memory, disk=disk)):
            number = memory
            assert client.save(prompt(number), truth, points=POINTS).dropped == 0
            assert client.submit_load(client.lookup(prompt(0)), verify).result() == 1024
            assert client.unreachable == 0
    client.close()


def test_a_stop_writes_what_only_memory_holds(tmp_path: Path) -> None:
    with serving(settings(tmp_path, **disk(tmp_path))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        assert client.flush()
        tier = daemon.state.backing.executors[0].tier
        assert tier.delete(daemon.state.arena.keys()) > 0  # as if its queue had been full
        client.close()
    with serving(settings(tmp_path, **disk(tmp_path))):
        client = store(tmp_path / "kv.sock")
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_what_left_memory_is_brought_back_from_disk(tmp_path: Path) -> None:
    with serving(settings(tmp_path, **disk(tmp_path))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        hit = client.lookup(prompt())
        assert hit.position == 1024
        assert (hit.places == protocol.NOT_IN_ARENA).all()
        assert client.load(hit, verify) == 1024
        assert (client.lookup(prompt()).places >= 0).any()  # and it is near now
        client.close()


def test_a_prefetch_makes_the_load_find_everything_near(tmp_path: Path) -> None:
    with serving(settings(tmp_path, **disk(tmp_path))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        assert client.prefetch(client.lookup(prompt())).result(10) == 1024
        before = daemon.report().tiers[1].hits
        assert client.load(client.lookup(prompt()), verify) == 1024
        assert daemon.report().tiers[1].hits == before
        client.close()


def test_a_prompt_larger_than_the_arena_passes_through_it(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=prompt_bytes() // 2, **disk(tmp_path))):
        client = store(tmp_path / "kv.sock")
        assert client.save(prompt(), truth, points=POINTS).dropped == 0
        client.flush()
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def damage(folder: Path) -> None:
    path = folder / "blobs-0"
    blobs = bytearray(path.read_bytes())
    blobs[5000::4096] = bytes(byte ^ 1 for byte in blobs[5000::4096])
    path.write_bytes(blobs)


def test_damage_on_disk_is_a_miss_that_never_comes_into_memory(tmp_path: Path) -> None:
    with serving(settings(tmp_path, **disk(tmp_path))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        damage(tmp_path / "disk")
        assert client.load(client.lookup(prompt()), verify) == 0
        assert [tier.damaged for tier in daemon.report().tiers] == [0, daemon.report().tiers[1].misses]
        assert daemon.report().tiers[1].damaged > 0
        assert client.save(prompt(), truth, points=POINTS).dropped == 0
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_damage_in_one_tier_leaves_the_copies_of_the_others(tmp_path: Path) -> None:
    near, backing = DiskTier(tmp_path / "disk", 64 << 20), DictTier()
    policy = TierPolicy(write="back")
    with serving(settings(tmp_path), TierStack((near, policy), (backing, policy))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        damage(tmp_path / "disk")
        kept = len(backing.blobs)
        assert client.load(client.lookup(prompt()), verify) == 0  # only now it is known
        assert len(backing.blobs) == kept
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_what_the_disk_tier_sums_on_the_way_is_not_summed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(data: Bytes) -> int:
        raise AssertionError(f"{len(data)} bytes are read once more")

    with serving(settings(tmp_path, **disk(tmp_path))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        monkeypatch.setattr("kvweave.store.checksums.checksum", again)
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


class Hanging(DictTier):
    """A tier that answers nothing while it hangs, or only cannot give."""

    def __init__(self, *, gives: bool = True) -> None:
        super().__init__("hanging")
        self.going, self.giving = threading.Event(), threading.Event()
        self.going.set()
        if gives:
            self.giving.set()

    def contains(self, keys: Sequence[bytes]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        self.going.wait()
        return super().contains(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        self.going.wait()
        self.giving.wait()
        return super().get(keys, into, observer)

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        self.going.wait()
        return super().put(keys, blobs)


def test_a_tier_that_hangs_stalls_nobody_else(tmp_path: Path) -> None:
    tier = Hanging()
    backing = TierStack((tier, TierPolicy(write="back", deadline_s=0.3, queue_jobs=2, cool_s=0.2)))
    with serving(settings(tmp_path, drain_s=2.0), backing) as daemon:
        client, other = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        client.flush()
        tier.going.clear()
        waits: list[float] = []
        asking = threading.Thread(target=lambda: [client.lookup(prompt(number)) for number in range(1, 5)])
        asking.start()
        while asking.is_alive():
            began = time.monotonic()
            assert other.load(other.lookup(prompt()), verify) == 1024  # memory answers
            other.client.ask(protocol.Ping(), protocol.Done)
            waits.append(time.monotonic() - began)
        assert max(waits) < 0.25, "the loop waited for the tier"
        for number in range(5, 12):  # and saves go on, without it
            assert other.save(prompt(number), truth).dropped == 0
        assert other.lookup(prompt(11)).position == 1024
        assert daemon.report().tiers[1].open
        tier.going.set()
        client.close()
        other.close()


def test_a_late_answer_is_written_to_its_own_place_only(tmp_path: Path) -> None:
    tier = Hanging(gives=False)
    backing = TierStack((tier, TierPolicy(write="back", deadline_s=0.2, failures=99)))
    with serving(settings(tmp_path, memory=3 * prompt_bytes(), drain_s=2.0), backing) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        hit = client.lookup(prompt(0))
        assert client.load(hit, verify, budget_s=0.5) == 0
        for number in range(1, 9):  # the arena is written over and over, while the job still hangs
            client.save(prompt(number), truth, points=POINTS)
        tier.giving.set()
        client.flush()
        for number in range(9):
            hit = client.lookup(prompt(number))
            assert client.load(hit, verify) == hit.position
        client.close()


def test_tenants_keep_their_floors_and_can_be_cleared_apart(tmp_path: Path) -> None:
    from kvweave.store import Quota
    from kvweave.store.keys import tenant_id

    room = 4 * prompt_bytes()
    quotas = {"quiet": Quota(floor_bytes=2 * prompt_bytes())}
    with serving(settings(tmp_path, memory=room, quotas=quotas)):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0, "quiet"), truth, points=POINTS)
        for number in range(1, 12):
            assert client.save(prompt(number, "noisy"), truth, points=POINTS).dropped == 0
        assert client.load(client.lookup(prompt(0, "quiet")), verify) == 1024
        assert client.lookup(prompt(0, "noisy")).position == 0
        cleared = client.client.ask(protocol.Clear(tenant_id("noisy")), protocol.ClearReply)
        assert cleared.entries > 0
        assert client.lookup(prompt(11, "noisy")).position == 0
        client.release(hit := client.lookup(prompt(0, "quiet")))
        assert hit.position == 1024
        with pytest.raises(BadRequest, match="no engine has registered the model 'nobody'"):
            client.client.ask(protocol.Clear(model="nobody"), protocol.ClearReply)
        assert client.client.ask(protocol.Clear(model="hybrid"), protocol.ClearReply).entries > 0
        assert client.report().tiers[0].tier.used_bytes == 0
        client.close()


class Failing(DictTier):
    """A tier that raises while it is down."""

    def __init__(self) -> None:
        super().__init__("failing")
        self.down = False

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        if self.down:
            raise TierError("down")
        return super().put(keys, blobs)

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        if self.down:
            raise TierError("down")
        return super().clear(key_filter)


def test_a_tier_that_failed_is_written_again_though_saves_never_paused(tmp_path: Path) -> None:
    tier = Failing()
    backing = TierStack((tier, TierPolicy(write="back", retries=0, cool_s=0.3)))
    with serving(settings(tmp_path), backing) as daemon:
        client, numbers = store(tmp_path / "kv.sock"), iter(range(10_000))

        def saves_until(open_: bool) -> None:
            until = time.monotonic() + 10
            while daemon.report().tiers[1].open != open_:
                assert time.monotonic() < until
                client.save(prompt(next(numbers)), truth)
                time.sleep(0.02)  # far more often than it is tried

        tier.down = True
        saves_until(open_=True)
        tier.down = False
        saves_until(open_=False)
        assert tier.blobs
        client.close()


def test_clearing_empties_every_tier_and_names_those_that_could_not_be(tmp_path: Path) -> None:
    near, failing = DictTier("near"), Failing()
    policy = TierPolicy(write="back", retries=0, cool_s=0.01)
    with serving(settings(tmp_path), TierStack((near, policy), (failing, policy))):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)  # still queued when the question comes
        failing.down = True
        cleared = client.client.ask(protocol.Clear(), protocol.ClearReply)
        assert [tier.name for tier in cleared.tiers] == ["memory", "near", "failing"]
        assert cleared.tiers[0].entries == cleared.tiers[1].entries > 0
        assert cleared.kept_by == {"failing": "down"}
        assert not near.blobs
        failing.down = False
        time.sleep(0.02)
        assert client.client.ask(protocol.Clear(), protocol.ClearReply).kept_by == {}
        assert not failing.blobs
        assert client.lookup(prompt()).position == 0
        client.close()


def test_a_tier_that_hangs_is_named_when_the_time_for_clearing_is_over(tmp_path: Path) -> None:
    class Slow(Hanging):
        def clear(self, key_filter: KeyFilter = ALL) -> int:
            self.going.wait()
            return super().clear(key_filter)

    tier = Slow()
    with serving(settings(tmp_path, drain_s=2.0), TierStack((tier, TierPolicy(write="back", deadline_s=0.1)))):
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        client.flush()
        tier.going.clear()
        cleared = client.client.ask(protocol.Clear(wait_s=0.3), protocol.ClearReply)
        assert cleared.tiers[0].entries > 0
        assert cleared.kept_by == {"hanging": "not finished yet"}
        tier.going.set()
        client.close()


def test_as_many_blobs_as_a_tier_can_bring_together_are_asked_for_at_once(tmp_path: Path) -> None:
    class Counting(DictTier):
        asked: list[int] = []

        def get(
            self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()
        ) -> list[int]:
            self.asked.append(len(keys))
            return super().get(keys, into, observer)

    tier = Counting()
    with serving(settings(tmp_path), TierStack((tier, TierPolicy(write="back")))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        assert client.load(client.lookup(prompt()), verify) == 1024
        assert sum(tier.asked) == daemon.report().tiers[1].hits
        assert len(tier.asked) == 1
        client.close()


def test_one_unreadable_sector_of_the_disk_costs_its_chunk_and_is_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sectors = Sectors(monkeypatch)
    with serving(settings(tmp_path, **disk(tmp_path))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        tier = daemon.state.backing.executors[0].tier._tier  # type: ignore[attr-defined]
        shard = next(number for number, shard in enumerate(SCHEMA.shards) if shard.tag == "full")
        broken = place(tier, prompt().keys(SCHEMA.ids)[2 * len(SCHEMA.shards) + shard])
        sectors.bad = lambda start, end: start <= broken < end
        assert client.load(client.lookup(prompt()), verify) == 512
        assert client.save(prompt(), truth, points=POINTS).stored == 1
        dropped_from_memory(daemon, client)
        assert client.load(client.lookup(prompt()), verify) == 1024
        assert daemon.report().tiers[1].damaged == 1
        client.close()


def test_writers_that_wait_for_a_tier_take_no_readers_place(tmp_path: Path) -> None:
    tier = SlowWrites()
    policy = TierPolicy(write="back", queue_jobs=1, deadline_s=20)
    with serving(settings(tmp_path, memory=64 << 20), TierStack((tier, policy))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(0), truth, points=POINTS)
        dropped_from_memory(daemon, client)
        tier.go.clear()
        writers = [store(tmp_path / "kv.sock", workers=1) for _ in range(24)]
        saves = [
            threading.Thread(target=writer.save, args=(prompt(1 + number), truth), kwargs={"points": [256]})
            for number, writer in enumerate(writers)
        ]
        for save in saves:
            save.start()
        until(lambda: daemon.state._threads["write"]._work_queue.qsize() > 0)
        began = time.monotonic()
        assert client.load(client.lookup(prompt(0)), verify) == 1024
        assert time.monotonic() - began < 10
        tier.go.set()
        for save in saves:
            save.join()
        for each in (*writers, client):
            each.close()


def test_a_lookup_counts_as_a_hit_in_the_arena_and_on_disk(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", 4 << 20)
    with serving(settings(tmp_path), TierStack(tier)) as daemon, store(tmp_path / "kv.sock") as client:
        client.save(prompt(), truth, points=POINTS)
        assert client.flush()
        assert client.lookup(prompt()).position
        client.client.ask(protocol.Ping(), protocol.Done)  # hits are counted after the reply
        assert daemon.state.arena._catalog.hits.max() == tier._catalog.hits.max() == 1


def test_two_clients_that_want_one_blob_share_one_read(tmp_path: Path) -> None:
    read, both = list[bytes](), threading.Barrier(2)

    class Slow(DictTier):
        def get(self, keys: Sequence[bytes], *more: Any) -> list[int]:
            read.extend(keys)
            time.sleep(0.3)
            return super().get(keys, *more)

    with serving(settings(tmp_path), TierStack((Slow(), TierPolicy(write="back")))) as daemon:
        clients = [store(tmp_path / "kv.sock") for _ in range(2)]
        assert clients[0].save(prompt(), truth, points=POINTS).dropped == 0
        assert clients[0].flush()
        daemon.state.arena.clear()

        def load(client: RemoteStore) -> int:
            hit = client.lookup(prompt())
            both.wait(10)
            return client.load(hit, verify)

        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(load, clients)] == [1024, 1024]
        assert len(read) == len({*read}) > 0
        for client in clients:
            client.close()

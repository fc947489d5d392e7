"""More than fits: room is made on demand, for everybody, and no store is dropped while something may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvweave.server import Disk
from kvweave.server.backing_tiers import BackingTiers
from kvweave.server.shared_arena import SharedArena
from kvweave.store import DictTier, Saved, TierPolicy, TierStack
from kvweave.store.tier import Blob
from kvweave.store.tier_stack import BlobRequest, Budget
from tests.server.models import POINTS, prompt, prompt_bytes, serving, settings, store, verify
from tests.store.models import truth
from tests.store.servers import wait_until

CLIENTS, EACH = 4, 12


def test_four_times_the_arena_offered_at_once_drops_nothing(tmp_path: Path) -> None:
    room = CLIENTS * EACH * prompt_bytes() // 4
    with serving(settings(tmp_path, memory=room)) as daemon:
        results: list[Saved] = []

        def work(first: int) -> None:
            client = store(tmp_path / "kv.sock")
            for number in range(first, first + EACH):
                results.append(client.save(prompt(number), truth, points=POINTS))
                hit = client.lookup(prompt(number))
                assert client.load(hit, verify) == hit.position
            client.close()

        threads = [threading.Thread(target=work, args=(first * EACH,)) for first in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == CLIENTS * EACH
        assert sum(result.dropped for result in results) == 0
        tier = daemon.report().tiers[0].tier
        assert tier.evicted > 0
        assert (tier.used_bytes or 0) > 0.9 * room
        wait_until(lambda: not daemon.state.arena.is_held, "the daemon has seen that all connections ended")


def test_a_writer_waits_for_room_that_others_only_hold_for_a_moment(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=prompt_bytes())):
        reader, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        reader.save(prompt(0), truth, points=POINTS)
        hit = reader.lookup(prompt(0))
        timer = threading.Timer(0.3, reader.release, [hit])
        timer.start()
        assert writer.save(prompt(1), truth, points=[1024]).dropped == 0
        timer.join()
        reader.close()
        writer.close()


class SlowDisk(DictTier):
    """A disk that is never idle while there are sixteen writers, and always moves."""

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        time.sleep(0.2)
        return super().put(keys, blobs)


def test_nothing_is_dropped_while_the_disk_is_behind_and_moves(tmp_path: Path) -> None:
    """Sixteen writers at a queue of one: the last waits longer than the disk's deadline, and gets its turn."""
    tier, clients = SlowDisk(), 16
    policy = TierPolicy(write="back", queue_jobs=1, deadline_s=0.5)
    backing = TierStack((tier, policy))
    with serving(settings(tmp_path, memory=6 * prompt_bytes()), backing) as daemon:

        def work(number: int) -> int:
            with store(tmp_path / "kv.sock") as client:
                return client.save(prompt(number), truth, points=POINTS).dropped

        with ThreadPoolExecutor(clients) as threads:
            dropped = [*threads.map(work, range(clients))]
        assert backing.flush(30)
        assert sum(dropped) == 0
        assert [each.drops for each in daemon.report().tiers] == [{}, {}]
        assert len(tier.blobs) == daemon.report().tiers[0].stored


def test_what_was_committed_is_not_evicted_before_it_is_queued_for_the_disk(tmp_path: Path) -> None:
    """The threads that queue are busy: the blobs wait, and other saves would take their places."""
    tier, busy = DictTier("disk"), threading.Event()
    backing = TierStack((tier, TierPolicy(write="back")))
    with serving(settings(tmp_path, memory=2 * prompt_bytes()), backing) as daemon:
        writers = daemon.state._threads["write"]
        for _ in range(writers._max_workers):
            writers.submit(busy.wait, 30)
        clients = [store(tmp_path / "kv.sock") for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            saves = [
                threads.submit(each.save, prompt(number), truth, points=POINTS) for number, each in enumerate(clients)
            ]
            time.sleep(0.5)
            busy.set()
            saved = [each.result(30) for each in saves]
        assert backing.flush(30)
        assert sum(each.dropped for each in saved) == 0
        assert len(tier.blobs) == sum(each.stored for each in saved)
        for each in clients:
            each.close()


def test_room_that_is_freed_just_after_a_reservation_failed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings(tmp_path, memory=prompt_bytes())) as daemon:
        reader, writer = store(tmp_path / "kv.sock"), store(tmp_path / "kv.sock")
        reader.save(prompt(0), truth, points=POINTS)
        held, real = [daemon.state.arena.pin(daemon.state.arena.keys()).slots], SharedArena.reserve

        def reserve(arena: SharedArena, keys: Sequence[bytes], lengths: Sequence[int]) -> object:
            starts = real(arena, keys, lengths)
            if held:
                arena.unpin(held.pop())  # as a thread of the disk does, at the worst moment
            return starts

        monkeypatch.setattr(SharedArena, "reserve", reserve)
        began = time.monotonic()
        assert writer.save(prompt(1), truth, points=[1024]).dropped == 0
        assert time.monotonic() - began < 1.5, "it waited although there was room"
        reader.close()
        writer.close()


def test_a_prompt_on_disk_waits_for_room_in_the_arena_and_is_loaded_whole(tmp_path: Path) -> None:
    wish = settings(tmp_path, memory=2 * prompt_bytes(), disk=Disk(tmp_path / "disk", 64 << 20))
    with serving(wish) as daemon, store(tmp_path / "kv.sock") as client:
        for number in range(4):
            client.save(prompt(number), truth, points=POINTS)
        assert client.flush()
        arena = daemon.state.arena
        held = arena.pin(arena.keys()).slots
        timer = threading.Timer(0.5, arena.unpin, [held])
        timer.start()
        assert client.load(client.lookup(prompt(0)), verify) == 1024
        assert client.stats().shortened == 0
        timer.join()
        assert not arena.is_held


@pytest.mark.parametrize(("place", "times"), [("arena", 1), ("disk", 1), ("disk", 5)])
def test_what_others_evict_between_a_fetch_and_its_lease_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, times: int
) -> None:
    """Blobs that came from disk, and those that were in the arena when the fetch began."""
    calls, real = list[int](), BackingTiers.fetch

    def fetch(backing: BackingTiers, wants: Sequence[BlobRequest], budget: Budget) -> bool:
        arrived = real(backing, wants, budget)
        calls.append(len(wants))
        if len(calls) <= times:
            here, mine = backing._arena.keys(), {want.key for want in wants}
            backing._arena.delete([key for key in here if (key in mine) == (place == "disk")])
        return arrived

    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        with store(tmp_path / "kv.sock") as client:
            client.save(prompt(0), truth, points=POINTS)
            assert client.flush()
            daemon.state.arena.delete(daemon.state.arena.keys()[::2])
            monkeypatch.setattr(BackingTiers, "fetch", fetch)
            assert client.load(client.lookup(prompt(0), lease=False), verify) == 1024
        assert len(calls) == times + 1

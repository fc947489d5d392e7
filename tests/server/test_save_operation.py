"""Batches of one save overlap: places for the next, copies, the commit of the one before. Nothing gets lost by it."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import OverLimit, StoreError
from kvweave.server import Daemon, RemoteStore, save_operation
from kvweave.server.byte_limiter import ByteLimiter, HeldBytes
from kvweave.server.channel import Channel
from kvweave.server.save_operation import ReservedBatch, SaveOperation
from kvweave.server.settings import Limits
from kvweave.server.write_requests import ROOM_S
from kvweave.store import HashedPrompt, Shard
from kvweave.store.keys import Bytes
from kvweave.store.operations import CancellableBudget, ChunkRef
from kvweave.store.tier_stack import UNLIMITED
from tests.server.models import LARGEST, POINTS, SCHEMA, prompt, prompt_bytes, serving, settings, store, verify
from tests.server.test_staged import computed, engine
from tests.store.models import fill, share, truth


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some pieces each."""
    monkeypatch.setattr(save_operation, "FIRST_BYTES", LARGEST // 2)
    monkeypatch.setattr(save_operation, "BATCH_BYTES", LARGEST)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which batches were reserved and committed, by their numbers, in order."""
    seen: list[tuple[str, int]] = []
    reserve, commit = SaveOperation._reserve, SaveOperation.commit

    def reserving(self: SaveOperation, *args: object, **how: bool) -> ReservedBatch:
        made = reserve(self, *args, **how)  # type: ignore[arg-type]
        seen.append(("reserved", made.number))
        return made

    def committing(self: SaveOperation, reserved: ReservedBatch, *args: object) -> bool:
        seen.append(("committed", reserved.number))
        return commit(self, reserved, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SaveOperation, "_reserve", reserving)
    monkeypatch.setattr(SaveOperation, "commit", committing)
    return seen


def test_batches_get_places_before_those_in_flight_are_written(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, 1024 // SCHEMA.chunk_tokens)
        copier.between = lambda: events.append(("copied", 0))
        assert client.save(prompt(), pages.source(made.table)).dropped == 0
        kinds = [kind for kind, _ in events]
        assert kinds.index("copied") > 1, "the second batch had no places when the first was copied"
        first = events.index(("committed", events[0][1]))
        assert "copied" in kinds[first:], "the first batch became visible when all was copied"
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_the_source_is_free_when_the_last_copy_is_done_and_before_the_last_commit(
    tmp_path: Path, events: list[tuple[str, int]]
) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        copier.between = lambda: events.append(("copied", 0))
        source = pages.source(made.table)
        pieces = client._to_keep(prompt(), source, None, None, 0)
        client._save(prompt(), source, pieces, UNLIMITED, lambda: events.append(("gathered", 0)))
        kinds = [kind for kind, _ in events]
        assert kinds.count("copied") > 4
        assert kinds[-3:] == ["copied", "gathered", "committed"]
        assert kinds.count("gathered") == 1
        client.close()


def test_what_one_call_copies_is_not_cut_by_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 1024 // SCHEMA.chunk_tokens
    monkeypatch.setattr(save_operation, "FIRST_BYTES", int(1.5 * chunks * LARGEST))
    monkeypatch.setattr(save_operation, "BATCH_BYTES", int(2.5 * chunks * LARGEST))
    with serving(settings(tmp_path, memory=64 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        source = pages.source(made.table)
        pieces = client._to_keep(prompt(), source, None, None, 0)
        assert client.save(prompt(), source).dropped == 0
        assert copier.calls == len({shard for shard, _ in pieces})
        client.close()


def batch_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the batches that are asked for, in order."""
    seen, real = list[int](), SaveOperation._try_reserve

    def reserving(self: SaveOperation, what: HashedPrompt, batch: list[ChunkRef], *args: object, **how: bool) -> object:
        seen.append(self._arena.num_bytes(batch))
        return real(self, what, batch, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(SaveOperation, "_try_reserve", reserving)
    return seen


def test_each_batch_is_twice_as_large_as_the_one_before_until_four_fill_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(Limits(), reserve_share=0.5)
    with serving(settings(tmp_path, memory=2 * prompt_bytes(), limits=limits)) as daemon:
        client = store(daemon.settings.socket)
        most = client.client.welcome.reserve_bytes // save_operation.BATCHES_IN_FLIGHT
        monkeypatch.setattr(save_operation, "FIRST_BYTES", LARGEST)
        monkeypatch.setattr(save_operation, "BATCH_BYTES", 1 << 30)
        seen = batch_bytes(monkeypatch)
        assert client.save(prompt(), truth).dropped == 0
        allowed = [min(LARGEST << number, most) for number in range(len(seen))]
        assert allowed[-2:] == [most, most], "it is a test of the share, too"
        assert all(bound - LARGEST < size <= bound for size, bound in zip(seen[1:-1], allowed[1:], strict=False))
        assert seen[0] <= LARGEST
        client.close()


def test_the_last_batch_from_a_gpu_is_small_unless_it_is_the_only_one_that_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_operation, "FIRST_BYTES", 1 << 30)
    monkeypatch.setattr(save_operation, "BATCH_BYTES", 1 << 30)
    monkeypatch.setattr(save_operation, "LAST_BYTES", LARGEST)
    with serving(settings(tmp_path, memory=64 << 20)) as daemon:
        client, (made, pages, _) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, 1024 // SCHEMA.chunk_tokens)
        seen = batch_bytes(monkeypatch)
        assert client.save(prompt(), pages.source(made.table)).dropped == 0
        assert len(seen) == 2
        assert seen[1] <= LARGEST < seen[0]
        gathered = client.gather(prompt(1), pages.source(made.table))
        assert gathered.failed == ()
        assert client.lookup(prompt(1)).position == 0
        assert gathered.commit().dropped == 0
        assert client.load(client.lookup(prompt(1)), verify) == 1024
        client.close()


def test_what_went_through_overlapping_batches_comes_back(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, _) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, 1024 // SCHEMA.chunk_tokens)
        assert client.save(prompt(), pages.source(made.table)).dropped == 0
        other, into, _ = engine()
        assert client.load(client.lookup(prompt()), into.sink(other.table)) == 1024
        for place, rows in computed().items():
            kept = slice(None) if place[1] == "full" else slice(-1, None)
            assert share(other)[place][kept] == rows[kept], place
        client.close()


@pytest.mark.parametrize("blobs", [2, 2.5, 4])
def test_a_save_does_not_wait_for_room_that_it_holds_itself(tmp_path: Path, blobs: float) -> None:
    limits = replace(Limits(), reserve_share=1.0)
    with serving(settings(tmp_path, memory=int(blobs * LARGEST), limits=limits)) as daemon:
        client, began = store(daemon.settings.socket), time.monotonic()
        assert client.save(prompt(), truth, points=POINTS).dropped == 0, "what is visible may be evicted"
        assert time.monotonic() - began < ROOM_S, "it waited for room until others free some"
        assert daemon.state.arena._evicted > 0, "it all fits: nothing had to wait"
        assert daemon.state.counts["memory no room"] == 0
        client.close()


def test_threads_of_one_connection_do_not_wait_for_each_others_batches(tmp_path: Path) -> None:
    limits = replace(Limits(), reserve_share=0.1)
    with serving(settings(tmp_path, memory=40 * LARGEST, limits=limits)) as daemon:
        client = store(daemon.settings.socket)
        began, saved = time.monotonic(), list[int]()
        threads = [
            threading.Thread(target=lambda i=i: saved.append(client.save(prompt(i), truth, points=[256]).dropped))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert saved == [0] * 4
        assert time.monotonic() - began < daemon.settings.lease_s / 2, "one waited until the lease of another ended"
        client.close()


def test_a_refusal_comes_after_what_was_in_flight_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, real = store(daemon.settings.socket), SaveOperation._reserve
        asked = list[int]()

        def refusing(self: SaveOperation, *args: object, **how: bool) -> ReservedBatch:
            asked.append(len(self._in_flight))
            if len(asked) > 2:
                raise OverLimit("no more")
            return real(self, *args, **how)  # type: ignore[arg-type]

        monkeypatch.setattr(SaveOperation, "_reserve", refusing)
        saved = client.save(prompt(), truth)
        assert asked[-1] == 0, "asked once more when nothing was in flight"
        assert saved.stored >= 2, "both batches are visible"
        assert saved.dropped > 0
        assert client.unreachable == 1, "it was told once"
        assert no_bytes_are_held(daemon, client)
        client.close()


def no_bytes_are_held(daemon: Daemon, client: RemoteStore) -> bool:
    client.report()  # what was posted before is served before
    return not client.client.reserving.held_bytes and not daemon.state.arena._writing


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_source_that_raises_leaves_earlier_batches_and_no_places(tmp_path: Path, at: int) -> None:
    calls = deque[int]()

    def breaking(shard: Shard, chunk: int) -> Bytes:
        calls.append(chunk)
        if len(calls) > at:
            raise RuntimeError("no such page")
        return truth(shard, chunk)

    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client = store(daemon.settings.socket)
        with pytest.raises(RuntimeError, match="no such page"):
            client.save(prompt(), breaking)
        assert no_bytes_are_held(daemon, client)
        assert client.save(prompt(), truth).dropped == 0
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_a_cancelled_operation_stops_waiting_for_others() -> None:
    limiter, budget = ByteLimiter(), CancellableBudget(None)
    first, second, large = HeldBytes(10), HeldBytes(1), HeldBytes(11)
    assert limiter.hold(first, 10, 60.0, UNLIMITED)
    assert not limiter.hold_now(second, 10)
    waiting = threading.Thread(target=limiter.hold, args=(second, 10, 60.0, budget))
    waiting.start()
    budget.cancelled.set()
    waiting.join(10)
    assert not waiting.is_alive()
    for held in (first, second):
        limiter.give_back(held)
    assert limiter.hold_now(large, 10), "one that is alone may be larger"


def test_what_is_copied_first_is_gathered_while_the_daemon_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, 1024 // SCHEMA.chunk_tokens)
        staged, receive = list[int](), Channel.receive

        def receiving(self: Channel, *args: Any) -> list[Any]:
            staged.append(copier.staged)
            return receive(self, *args)

        monkeypatch.setattr(Channel, "receive", receiving)
        assert client.save(prompt(), pages.source(made.table)).dropped == 0
        assert staged[0] == 1, "before the first reply"
        assert (copier.staged, copier.dropped) == (copier.calls, 0), "and not once more when it is copied"
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_what_was_gathered_for_pieces_that_are_present_is_dropped(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, 1024 // SCHEMA.chunk_tokens)
        source = pages.source(made.table)
        client.save(prompt(), source)
        before = copier.staged
        assert client.save(prompt(), source).present
        assert (copier.staged - before, copier.dropped) == (1, 1)
        client.close()


def test_nothing_is_gathered_ahead_of_what_pages_still_wait_for(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        copier.is_done = False
        copier.before = lambda: fill(SCHEMA, made, 1024 // SCHEMA.chunk_tokens)
        assert client.save(prompt(), pages.source(made.table)).dropped == 0
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


def test_a_page_that_is_not_there_is_an_error_also_when_it_is_gathered_ahead(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=16 << 20)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        tables = {name: table + (1 << 20) for name, table in made.table.items()}
        with pytest.raises(StoreError, match="names page"):
            client.save(prompt(), pages.source(tables))
        assert copier.calls == 0
        assert client.report().clients[0].reserved_bytes == 0
        client.close()

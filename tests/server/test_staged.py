"""Memory that is reached through staging memory, as a GPU's: payloads go straight into the arena and come straight out
of it, and only what is intact gets into pages. A copier of the host that stages stands in for the GPU's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvweave.copying import (
    PART_BYTES,
    BlockCopy,
    Gathering,
    HostPayloadCopier,
    Landing,
    PartChecksums,
    StagedCopier,
)
from kvweave.errors import BadCopy, StoreError
from kvweave.server import Daemon, RemoteStore, protocol
from kvweave.server.arena_copier import begin_landing, together
from kvweave.server.arena_writer import ArenaBlob
from kvweave.server.prompt_session import key_of
from kvweave.store import EngineMemory, PagePayloads, checksums
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes
from kvweave.store.page_payloads import StagedScatter
from tests.server.models import POINTS, SCHEMA, SPEC, prompt, serving, settings, store
from tests.store.models import Rank, fill, rank, share, truth

TOKENS = 1024


class StagingCopier(HostPayloadCopier):
    """Notes where payloads were, and lets a test do something between its two halves."""

    def __init__(self, pools: dict[str, Bytes]) -> None:
        super().__init__(pools)
        self.seen: list[Bytes] = []
        self.calls = self.staged = self.dropped = 0
        self.is_done = True
        self.before: Callable[[], None] = lambda: None
        self.between: Callable[[], None] = lambda: None
        self.behind: Callable[[], None] = lambda: None

    def after_caller(self) -> StagingCopier:
        return self

    def stage(self, copies: Iterable[BlockCopy], num_payloads: int, payload_bytes: int) -> HostStaged:
        staged = np.zeros((num_payloads, payload_bytes), np.uint8)
        self.gather(copies, staged.reshape(-1))
        self.staged += 1
        return HostStaged(self, staged)

    def wait_for_caller(self) -> None:
        self.before()

    def is_caller_done(self) -> bool:
        return self.is_done

    def begin_landing(self, copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
        self.seen += payloads
        self.calls += 1
        staged = np.concatenate(payloads)

        def land(is_intact: Callable[[Sequence[PartChecksums]], bool]) -> bool:
            self.between()
            fine = is_intact(sums(staged.reshape(len(payloads), -1)))
            if fine:
                self.scatter(copies, staged)
            return fine

        return land


class HostStaged:
    """`StagedPayloads`, copied by `finish`, so that a test can come before."""

    def __init__(self, copier: StagingCopier, staged: Bytes) -> None:
        self._copier, self._staged = copier, staged

    def begin_copy(self, payloads: Sequence[Bytes]) -> Gathering:
        copier, staged = self._copier, self._staged
        copier.seen += payloads
        copier.calls += 1

        def finish() -> list[PartChecksums]:
            copier.between()
            for payload, own in zip(payloads, staged, strict=True):
                payload[:] = own
            copier.behind()
            return sums(staged)

        return finish

    def drop(self) -> None:
        self._copier.dropped += 1


def sums(payloads: Bytes) -> list[PartChecksums]:
    """Of payloads `[payloads, bytes]`: all but the last part of each is summed."""
    found = []
    for payload in payloads:
        last = (checksums.num_parts(payload.nbytes) - 1) * PART_BYTES
        parts = (payload[at : at + PART_BYTES] for at in range(0, last, PART_BYTES))
        own = b"".join(xxhash.xxh3_64_intdigest(part.data).to_bytes(8, "little") for part in parts)
        found.append(PartChecksums(own, payload[last:]))
    return found


def engine() -> tuple[Rank, PagePayloads, StagingCopier]:
    made = rank(SCHEMA, SPEC, TOKENS, block_tokens=64)
    copier = StagingCopier(made.pools)
    assert isinstance(copier, StagedCopier)
    return made, PagePayloads(SCHEMA, EngineMemory.of_plan(made.plan, made.pools), copier), copier


def saved(daemon: Daemon) -> RemoteStore:
    client = store(daemon.settings.socket)
    assert client.save(prompt(), truth, points=POINTS).dropped == 0
    return client


def computed() -> dict[tuple[int, str, str], list[bytes]]:
    made, _, _ = engine()
    fill(SCHEMA, made, TOKENS // SCHEMA.chunk_tokens)
    return share(made)


@pytest.mark.parametrize("options", [{}, {"inbox": 1 << 20}], ids=["writable", "read-only"])
def test_payloads_come_straight_out_of_the_arena(tmp_path: Path, options: dict[str, int]) -> None:
    with serving(settings(tmp_path, **options)) as daemon:
        client, (made, pages, copier) = saved(daemon), engine()
        assert client.load(client.lookup(prompt()), pages.sink(made.table)) == TOKENS
        assert copier.seen
        assert all(np.shares_memory(payload, client.client.arena) for payload in copier.seen)
        for place, rows in computed().items():
            kept = slice(None) if place[1] == "full" else slice(-1, None)
            assert share(made)[place][kept] == rows[kept], place
        client.close()


def test_payloads_of_a_shard_come_by_one_call_up_to_the_size_that_the_copier_wants(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = saved(daemon), engine()
        assert client.load(client.lookup(prompt()), pages.sink(made.table)) == TOKENS
        assert copier.calls == len(SCHEMA.shards)
        copier.together_bytes, copier.calls, before = 1, 0, len(copier.seen)
        assert client.load(client.lookup(prompt()), pages.sink(made.table)) == TOKENS
        assert copier.calls == before == len(copier.seen) - before
        client.close()


def test_the_last_call_of_a_load_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.arena_copier.LAST_CALL_BYTES", 1)
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = saved(daemon), engine()
        counts, begin_landing = list[int](), copier.begin_landing

        def counted(copies: Iterable[BlockCopy], payloads: Sequence[Bytes]) -> Landing:
            counts.append(len(payloads))
            return begin_landing(copies, payloads)

        monkeypatch.setattr(copier, "begin_landing", counted)
        full = next(number for number, shard in enumerate(SCHEMA.shards) if shard.tag == "full")
        assert client.load(client.lookup(prompt()), pages.sink(made.table), shards=[full]) == TOKENS
        assert counts == [TOKENS // SCHEMA.chunk_tokens - 1, 1]
        client.close()


def test_where_payloads_go_is_worked_out_while_they_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = saved(daemon), engine()
        steps, begin_landing, sink_copies = list[str](), copier.begin_landing, pages.sink_copies
        monkeypatch.setattr(copier, "begin_landing", lambda *args: (steps.append("copy"), begin_landing(*args))[1])  # type: ignore[func-returns-value]
        monkeypatch.setattr(pages, "sink_copies", lambda *args: (steps.append("pages"), sink_copies(*args))[1])  # type: ignore[func-returns-value]
        assert client.load(client.lookup(prompt()), pages.sink(made.table)) == TOKENS
        assert steps[0] == "copy"
        assert "pages" in steps
        client.close()


def test_a_damaged_blob_gets_into_no_page_and_is_removed(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, _) = saved(daemon), engine()
        hit = client.lookup(prompt())
        full = [number for number, shard in enumerate(SCHEMA.shards) if shard.tag == "full"]
        client.client.arena[hit.places[full[0], 3] + 5000] ^= 1
        for pool in made.pools.values():
            pool[:] = 0x55
        assert client.load(hit, pages.sink(made.table)) == 512
        assert daemon.state.counts["memory damaged"] == 1
        assert (pages.source(made.table)(SCHEMA.shards[full[0]], 3) == 0x55).all(), "a page was written"
        client.close()


def test_what_was_overwritten_while_it_was_read_gets_into_no_page(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = saved(daemon), engine()
        hit = client.lookup(prompt())
        arena = client.client.arena

        def overwrite() -> None:
            arena[:] = 0xEE

        copier.between = overwrite
        assert client.load(hit, pages.sink(made.table)) == 0
        client.close()


def test_what_was_read_after_the_lease_is_lost_and_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, _) = saved(daemon), engine()
        hit, sink = client.lookup(prompt()), pages.sink(made.table)
        late = SimpleNamespace(monotonic=lambda: hit.until + 1.0)  # for the copies only: nothing else is late
        with monkeypatch.context() as patched:
            for module in ("arena_copier", "arena_reads"):
                patched.setattr(f"kvweave.server.{module}.time", late)
            assert client.load(hit, sink) == 0
        assert client.stats().unanswered == 0
        assert daemon.state.counts["memory damaged"] == 0
        assert client.load(client.lookup(prompt()), sink) == TOKENS
        client.close()


def test_what_is_intact_but_was_read_too_late_gets_into_no_page(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, _) = saved(daemon), engine()
        number = next(number for number, shard in enumerate(SCHEMA.shards) if shard.tag == "full")
        shard, place = SCHEMA.shards[number], int(client.lookup(prompt()).places[number, 0])
        blob = client.client.arena[place : place + blob_bytes(shard)]
        jobs, sink = [ArenaBlob(blob, shard, 0, key_of(prompt(), shard, 0))], pages.sink(made.table)
        assert isinstance(sink, StagedScatter)
        before = share(made)
        assert begin_landing(jobs, sink, time.monotonic() - 1)() == [False]
        assert share(made) == before
        assert begin_landing(jobs, sink, time.monotonic() + 60)() == [True]
        client.close()


@pytest.mark.parametrize(("size", "calls"), [(16, 1), (12, 4)])
def test_payloads_are_moved_together_if_they_are_of_whole_words(size: int, calls: int) -> None:
    shard: Any = SimpleNamespace(id=b"1", payload_bytes=size)
    jobs = [ArenaBlob(np.empty(0, np.uint8), shard, chunk, b"") for chunk in range(4)]
    assert len([*together(jobs, 1000)]) == calls


@pytest.mark.parametrize("options", [{}, {"inbox": 1 << 20}], ids=["writable", "read-only"])
def test_payloads_go_straight_into_the_arena_or_the_inbox(tmp_path: Path, options: dict[str, int]) -> None:
    with serving(settings(tmp_path, **options)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, TOKENS // SCHEMA.chunk_tokens)
        assert client.save(prompt(), pages.source(made.table), points=POINTS).dropped == 0
        assert copier.seen
        if not options:
            assert all(np.may_share_memory(payload, client.client.arena) for payload in copier.seen)
        made, pages, _ = engine()
        assert client.load(client.lookup(prompt()), pages.sink(made.table)) == TOKENS
        for shard in SCHEMA.shards:
            for chunk in shard.needs(TOKENS):
                assert np.array_equal(pages.source(made.table)(shard, chunk), truth(shard, chunk))
        client.close()


def test_what_was_overwritten_while_it_was_saved_is_found_damaged(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        fill(SCHEMA, made, TOKENS // SCHEMA.chunk_tokens)

        def overwrite() -> None:
            client.client.arena[:] = 0xEE

        copier.behind = overwrite
        client.save(prompt(), pages.source(made.table), points=POINTS)
        made, pages, _ = engine()
        assert client.load(client.lookup(prompt()), pages.sink(made.table)) == 0
        client.close()


def test_what_was_gathered_after_its_time_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        before = client.client.arena.copy()

        def late() -> None:
            monkeypatch.setattr("kvweave.server.arena_copier.time.monotonic", lambda: float("inf"))

        copier.before = late
        outcome = client.save(prompt(), pages.source(made.table), points=POINTS)
        assert outcome.stored == 0
        assert not copier.calls
        assert np.array_equal(client.client.arena, before)
        client.close()


def test_what_was_written_too_late_gets_no_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = store(daemon.settings.socket), engine()
        client.client.arena[:] = 0

        def late() -> None:
            monkeypatch.setattr("kvweave.server.arena_copier.time.monotonic", lambda: float("inf"))

        copier.behind = late
        assert client.save(prompt(), pages.source(made.table), points=POINTS).stored == 0
        assert copier.calls
        assert b"KVWV" not in client.client.arena.tobytes()
        client.close()


def test_no_copy_outlives_a_load_that_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.arena_copier.THREADED_BYTES", 1)
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, copier) = saved(daemon), engine()
        ended: list[int] = []

        def slow() -> None:
            time.sleep(0.05)
            ended.append(1)
            raise BadCopy("no such page")

        copier.between = slow
        with pytest.raises(BadCopy):
            client.load(client.lookup(prompt()), pages.sink(made.table))
        assert len(ended) == copier.calls > 1
        client.close()


def test_a_page_that_is_not_there_is_an_error_of_the_save_and_not_of_the_connection(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as daemon:
        client, (made, pages, _) = store(daemon.settings.socket), engine()
        generation = client.client.generation
        with pytest.raises(StoreError, match="NULL"):
            client.save(prompt(), pages.source({name: 0 * table for name, table in made.table.items()}), points=POINTS)
        client.client.ask(protocol.Ping(), protocol.Done)  # after what was posted
        assert client.client.generation == generation
        assert not daemon.state.arena._writing
        client.close()


def test_no_gather_outlives_a_save_that_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.server.arena_copier.THREADED_BYTES", 1)
    begun, ended = [], []

    class Breaking(StagingCopier):
        def stage(self, *_: object) -> Any:
            return SimpleNamespace(begin_copy=self.begin_copy, drop=lambda: None)

        def begin_copy(self, _: Sequence[Bytes]) -> Gathering:
            begun.append(1)

            def finish() -> Sequence[PartChecksums]:
                time.sleep(0.05)
                ended.append(1)
                raise BadCopy("no such page")

            return finish

    with serving(settings(tmp_path)) as daemon:
        client, made = store(daemon.settings.socket), rank(SCHEMA, SPEC, TOKENS, block_tokens=64)
        pages = PagePayloads(SCHEMA, EngineMemory.of_plan(made.plan, made.pools), Breaking(made.pools))
        with pytest.raises(BadCopy):
            client.save(prompt(), pages.source(made.table), points=POINTS)
        assert len(ended) == len(begun) > 1
        assert client.lookup(prompt()).position == 0
        client.close()

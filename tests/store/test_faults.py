"""Faults of media: flipped, torn and missing files, full and read-only disks, writers that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import ReadOnly, StoreError, TierError, TierFull
from kvweave.policy import ClassWeights
from kvweave.store import DictTier, DiskTier, MemoryTier, Store, Tier, TierPolicy, TierStack
from kvweave.store.striped_file import FILES, StripedFile
from tests.store.contract import got, key, put, value
from tests.store.faults import SCHEMA, FaultContract, payload, saved, verify

ROOM = "4MiB"
BLOBS = {f"blobs-{number}" for number in range(FILES)}


class TestDict(FaultContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return DictTier()


class TestMemory(FaultContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier(ROOM)


class TestDisk(FaultContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = DiskTier(tmp_path / "store", ROOM)
        yield tier
        tier.close()


def reloaded(directory: Path) -> tuple[int, int]:
    """Position reached and damage counted by a new process's store; then all is saved anew, and must be right."""
    tier = DiskTier(directory, ROOM)
    store = Store(SCHEMA, TierStack((tier, TierPolicy(inline=True))))
    _, prompt = _prompt(store)
    position = store.load(store.lookup(prompt), verify)
    damaged = store.stats().tiers[0].damaged
    store.save(prompt, payload, points=[512, 1024])
    assert store.load(store.lookup(prompt), verify) == 1024
    store.close()
    return position, damaged


def _prompt(store: Store):  # type: ignore[no-untyped-def]
    from tests.store.faults import SPEC, TOKENS
    from tests.store.models import namespace

    return store, store.prompt(TOKENS, namespace(SPEC))


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """The directory of a store that was filled and closed."""
    saved(DiskTier(tmp_path / "store", ROOM))[0].close()
    return tmp_path / "store"


def test_bits_flipped_anywhere_in_the_file_are_never_served(closed: Path) -> None:
    chance = random.Random(5)
    for _ in range(25):
        blobs = bytearray((closed / "blobs-0").read_bytes())
        for _ in range(3):
            blobs[chance.randrange(len(blobs))] ^= 1 << chance.randrange(8)
        (closed / "blobs-0").write_bytes(blobs)
        position, damaged = reloaded(closed)
        assert position == 1024 or damaged


def test_bits_flipped_anywhere_in_the_journal_are_never_served(closed: Path) -> None:
    chance, seen = random.Random(6), []
    for _ in range(25):
        journal = bytearray((closed / "journal").read_bytes())
        journal[chance.randrange(64, len(journal))] ^= 1 << chance.randrange(8)
        (closed / "journal").write_bytes(journal)
        seen.append(reloaded(closed))  # which compares every byte that it is given
    assert any(position < 1024 for position, _ in seen), "no flip hit a record"


def test_a_journal_torn_at_any_byte_serves_what_is_whole(closed: Path) -> None:
    journal = (closed / "journal").read_bytes()

    def served(length: int) -> int:
        (closed / "journal").write_bytes(journal[:length])
        return reloaded(closed)[0]

    assert {served(length) for length in range(0, 64, 9)} == {1024}, "without its head it is rebuilt"
    lengths = [64, *sorted(random.Random(7).sample(range(64, len(journal)), 20)), len(journal)]
    found = [served(length) for length in lengths]
    assert found == sorted(found), "what is torn off later leaves no less"
    assert (found[0], found[-1]) == (0, 1024)


def test_a_file_cut_short_is_a_miss(closed: Path) -> None:
    os.truncate(closed / "blobs-0", (closed / "blobs-0").stat().st_size // 2)
    assert reloaded(closed)[0] < 1024


def test_a_file_cut_short_while_it_is_open_is_a_miss_that_is_counted(tmp_path: Path) -> None:
    store, prompt = saved(DiskTier(tmp_path, ROOM))
    hit = store.lookup(prompt)
    os.truncate(tmp_path / "blobs-0", 100)
    assert store.load(hit, verify) == 0
    assert store.stats().tiers[0].damaged > 0
    store.save(prompt, payload)
    assert store.load(store.lookup(prompt), verify) == 1024
    store.close()


@pytest.mark.parametrize(("name", "left"), [("blobs-0", 0), ("journal", 1024)])
def test_a_deleted_file_is_a_miss_and_a_deleted_journal_is_rebuilt(closed: Path, name: str, left: int) -> None:
    (closed / name).unlink()
    assert reloaded(closed)[0] == left


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["blobs-3", "journal", "journal.new"])
def test_a_link_or_a_pipe_in_the_place_of_a_file_is_an_error_and_is_not_written_to(
    tmp_path: Path, name: str, kind: str
) -> None:
    place, precious = tmp_path / "store" / name, tmp_path / "precious"
    place.parent.mkdir()
    precious.write_text("do not write here")
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(precious)
    opened: list[Exception] = []

    def opening() -> None:
        try:
            DiskTier(tmp_path / "store", "1MiB")
        except TierError as error:
            opened.append(error)

    thread = threading.Thread(target=opening, daemon=True)
    thread.start()
    thread.join(10)
    assert opened, "it waits for somebody to open the pipe, or took the link for a file of its own"
    assert precious.read_text() == "do not write here"


def test_records_that_claim_the_same_bytes_are_not_believed(closed: Path) -> None:
    from kvweave.store.journal import MAGIC, packed

    journal = np.frombuffer((closed / "journal").read_bytes()[64:], np.uint8).reshape(-1, 64)
    keys = [shard[:48].tobytes() for shard in journal]
    starts, lengths = np.zeros(len(keys), np.int64), np.full(len(keys), 5000)
    (closed / "journal").write_bytes(MAGIC + packed(keys, starts, lengths).tobytes())
    assert reloaded(closed)[0] == 0


def test_a_journal_of_another_version_is_an_error_that_says_so(closed: Path) -> None:
    (closed / "journal").write_bytes(b"kvweave journal 9\n".ljust(64, b"\0"))
    with pytest.raises(StoreError, match="journal of this version"):
        DiskTier(closed, ROOM)
    (closed / "journal").unlink()
    DiskTier(closed, ROOM).close()  # and the directory is not left locked


def test_memory_that_changes_under_us_is_a_miss() -> None:
    memory = np.zeros(4 << 20, np.uint8)
    store, prompt = saved(MemoryTier(buffer=memory))
    memory[::4096] ^= 1
    assert store.load(store.lookup(prompt), verify) == 0
    store.save(prompt, payload)
    assert store.load(store.lookup(prompt), verify) == 1024


# ---- disks that are full or cannot be written


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "tiny"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("no small disk to fill: mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def use_up(disk: Path) -> None:
    """Leave no room on it."""
    with pytest.raises(OSError, match="No space"), (disk / "others").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("direct", [False, True])
def test_on_a_disk_that_is_smaller_than_the_tier_may_be_entries_are_evicted(tiny: Path, direct: bool) -> None:
    try:
        tier = DiskTier(tiny, "64MiB", direct=direct)
    except TierError:
        pytest.skip("this file system has no O_DIRECT")
    assert put(tier, *range(100), length=50_000) == [True] * 100
    there = [n for n in range(100) if got(tier, n, 50_000) is not None]
    assert len(there) >= 10
    assert 99 in there
    assert all(got(tier, n, 50_000) == value(n, 50_000) for n in there)
    stats = tier.stats()
    assert stats.used_bytes == len(there) * 53_248, "nothing is left of what did not fit"
    assert stats.evicted == 100 - len(there)
    tier.close()
    tier = DiskTier(tiny, "64MiB", direct=direct)
    assert all(got(tier, n, 50_000) == value(n, 50_000) for n in there)
    tier.close()


def test_where_blocks_cannot_be_given_back_a_blob_takes_the_place_of_another(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tiny, "64MiB")
    put(tier, *range(4), length=50_000)
    use_up(tiny)

    def discard(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(StripedFile, "discard", discard)
    assert put(tier, 9, length=50_000) == [True]
    assert got(tier, 9, 50_000) == value(9, 50_000)
    assert sum(got(tier, n, 50_000) == value(n, 50_000) for n in range(4)) == 3
    with pytest.raises(TierFull, match="disk is full"):
        put(tier, 10, length=100_000)
    assert tier.stats().used_bytes == 3 * 53_248
    tier.close()


def test_a_disk_that_others_have_filled_is_a_clear_error_and_what_is_read_stays(tiny: Path) -> None:
    tier = DiskTier(tiny, "64MiB")
    assert put(tier, 1)
    use_up(tiny)
    tier._catalog.pins[tier._catalog.slot_of[key(1)]] += 1
    with pytest.raises(TierFull, match="disk is full"):
        put(tier, 2, length=50_000)
    assert got(tier, 1) == value(1)
    assert tier.stats().used_bytes == 8192
    (tiny / "others").unlink()
    assert put(tier, 2, length=50_000) == [True]
    tier.close()


def test_a_cascade_serves_on_when_its_disk_is_full(tiny: Path) -> None:
    store, prompt = saved(MemoryTier("8MiB"))
    full = DiskTier(tiny, "64MiB")
    both = Store(SCHEMA, TierStack((store.tier_stack.executors[0].tier, TierPolicy(inline=True)), full))
    use_up(tiny)
    result = both.save(prompt, payload, points=range(256, 1025, 256))
    assert result.dropped == 0
    assert both.load(both.lookup(prompt), verify) == 1024
    assert "disk is full" in both.stats().tiers[1].last_error
    both.close()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, ROOM)
    put(tier, 1)
    real, calls = os.pwritev, iter(range(99))

    def half(fd: int, pieces: list[memoryview], at: int) -> int:
        if next(calls):
            raise OSError(5, "Input/output error")
        return real(fd, [pieces[0][:10]], at)

    monkeypatch.setattr(os, "pwritev", half)
    with pytest.raises(TierError):
        put(tier, 2)
    monkeypatch.undo()
    assert tier.stats().used_bytes == 8192
    assert got(tier, 2) is None
    assert put(tier, 2) == [True]
    assert got(tier, 2) == value(2)
    tier.close()


def test_a_read_only_disk_is_served_and_says_no_to_writes(tiny: Path) -> None:
    tier = DiskTier(tiny, "512KiB")
    put(tier, 1, 2)
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", tiny], check=True)
    tier = DiskTier(tiny, "512KiB")
    assert not tier.writable
    assert got(tier, 1) == value(1)
    with pytest.raises(ReadOnly, match="cannot be written"):
        put(tier, 3)
    assert tier.delete([key(2)]) == 1
    assert got(tier, 2) is None
    tier.close()


def test_a_directory_that_cannot_be_made_is_a_clear_error(tiny: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", tiny], check=True)
    with pytest.raises(ReadOnly, match="cannot be written"):
        DiskTier(tiny / "store", ROOM)


# ---- kill -9

LENGTH = 6000
SIZE = 8192
TIGHT, ROOMY = (64, 1), (16_384, 2)
"""Places and threads: one that evicts with every put, in an order that is known; one that never does, with two."""


def writer(directory: Path, first: int, report: int, places: int, threads: int) -> None:
    """Puts value after value, reports each that is done, and deletes some later; never returns."""
    tier = DiskTier(directory, places * SIZE)

    def work(number: int) -> None:
        while True:
            put(tier, number, length=LENGTH)
            os.write(report, number.to_bytes(8, "little"))
            if number % 7 == 0:
                tier.delete([key(number - 7 * threads)])
            number += threads

    for number in range(1, threads):
        threading.Thread(target=work, args=(first + number,)).start()
    work(first)


def killed(directory: Path, first: int, seconds: float, room: tuple[int, int]) -> list[int]:
    """What a writer had reported when it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            writer(directory, first, writing, *room)
        finally:
            os._exit(1)
    os.close(writing)
    begun = os.read(reading, 8)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b""
    while piece := os.read(reading, 1 << 16):
        rest += piece
    os.close(reading)
    reported: list[int] = np.frombuffer(begun + rest, "<i8").tolist()
    return reported


def check_killed(directory: Path, times: int, room: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.store.journal.SLACK", 40)  # so that it is rewritten, too, while they are killed
    monkeypatch.setattr("kvweave.store.striped_file.STRIPE_BYTES", 8192)
    monkeypatch.setattr(ClassWeights, "fit", lambda _: None)  # so that the oldest are evicted first
    chance, first = random.Random(times), 1001
    places, _ = room
    for _ in range(times):
        done = killed(directory, first, chance.uniform(0, 0.03), room)
        tier = DiskTier(directory, places * SIZE)
        here = {int.from_bytes(stored, "big") for stored in tier._catalog.slot_of}
        wrong = [n for n in here if n >= first - 64 and got(tier, n, LENGTH) != value(n, LENGTH)]
        assert not wrong
        committed = [n for n in done[-places // 2 :] if n % 7]  # multiples of 7 may have been deleted
        assert {*committed} <= here
        assert tier.stats().used_bytes == SIZE * len(here)
        assert sum(path.stat().st_size for path in directory.glob("blobs-*")) <= places * SIZE
        assert {path.name for path in directory.iterdir()} <= {*BLOBS, "journal", "lock", "journal.new"}
        first = max(here) + 10
        tier.close()


@pytest.mark.parametrize("room", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_writers_killed_at_random_moments_lose_nothing_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: tuple[int, int]
) -> None:
    check_killed(tmp_path, 15, room, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("room", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_six_hundred_writers_killed_at_random_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: tuple[int, int]
) -> None:
    check_killed(tmp_path, 300, room, monkeypatch)

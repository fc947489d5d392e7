"""A damaged journal is rebuilt; a full, removed or unwritable directory is no reason to end."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvweave.errors import Busy, StoreError, TierError, Vanished
from kvweave.store import DiskTier, Store, TierPolicy, TierStack
from kvweave.store.journal import packed_one
from kvweave.store.keys import tenant_id
from kvweave.store.reopening_tier import ReopeningTier
from kvweave.store.striped_file import FILES, SECTOR, StripedFile
from kvweave.store.tier import KeyFilter
from tests.store.contract import got, key, put, value
from tests.store.faults import SCHEMA, SPEC, TOKENS, payload, stored, verify
from tests.store.models import namespace
from tests.store.test_faults import tiny  # noqa: F401 - a fixture

ROOM = "16MiB"


def opened(directory: Path, **more: bool) -> tuple[Store, DiskTier]:
    tier = DiskTier(directory, ROOM, **more)  # type: ignore[arg-type]
    return Store(SCHEMA, TierStack((tier, TierPolicy(inline=True)))), tier


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory with a prompt in it."""
    store, _ = opened(tmp_path / "store")
    store.save(store.prompt(TOKENS, namespace(SPEC)), payload, points=[512, 1024])
    store.close()
    return tmp_path / "store"


def found(directory: Path) -> int:
    """What is loaded of it, all of which is right."""
    store, _ = opened(directory)
    position = store.load(store.lookup(store.prompt(TOKENS, namespace(SPEC))), verify)
    store.close()
    return position


@pytest.mark.parametrize("at", range(0, 64, 3))
def test_a_flipped_bit_in_the_head_of_the_journal_costs_nothing(closed: Path, at: int) -> None:
    journal = bytearray((closed / "journal").read_bytes())
    journal[at] ^= 1 << at % 8
    (closed / "journal").write_bytes(journal)
    assert found(closed) == 1024
    assert found(closed) == 1024, "and it was mended"


def test_a_journal_full_of_garbage_is_rebuilt_from_the_headers_of_the_files(closed: Path) -> None:
    size = (closed / "journal").stat().st_size
    (closed / "journal").write_bytes(random.Random(3).randbytes(size))
    assert found(closed) == 1024
    assert found(closed) == 1024


def test_records_that_are_left_and_headers_are_taken_together(closed: Path) -> None:
    journal = bytearray((closed / "journal").read_bytes())
    journal[0] ^= 255
    for record in range(1, len(journal) // 64, 2):
        journal[64 * record + 5] ^= 16
    (closed / "journal").write_bytes(journal)
    assert found(closed) == 1024


@pytest.mark.parametrize("left", [b"", b"kvweave"])
def test_a_journal_that_a_power_failure_emptied_is_rebuilt(closed: Path, left: bytes) -> None:
    (closed / "journal").write_bytes(left)
    assert found(closed) == 1024


@pytest.mark.parametrize("bit", [63, 40, 31])
def test_a_header_with_a_wrong_length_costs_its_own_blob_alone(tmp_path: Path, bit: int) -> None:
    with DiskTier(tmp_path, ROOM) as tier:
        store = Store(SCHEMA, TierStack((tier, TierPolicy(inline=True))))
        prompts = [store.prompt(TOKENS + number, namespace(SPEC)) for number in range(3)]
        for prompt in prompts:
            store.save(prompt, payload)
        start = int(tier._catalog.starts[tier._catalog.slot_of[prompts[1].keys(SCHEMA.ids)[0]]])
        descriptor, at, _ = tier._files.place(start + 16)  # the length of the payload
        length = int.from_bytes(os.pread(descriptor, 8, at), "little") | 1 << bit
        os.pwrite(descriptor, length.to_bytes(8, "little"), at)
    (tmp_path / "journal").write_bytes(bytes(640))
    store, _ = opened(tmp_path)
    assert [store.load(store.lookup(prompt), verify) for prompt in prompts] == [1024, 0, 1024]
    store.close()


def test_a_record_of_a_place_before_the_first_byte_is_ignored(closed: Path) -> None:
    with (closed / "journal").open("ab") as file:
        file.write(packed_one(key(9), 2**64 - SECTOR, 2 * SECTOR))
    assert found(closed) == 1024


def test_what_was_overwritten_since_is_a_miss_and_never_wrong(tmp_path: Path) -> None:
    store, tier = opened(tmp_path)
    for number in range(60):  # several times what there is room for
        store.save(store.prompt(TOKENS + number, namespace(SPEC)), payload, points=[512, 1024])
    assert tier.stats().evicted > 0
    entries = tier.stats().entries or 0
    store.close()
    (tmp_path / "journal").write_bytes(bytes(640))
    store, tier = opened(tmp_path)
    assert (tier.stats().entries or 0) > entries // 2
    positions = [store.prompt(TOKENS + number, namespace(SPEC)) for number in range(60)]
    assert sum(store.load(store.lookup(prompt), verify) for prompt in positions) > 0
    store.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("takes_blocks_back", [True, False])
def test_what_was_cleared_does_not_come_back_with_a_rebuilt_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, direct: bool, takes_blocks_back: bool
) -> None:
    store, tier = opened(tmp_path, direct=direct)
    cleared, kept = (store.prompt(TOKENS, replace(namespace(SPEC), tenant=tenant)) for tenant in ("cleared", "kept"))
    for prompt in (cleared, kept):
        store.save(prompt, payload)
    if not takes_blocks_back:
        monkeypatch.setattr(StripedFile, "discard", Mock(side_effect=OSError(errno.EOPNOTSUPP, "not supported")))
    assert tier.clear(KeyFilter(cleared.tenant_id)) > 0
    store.close()
    (tmp_path / "journal").write_bytes(bytes(640))
    store, _ = opened(tmp_path, direct=direct)
    assert [store.load(store.lookup(prompt), verify) for prompt in (cleared, kept)] == [0, 1024]
    store.close()


def test_adjacent_extents_are_cleared_by_one_call_and_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tier = opened(tmp_path)
    names = ("cleared", "kept", "cleared")
    for number, tenant in enumerate(names):
        store.save(store.prompt(TOKENS + number, replace(namespace(SPEC), tenant=tenant)), payload)
    discard, calls = StripedFile.discard, list[tuple[int, int]]()

    def counted(files: StripedFile, start: int, num_bytes: int) -> None:
        calls.append((start, num_bytes))
        discard(files, start, num_bytes)

    monkeypatch.setattr(StripedFile, "discard", counted)
    before = tier.stats().used_bytes or 0
    assert tier.clear(KeyFilter(tenant_id("cleared"))) > 2
    assert len(calls) == 2
    assert sum(num_bytes for _, num_bytes in calls) == before - (tier.stats().used_bytes or 0)
    store.close()
    (tmp_path / "journal").write_bytes(bytes(640))
    store, _ = opened(tmp_path)
    prompts = [store.prompt(TOKENS + i, replace(namespace(SPEC), tenant=name)) for i, name in enumerate(names)]
    assert [store.load(store.lookup(prompt), verify) for prompt in prompts] == [0, 1024, 0]
    store.close()


def test_what_was_cleared_while_it_was_read_does_not_come_back_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tier = opened(tmp_path)
    prompt = store.prompt(TOKENS, namespace(SPEC))
    store.save(prompt, payload)
    read, cleared = tier._medium.read, list[int]()

    def read_slowly(*question: Any) -> bool:
        cleared.append(tier.clear())
        return read(*question)

    monkeypatch.setattr(tier._medium, "read", read_slowly)
    store.load(store.lookup(prompt), lambda *_: None)
    assert max(cleared) > 0
    store.close()
    (tmp_path / "journal").write_bytes(bytes(640))
    with DiskTier(tmp_path, ROOM) as rebuilt:
        assert rebuilt.stats().entries == 0


def test_headers_past_the_page_cache_are_found_too(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, direct=True)
    store.save(store.prompt(TOKENS, namespace(SPEC)), payload)
    store.close()
    (tmp_path / "journal").write_bytes(bytes(640))
    store, _ = opened(tmp_path, direct=True)
    assert store.load(store.lookup(store.prompt(TOKENS, namespace(SPEC))), verify) == 1024
    store.close()


def test_the_journal_and_the_files_are_the_users_alone(closed: Path) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in closed.iterdir()} == {0o600}


def test_a_full_disk_is_opened_and_served(tiny: Path) -> None:  # noqa: F811
    tier = DiskTier(tiny, "64MiB")
    put(tier, 1, 2)
    tier.close()
    (tiny / "fill").write_bytes(b"")
    with pytest.raises(OSError, match="No space"), (tiny / "fill").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with (tiny / "journal").open("r+b") as file:  # torn, so that it must be mended on a disk without room
        file.truncate((tiny / "journal").stat().st_size - 7)
    tier = DiskTier(tiny, "64MiB")
    assert got(tier, 1) == value(1)
    tier.close()


@pytest.mark.parametrize(
    ("link", "words"),
    [(Path.symlink_to, "symbolic links"), (Path.hardlink_to, "another name"), (None, "not a regular")],
)
def test_a_lock_that_leads_elsewhere_is_not_followed(
    tmp_path: Path, link: Callable[[Path, Path], None] | None, words: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("do not touch")
    (tmp_path / "store").mkdir()
    lock = tmp_path / "store" / "lock"
    link(lock, precious) if link else os.mkfifo(lock)
    with pytest.raises(TierError, match=words):
        DiskTier(tmp_path / "store", ROOM)
    assert precious.read_text() == "do not touch"


def test_a_directory_that_was_removed_is_noticed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "store", ROOM)
    put(tier, 1)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(Vanished, match="removed"):
        put(tier, 2)
    tier.close()


@pytest.mark.parametrize("name", ["lock", "journal", "blobs-0", f"blobs-{FILES - 1}"])
def test_one_file_that_was_removed_is_noticed_after_some_writes_at_most(tmp_path: Path, name: str) -> None:
    tier = DiskTier(tmp_path, ROOM)
    put(tier, 1)
    (tmp_path / name).unlink()
    with pytest.raises(Vanished, match="removed"):
        for number in range(2, 3 + FILES):
            put(tier, number)
    tier.close()


def test_a_tier_whose_lock_was_removed_leaves_the_directory_to_the_next_owner(tmp_path: Path) -> None:
    tier = ReopeningTier("disk", "disk", lambda: DiskTier(tmp_path, ROOM))
    put(tier, 1)
    (tmp_path / "lock").unlink()
    owner = DiskTier(tmp_path, ROOM)
    with pytest.raises(Vanished, match="removed"):
        put(tier, 2)
    with pytest.raises(Busy, match=f"process {os.getpid()}"):
        put(tier, 2)
    put(owner, 2)
    assert (got(owner, 1), got(owner, 2)) == (value(1), value(2))
    owner.close()
    tier.close()


def test_a_write_asks_for_one_file_the_journal_and_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, asked, fstat = DiskTier(tmp_path, ROOM), list[int](), os.fstat

    def counted(descriptor: int) -> os.stat_result:
        asked.append(descriptor)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", counted)
    put(tier, 1)
    assert len(asked) == 3
    tier.close()


def test_a_tier_whose_directory_was_removed_is_opened_anew(tmp_path: Path) -> None:
    tier = ReopeningTier("disk", "disk", lambda: DiskTier(tmp_path / "store", ROOM))
    put(tier, 1)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(Vanished):
        put(tier, 2)
    put(tier, 2)
    assert got(tier, 2) == value(2)
    assert not tier.contains([key(1)])[0]
    assert (tmp_path / "store" / "journal").exists()
    tier.close()


def test_a_tier_that_cannot_be_opened_is_tried_again_when_it_is_used(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, ROOM)
    put(owner, 1)
    tier = ReopeningTier("disk", "disk", lambda: DiskTier(tmp_path, ROOM))
    assert tier.stats().entries is None
    with pytest.raises(Busy, match=f"process {os.getpid()}"):
        tier.contains([key(1)])
    owner.close()
    assert got(tier, 1) == value(1)
    assert tier.stats().entries == 1
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.contains([key(1)])


def test_a_mistake_in_what_was_configured_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too few"):
        ReopeningTier("disk", "disk", lambda: DiskTier(tmp_path, 17))


def test_a_forked_child_does_not_keep_the_directory_busy(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOM)
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"!")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    tier.close()
    DiskTier(tmp_path, ROOM).close()  # though the child still lives
    os.write(end[1], b"!")
    os.waitpid(child, 0)
    for number in (*ready, *end):
        os.close(number)


def test_a_forked_child_leaves_the_tiers_of_its_parent_alone(tmp_path: Path) -> None:
    store = Store(SCHEMA, TierStack((DiskTier(tmp_path, ROOM), TierPolicy(write="back"))))
    prompt = store.prompt(TOKENS, namespace(SPEC))
    store.save(prompt, payload)
    assert store.flush()
    child = os.fork()
    if not child:
        try:
            position = store.lookup(prompt).position  # nobody is there who could answer, so nobody is waited for
            store.close(1)  # which leaves the parent's files alone
            os._exit(position != 0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert store.load(store.lookup(prompt), verify) == 1024
    assert store.save(store.prompt(TOKENS + 1, namespace(SPEC)), payload).dropped == 0
    store.close()
    assert found(tmp_path) == 1024


def test_only_the_directory_of_a_file_system_without_room_is_missed(tiny: Path) -> None:  # noqa: F811
    with pytest.raises(OSError, match="No space"), (tiny / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    tier = ReopeningTier("disk", "disk", lambda: DiskTier(tiny / "store", ROOM))
    with pytest.raises(TierError):
        put(tier, 1)
    (tiny / "fill").unlink()
    put(tier, 1)
    assert got(tier, 1) == value(1)
    tier.close()


def test_a_damaged_journal_of_an_empty_store_is_an_empty_store(tmp_path: Path) -> None:
    DiskTier(tmp_path, ROOM).close()
    (tmp_path / "journal").write_bytes(random.Random(5).randbytes(640))
    tier = DiskTier(tmp_path, ROOM)
    assert tier.stats().entries == 0
    put(tier, 1)
    tier.close()
    tier = DiskTier(tmp_path, ROOM)
    assert got(tier, 1) == value(1)
    tier.close()


@pytest.mark.parametrize("beyond", [0, SECTOR])
def test_of_two_entries_in_one_place_neither_is_trusted_and_the_place_is_free(tmp_path: Path, beyond: int) -> None:
    with DiskTier(tmp_path, "1MiB") as tier:
        put(tier, 0, 1)
        start = int(tier._catalog.starts[tier._catalog.slot_of[key(1)]])
    with (tmp_path / "journal").open("ab") as file:  # a record of which a removal was lost
        file.write(packed_one(key(9), start - beyond, 5000))
    with DiskTier(tmp_path, "1MiB") as tier:
        overlapped = {1, 0} if beyond else {1}
        assert [got(tier, number) for number in (1, 9)] == [None, None]
        assert tier.stats().used_bytes == (2 - len(overlapped)) * 2 * SECTOR
        put(tier, *range(20, 60))
        assert all(got(tier, number) == value(number) for number in ({0, 1} - overlapped) | {*range(20, 60)})


def test_a_stale_copy_of_a_known_blob_is_no_second_entry(tmp_path: Path) -> None:
    with DiskTier(tmp_path, ROOM) as tier:
        store = Store(SCHEMA, TierStack((tier, TierPolicy(inline=True))))
        store.save(store.prompt(TOKENS, namespace(SPEC)), payload, points=[512, 1024])
        blob, end = stored(tier, tier.keys()[0]), -(-tier._files.end() // SECTOR) * SECTOR
        tier._files.write(end, [blob])
    head = bytearray((tmp_path / "journal").read_bytes())
    head[0] ^= 255
    (tmp_path / "journal").write_bytes(head)
    assert found(tmp_path) == 1024

"""The journal: half a record, whoever left it, costs itself and nothing that is written after it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import TierError
from kvweave.store.journal import Entries, FileJournal, packed, packed_one
from kvweave.store.keys import KEY_BYTES

KEYS = [bytes([number]) * KEY_BYTES for number in range(4)]


def opened(path: Path) -> tuple[FileJournal, Entries]:
    def recover(known: Entries) -> Entries:
        assert not path.exists(), "its start is not damaged"
        return known

    journal = FileJournal(path, writable=True)
    return journal, journal.open(recover)


def live(path: Path) -> list[bytes]:
    journal, entries = opened(path)
    journal.close()
    return [*entries.number_of]


def test_a_record_alone_is_written_as_among_others() -> None:
    chance = random.Random(3)
    places = [(0, 0), (2**64 - 1, 2**32 - 1)] + [(chance.getrandbits(48), chance.getrandbits(32)) for _ in range(500)]
    keys = [chance.randbytes(KEY_BYTES) for _ in places]
    starts, lengths = np.array(places, np.uint64).T
    together = packed(keys, starts, lengths).tobytes()
    assert b"".join(packed_one(key, *place) for key, place in zip(keys, places, strict=True)) == together


def test_records_after_one_that_was_torn_by_a_crash_are_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path)
    journal.added(KEYS[0], 0, 4096)
    journal.close()
    with path.open("ab") as file:
        file.write(b"half a record")
    journal, entries = opened(path)
    assert [*entries.number_of] == KEYS[:1]
    journal.added(KEYS[1], 4096, 4096)
    journal.close()
    assert live(path) == KEYS[:2]


def test_records_after_one_that_a_full_disk_cut_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "journal", os.write
    journal, _ = opened(path)
    journal.added(KEYS[0], 0, 4096)
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:30]))
    with pytest.raises(TierError, match="No space left"):
        journal.added(KEYS[1], 4096, 4096)
    monkeypatch.undo()
    journal.added(KEYS[2], 8192, 4096)
    journal.removed(KEYS[:1])
    journal.close()
    assert live(path) == KEYS[2:3]


def test_a_removal_that_a_full_disk_did_not_take_is_recorded_before_the_next_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "journal", os.write
    journal, _ = opened(path)
    for number, name in enumerate(KEYS[:3]):
        journal.added(name, number * 4096, 4096)
    for taken in (0, 64, 70):
        monkeypatch.setattr(os, "write", lambda descriptor, data, taken=taken: write(descriptor, data[:taken]))
        with pytest.raises(TierError, match="No space left"):
            journal.removed(KEYS[:2] if not taken else [])
            journal.added(KEYS[3], 0, 4096)
    monkeypatch.undo()
    assert live(path) == KEYS[2:3]
    journal.added(KEYS[3], 0, 4096)
    journal.close()
    assert live(path) == KEYS[2:]

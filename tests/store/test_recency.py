"""Who goes first after a restart: what a disk tier knows of use, and what a `kill -9` leaves of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvweave.store import DiskTier, MemoryTier
from tests.store.contract import got, key, put, value

PLACES, SIZE = 8, 4096


def tier_of(directory: Path) -> DiskTier:
    return DiskTier(directory, PLACES * SIZE)


def asked(tier: DiskTier, *numbers: int) -> None:
    tier.touch([key(number) for number in numbers])


def left(directory: Path, new: int) -> list[int]:
    """Which of the first entries are left after so many new ones."""
    tier = tier_of(directory)
    put(tier, *range(100, 100 + new), length=SIZE)
    found = [number for number in range(PLACES) if got(tier, number, SIZE) == value(number, SIZE)]
    tier.close()
    return found


def killed(work: Callable[[], None]) -> None:
    """Done in a process of its own, which is killed then."""
    child = os.fork()
    if not child:
        try:
            work()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_what_was_asked_for_last_stays_after_a_restart(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    put(tier, *range(PLACES), length=SIZE)
    asked(tier, 0, 1, 2)
    tier.close()
    assert left(tmp_path, new=5) == [0, 1, 2]


def test_what_was_hit_stays_after_a_restart_as_it_would_have_without(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    put(tier, 0, 1, 2, length=SIZE)
    tier.touch([key(0), key(1), key(2)], is_hit=True)
    put(tier, *range(3, PLACES), length=SIZE)  # later, and never hit
    tier.close()
    assert left(tmp_path, new=5) == [0, 1, 2]


def test_an_entry_of_any_age_can_be_hit_and_evicted(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    put(tier, *range(PLACES), length=SIZE)
    for tick in (1 << 40, 1 << 62):
        tier._catalog._tick = tick
        for hits in range(6):
            tier.touch([key(hits)], is_hit=True)
            tier._catalog.ticks[tier._catalog.slot_of[key(hits)]] = 1
            tier.touch([key(hits)], is_hit=True)
        put(tier, *range(tick, tick + 2), length=SIZE)
    values = tier._catalog.values
    assert ((values >= 0) & (values < 20)).all()
    tier.close()


def test_of_one_question_the_first_keys_stay_after_a_restart(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    put(tier, *range(PLACES), length=SIZE)
    asked(tier, *range(PLACES))
    tier.close()
    assert left(tmp_path, new=5) == [0, 1, 2]


def test_a_restart_that_asks_for_nothing_changes_nothing(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    put(tier, *range(PLACES), length=SIZE)
    asked(tier, 0, 1, 2)
    tier.close()
    before = (tmp_path / "journal").read_bytes()
    tier_of(tmp_path).close()
    assert (tmp_path / "journal").read_bytes() == before


def test_after_a_kill_the_order_is_that_of_the_last_stop_and_of_writing_since(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    put(tier, *range(4), length=SIZE)
    asked(tier, 0)
    tier.close()

    def work() -> None:
        tier = tier_of(tmp_path)
        put(tier, *range(4, PLACES), length=SIZE)
        asked(tier, 1, 2, 3)  # is forgotten

    killed(work)
    assert left(tmp_path, new=3) == [0, 4, 5, 6, 7]


def test_after_a_kill_one_question_puts_a_prompt_in_order_again(tmp_path: Path) -> None:
    killed(lambda: assert_put(tmp_path))
    tier = tier_of(tmp_path)
    asked(tier, *range(PLACES))
    tier.close()
    assert left(tmp_path, new=5) == [0, 1, 2]


def assert_put(directory: Path) -> None:
    assert all(put(tier_of(directory), *range(PLACES), length=SIZE))


def test_a_journal_that_is_written_anew_has_the_order_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.store.journal.SLACK", 0)

    def work() -> None:
        tier = tier_of(tmp_path)
        put(tier, *range(PLACES), length=SIZE)
        asked(tier, 0, 1, 2)
        for _ in range(2 * PLACES):  # until it has more records of what is gone than of what is there
            put(tier, 50, length=SIZE)
            tier.delete([key(50)])

    killed(work)
    assert left(tmp_path, new=5) == [0, 1, 2]


def test_a_stop_on_a_full_disk_keeps_the_old_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(tmp_path)
    put(tier, *range(PLACES), length=SIZE)
    asked(tier, 0, 1, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvweave.store.journal.os.replace", full)
    tier.close()
    monkeypatch.undo()
    assert left(tmp_path, new=0) == [*range(PLACES)]


def test_entries_that_are_removed_while_they_are_touched_are_not_evicted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.store.arena_tier.STEP_KEYS", 1)
    with MemoryTier(4 * SIZE) as tier:
        put(tier, 0, 1, length=SIZE)
        find = tier._catalog.find

        def find_and_lose(keys: Sequence[bytes]) -> Any:
            slots = find(keys)
            tier.delete(keys)
            return slots

        monkeypatch.setattr(tier._catalog, "find", find_and_lose)
        tier.touch([key(0), key(1)])
        monkeypatch.undo()
        for number in (2, 3):
            put(tier, number, length=3 * SIZE)
        assert got(tier, 3, 3 * SIZE) == value(3, 3 * SIZE)

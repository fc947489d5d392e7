"""Bytes that a tier has and cannot read: a miss that is removed, stored anew elsewhere, and costs nothing else."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvweave.store import DiskTier, Store, TierPolicy, TierStack, checksums
from kvweave.store.keys import Bytes, HashedPrompt
from kvweave.store.striped_file import StripedFile
from tests.store.faults import SCHEMA, SPEC, TOKENS, keys_of, payload, verify
from tests.store.models import namespace

ROOM = "16MiB"
Bad = Callable[[int, int], bool]


class Sectors:
    """A disk that cannot read some bytes: `bad` of start and end says which. Writing there does not mend them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bad: Bad = lambda start, end: False
        real = checksums.read

        def read(files: StripedFile, start: int, to: Bytes, head: int, io_buffers: checksums.IOBuffers) -> int | None:
            if self.bad(start, start + to.nbytes):
                raise OSError(errno.EIO, "Input/output error")
            return real(files, start, to, head, io_buffers)

        monkeypatch.setattr(checksums, "read", read)


@pytest.fixture
def sectors(monkeypatch: pytest.MonkeyPatch) -> Sectors:
    return Sectors(monkeypatch)


def stored(directory: Path, **policy: object) -> tuple[Store, DiskTier, HashedPrompt]:
    tier = DiskTier(directory, ROOM)
    store = Store(SCHEMA, TierStack((tier, TierPolicy(**policy))))  # type: ignore[arg-type]
    prompt = store.prompt(TOKENS, namespace(SPEC))
    store.save(prompt, payload, points=[512, 1024])
    return store, tier, prompt


def place(tier: DiskTier, key: bytes) -> int:
    return int(tier._catalog.starts[tier._catalog.slot_of[key]])


def test_one_unreadable_sector_costs_its_chunk_and_nothing_else(tmp_path: Path, sectors: Sectors) -> None:
    store, tier, prompt = stored(tmp_path)
    broken = place(tier, keys_of(prompt, "full", 2)[0])
    sectors.bad = lambda start, end: start <= broken < end
    assert store.load(store.lookup(prompt), verify) == 512
    assert store.lookup(prompt).position == 512, "it is not found any more"
    stats = store.stats().tiers[0]
    assert (stats.damaged, stats.open) == (1, False)
    assert "cannot be read" in stats.last_error
    assert store.save(prompt, payload, points=[512, 1024]).stored == 1
    assert place(tier, keys_of(prompt, "full", 2)[0]) != broken, "nothing is written to a place that cannot be read"
    assert store.load(store.lookup(prompt), verify) == 1024
    store.close()
    store, _, _ = stored(tmp_path)
    assert store.load(store.lookup(prompt), verify) == 1024
    store.close()


def test_a_tier_that_cannot_read_anything_is_left_alone(tmp_path: Path, sectors: Sectors) -> None:
    store, _, _ = stored(tmp_path, failures=3, cool_s=60)
    prompts = [store.prompt(TOKENS + number, namespace(SPEC)) for number in range(6)]
    for prompt in prompts:
        store.save(prompt, payload)
    sectors.bad = lambda start, end: True
    for prompt in prompts:
        assert store.load(store.lookup(prompt), verify) == 0
    stats = store.stats().tiers[0]
    assert stats.open
    assert stats.skipped > 0
    store.close()


def test_a_tier_that_cannot_read_one_piece_of_each_prompt_is_asked_for_the_others(
    tmp_path: Path, sectors: Sectors
) -> None:
    store, tier, _ = stored(tmp_path, failures=3, cool_s=60)
    prompts = [store.prompt(TOKENS + number, namespace(SPEC)) for number in range(6)]
    for prompt in prompts:
        store.save(prompt, payload, points=[512, 1024])
    broken = {place(tier, keys_of(prompt, "full", 2)[0]) for prompt in prompts}
    sectors.bad = lambda start, end: any(start <= at < end for at in broken)
    assert [store.load(store.lookup(prompt), verify, start=512) for prompt in prompts] == [512] * 6
    stats = store.stats().tiers[0]
    assert (stats.damaged, stats.open, stats.skipped) == (6, False, 0)
    store.close()


def test_writers_go_on_beside_a_sector_that_cannot_be_read(tmp_path: Path, sectors: Sectors) -> None:
    store, tier, prompt = stored(tmp_path)
    broken = place(tier, keys_of(prompt, "full", 3)[0])
    sectors.bad = lambda start, end: start <= broken < end
    found = []

    def work(first: int) -> None:
        for number in range(first, first + 5):
            mine = store.prompt(TOKENS + number, namespace(SPEC))
            store.save(mine, payload)
            found.append(store.load(store.lookup(mine), verify))

    threads = [threading.Thread(target=work, args=(100 * (1 + number),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1024] * 10
    assert store.load(store.lookup(prompt), verify) == 512
    store.close()


def test_the_lengths_say_which_cannot_be_read(tmp_path: Path, sectors: Sectors) -> None:
    from kvweave.store.tier import ABSENT, UNREADABLE, whole

    tier = DiskTier(tmp_path, ROOM)
    keys = [bytes([number]) * 48 for number in range(3)]
    tier.put(keys[:2], [whole(bytes(5000)), whole(bytes(5000))])
    broken = place(tier, keys[0])
    sectors.bad = lambda start, end: start <= broken < end
    into = [np.empty(5000, np.uint8) for _ in keys]
    assert tier.get(keys, into) == [UNREADABLE, 5000, ABSENT]
    tier.close()

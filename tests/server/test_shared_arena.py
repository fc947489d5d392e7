"""Places for many blobs at once, in one free run, are as if each had been asked for by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvweave.server.protocol import NO_ROOM, PRESENT, WRITING
from kvweave.server.shared_arena import SharedArena
from kvweave.store import Quota
from kvweave.store.keys import KEY_BYTES, TENANT_BYTES, tenant_id

PAGE = 4096


def key(number: int, tenant: str = "") -> bytes:
    return tenant_id(tenant) + number.to_bytes(KEY_BYTES - TENANT_BYTES, "big")


def state(arena: SharedArena) -> tuple[object, ...]:
    """What a client could notice, but for where blobs lie."""
    catalog = arena._catalog
    keys, slots = catalog.by_value()
    entries = [*zip(keys, catalog.ticks[slots].tolist(), catalog.values[slots].tolist(), strict=True)]
    columns = catalog.lengths, catalog.sizes, catalog.owners, catalog.pins, catalog.hits
    return (
        entries,
        [column[slots].tolist() for column in columns],
        catalog.used.tolist(),
        sorted(arena._writing),
        arena.stats(),
    )


class Both:
    """Two arenas with the same life; one reserves and commits blob by blob."""

    def __init__(self, pages: int, *, quotas: bool) -> None:
        some = {"small": Quota(0, pages // 4 * PAGE), "sure": Quota(pages // 8 * PAGE)} if quotas else None
        self.arenas = [SharedArena(pages * PAGE, quotas=some) for _ in range(2)]
        self.at_once, self.singly = self.arenas
        self.singly._reserve_in_a_row = lambda *_: None  # type: ignore[method-assign]
        self.held: list[dict[bytes, tuple[int, int]]] = [{}, {}]
        self.pinned = [np.empty(0, np.int64)] * 2

    def reserve(self, keys: list[bytes], length: int) -> list[bytes]:
        """Returns the keys that got places."""
        starts = [arena.reserve(keys, [length] * len(keys)).tolist() for arena in self.arenas]
        assert np.array_equal(*(np.minimum(each, 0) for each in starts))
        got = [name for name, start in zip(keys, starts[0], strict=True) if start >= 0]
        for held, each in zip(self.held, starts, strict=True):
            held.update({name: (start, length) for name, start in zip(keys, each, strict=True) if start >= 0})
        return got

    def commit(self, keys: list[bytes]) -> None:
        at_once, singly = ([(name, *held.pop(name)) for name in keys] for held in self.held)
        self.at_once.commit_all(at_once)
        for extent in singly:
            self.singly.commit(*extent)

    def abandon(self, keys: list[bytes]) -> None:
        for arena, held in zip(self.arenas, self.held, strict=True):
            for name in keys:
                arena.abandon(name, *held.pop(name))

    def pin(self, keys: list[bytes]) -> None:
        """These, instead of those that were pinned before."""
        for arena, slots in zip(self.arenas, self.pinned, strict=True):
            arena.unpin(slots)
        self.pinned = [arena.pin(keys).slots for arena in self.arenas]

    def check(self) -> None:
        assert state(self.at_once) == state(self.singly)
        for arena, held in zip(self.arenas, self.held, strict=True):
            slots = np.array([*arena._catalog.slot_of.values()], np.int64)
            taken = [*zip(arena._catalog.starts[slots].tolist(), arena._catalog.lengths[slots].tolist(), strict=True)]
            ends = 0
            for start, length in sorted([*taken, *held.values()]):
                assert start >= ends, "two blobs in one place"
                assert start % PAGE == 0
                ends = start + arena._extents.rounded(length)
            assert ends <= arena.num_bytes


@pytest.mark.parametrize("quotas", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_blobs_that_are_reserved_at_once_live_as_those_that_are_reserved_one_by_one(seed: int, quotas: bool) -> None:
    chance = random.Random(seed)
    both = Both(chance.choice([8, 40, 200]), quotas=quotas)
    length = chance.choice([1, PAGE, PAGE + 1])  # of one length: where blobs lie is then of no consequence
    flying: list[list[bytes]] = []
    for _ in range(120):
        if chance.random() < 0.2:
            hit = [key(chance.randrange(150), "a") for _ in range(10)]
            for arena in both.arenas:
                arena.touch(hit, is_hit=True)
        if chance.random() < 0.1:
            both.pin([key(chance.randrange(150), "a") for _ in range(10)])
        tenants, first = chance.choice([["a"], ["small"], ["sure"], ["a", "b", "sure"]]), chance.randrange(150)
        keys = [key(first + i, chance.choice(tenants)) for i in range(chance.choice([0, 1, 3, 20]))]
        keys += keys[:1] if chance.random() < 0.1 else []
        if got := both.reserve(keys, length):
            flying.append(got)
        while len(flying) > chance.randrange(4):
            done = flying.pop(chance.randrange(len(flying)))
            if chance.random() < 0.2:
                both.abandon(done)
            else:
                for tenant in sorted({name[:TENANT_BYTES] for name in done}):  # a reservation is of one tenant
                    both.commit([name for name in done if name.startswith(tenant)])
        if chance.random() < 0.2:
            gone = [key(chance.randrange(150), "a") for _ in range(10)]
            assert len({arena.delete(gone) for arena in both.arenas}) == 1
        both.check()
    for arena in both.arenas:
        arena.close()


def test_places_in_one_run_follow_each_other_and_what_is_known_is_told() -> None:
    arena = SharedArena(64 * PAGE)
    keys = [key(number) for number in range(4)]
    starts = arena.reserve(keys, [PAGE, 3 * PAGE, 1, PAGE])
    assert (starts - starts[0]).tolist() == [0, PAGE, 4 * PAGE, 5 * PAGE]
    assert arena.reserve(keys[:2], [PAGE, 3 * PAGE]).tolist() == [WRITING] * 2
    arena.commit_all([*zip(keys, starts.tolist(), [PAGE, 3 * PAGE, 1, PAGE], strict=True)])
    assert arena.reserve([keys[2], key(9)], [1, PAGE])[0] == PRESENT
    assert arena.reserve([key(10)], [65 * PAGE]).tolist() == [NO_ROOM]
    assert arena.reserve([], []).tolist() == []
    arena.commit_all([])
    assert arena.stats().used_bytes == 7 * PAGE
    arena.close()


def test_of_two_who_write_one_key_the_first_that_is_done_counts_and_the_other_leaves_nothing() -> None:
    arena = SharedArena(8 * PAGE)
    for seconds_first in (False, True):
        (first,), (second,) = (arena.reserve([key(1)], [PAGE], beside=beside).tolist() for beside in (False, True))
        assert first != second
        (third,) = arena.reserve([key(1)], [PAGE], beside=True).tolist()
        arena.abandon(key(1), third, PAGE)
        assert arena.reserve([key(1)], [PAGE]).tolist() == [WRITING]
        places = [second, first] if seconds_first else [first, second]
        for start in places:
            arena.commit(key(1), start, PAGE)
        pinned = arena.pin([key(1)])
        assert pinned.starts.tolist() == places[:1]
        assert (arena.stats().used_bytes, len(arena._writing), len(arena._beside)) == (PAGE, 0, 0)
        arena.unpin(pinned.slots)
        arena.delete([key(1)])
        assert arena.stats().used_bytes == 0
    arena.close()

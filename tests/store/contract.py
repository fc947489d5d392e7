"""What every tier must do. Its tests inherit the class and say how to make one."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvweave.store import Tier
from kvweave.store.files import aligned
from kvweave.store.keys import KEY_BYTES, Bytes
from kvweave.store.tier import ABSENT, ALL, Blob, KeyFilter, whole
from tests.store.models import checksum_of

HEAD = 4096


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def value(number: int, length: int = 5000) -> bytes:
    return random.Random(number).randbytes(length)


def put(tier: Tier, *numbers: int, length: int = 5000) -> list[bool]:
    values = [value(number, length) for number in numbers]
    return tier.put([key(n) for n in numbers], [headed(data) for data in values])


def headed(data: bytes) -> Blob:
    """A blob whose head is given to whoever knows its payload's sum; all payload if there is no head in it."""
    payload = np.frombuffer(data, np.uint8)[HEAD:]

    def head(payload_sum: int) -> bytes:
        assert payload_sum == checksum_of(payload)
        return data[:HEAD]

    return Blob(payload, HEAD, head) if len(data) >= HEAD else whole(data)


def got(tier: Tier, number: int, length: int = 5000) -> bytes | None:
    """The value, None if absent."""
    buffer = np.zeros(length, np.uint8)
    size = tier.get([key(number)], [buffer])[0]
    assert size in (ABSENT, length)
    return None if size == ABSENT else buffer.tobytes()


class TierContract:
    """Inherit, and give a fixture `tier` of an empty tier with room for at least 64 values of 5,000 bytes."""

    @pytest.fixture
    def tier(self) -> Tier:
        raise NotImplementedError

    def test_what_was_put_is_there_byte_for_byte(self, tier: Tier) -> None:
        assert put(tier, *range(20)) == [True] * 20
        assert all(got(tier, n) == value(n) for n in range(20))

    def test_an_empty_tier_has_nothing(self, tier: Tier) -> None:
        assert not tier.contains([key(1), key(2)]).any()
        assert got(tier, 1) is None

    def test_contains_answers_in_the_order_of_the_keys(self, tier: Tier) -> None:
        put(tier, 2, 3, 5)
        assert tier.contains([key(n) for n in range(7)]).tolist() == [False, False, True, True, False, True, False]

    def test_empty_batches_are_fine(self, tier: Tier) -> None:
        assert tier.contains([]).tolist() == []
        assert tier.get([], []) == []
        assert tier.put([], []) == []
        assert tier.delete([]) == 0

    def test_a_get_of_some_that_are_absent_gives_the_others(self, tier: Tier) -> None:
        put(tier, 1, 3)
        buffers: list[Bytes] = [np.zeros(5000, np.uint8) for _ in range(3)]
        assert tier.get([key(1), key(2), key(3)], buffers) == [5000, ABSENT, 5000]
        assert (buffers[0].tobytes(), buffers[2].tobytes()) == (value(1), value(3))

    def test_a_buffer_of_another_length_is_left_alone(self, tier: Tier) -> None:
        put(tier, 1)
        for length in (4999, 5001):
            buffer = np.full(length, 7, np.uint8)
            assert tier.get([key(1)], [buffer]) == [5000]
            assert (buffer == 7).all()

    def test_the_first_value_of_a_key_stays(self, tier: Tier) -> None:
        put(tier, 1)
        assert tier.put([key(1)], [whole(b"other")]) == [True]
        assert got(tier, 1) == value(1)

    def test_what_was_deleted_is_gone_and_can_come_back(self, tier: Tier) -> None:
        put(tier, 1, 2)
        assert tier.delete([key(1), key(9)]) == 1
        assert tier.contains([key(1), key(2)]).tolist() == [False, True]
        put(tier, 1)
        assert got(tier, 1) == value(1)

    def test_clearing_forgets_what_is_meant_and_nothing_else(self, tier: Tier) -> None:
        tenants, shards = [b"tenant-a", b"tenant-b", b"*[a-c]?\\"], [b"row-no-1", b"row-no-2"]
        keys = [tenant + bytes([n] * 32) + shard for tenant in tenants for n in range(3) for shard in shards]
        assert all(tier.put(keys, [whole(b"x" * 100)] * len(keys)))
        left = set(keys)
        for key_filter, gone in (
            (KeyFilter(b"nobody--"), 0),
            (KeyFilter(b"tenant-a", frozenset(shards[:1])), 3),
            (KeyFilter(tenants[2]), 6),
            (KeyFilter(shards=frozenset(shards[1:])), 6),
            (KeyFilter(shards=frozenset()), 0),
            (ALL, 3),
        ):
            left -= {key for key in left if key in key_filter}
            assert tier.clear(key_filter) == gone
            assert [key for key, is_here in zip(keys, tier.contains(keys), strict=True) if is_here] == [
                key for key in keys if key in left
            ]

    def test_lengths_may_differ(self, tier: Tier) -> None:
        for number, length in enumerate((101, 4096, 4097, 70_000)):
            put(tier, number, length=length)
        for number, length in enumerate((101, 4096, 4097, 70_000)):
            assert got(tier, number, length) == value(number, length)

    def test_many_threads_at_once_see_whole_values_only(self, tier: Tier) -> None:
        wrong: list[object] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(40):
                    number = chance.randrange(12)
                    kind = chance.randrange(3)
                    if kind == 0:
                        put(tier, number)
                    elif kind == 1:
                        tier.delete([key(number)])
                    elif (found := got(tier, number)) not in (None, value(number)):
                        wrong.append((number, found))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong

    def test_stats_name_the_tier(self, tier: Tier) -> None:
        put(tier, *range(5))
        stats = tier.stats()
        assert stats.name == tier.name
        assert stats.entries in (5, None)

    def test_closing_twice_is_fine(self, tier: Tier) -> None:
        tier.close()
        tier.close()

    @pytest.mark.parametrize("length", [5, 300, 4096, 70_000, 700_000])
    @pytest.mark.parametrize("head", [0, 4096])
    def test_a_watcher_is_told_the_sum_behind_the_head_or_nothing(self, tier: Tier, length: int, head: int) -> None:
        blob, watcher, buffer = value(1, head + length), Watcher(head), aligned(head + length)
        assert tier.put([key(1)], [whole(blob)]) == [True]
        assert tier.get([key(1)], [buffer], [watcher]) == [len(blob)]
        assert buffer.tobytes() == blob
        assert watcher.sums in ([], [checksum_of(np.frombuffer(blob, np.uint8)[head:])])


class Watcher:
    def __init__(self, head_bytes: int) -> None:
        self.head_bytes = head_bytes
        self.sums: list[int] = []

    def observe(self, payload_sum: int) -> None:
        self.sums.append(payload_sum)


class KeepingContract:
    """Of tiers that outlive the process: give a fixture `reopen`, which closes and opens the same place again."""

    def test_what_was_put_is_there_after_reopening(self, tier: Tier, reopen) -> None:  # type: ignore[no-untyped-def]
        put(tier, *range(30))
        tier.delete([key(n) for n in range(0, 30, 3)])
        tier = reopen()
        assert [got(tier, n) == (value(n) if n % 3 else None) for n in range(30)] == [True] * 30
        put(tier, 100)
        assert got(reopen(), 100) == value(100)

"""Faults that every tier's tests inherit: whatever happens to a stored blob, it is a miss, and right afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvweave.store import Schema, Shard, Store, Tier, TierPolicy, TierStack
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes, HashedPrompt
from kvweave.store.tier import whole
from tests.store.models import hybrid, namespace, truth

SPEC = hybrid()
SCHEMA = Schema.of(SPEC, parts=2)
TOKENS = np.arange(1025, dtype=np.int32)

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit flipped in the payload": lambda blob: _flipped(blob, len(blob) - 77),
    "a bit flipped in the checksum": lambda blob: _flipped(blob, 25),
    "a bit flipped in the key": lambda blob: _flipped(blob, 50),
    "a bit flipped in the meta": lambda blob: _flipped(blob, 130),
    "another version": lambda blob: blob[:4] + b"\x07\x00" + blob[6:],
    "half of it": lambda blob: blob[: len(blob) // 2],
    "one byte less": lambda blob: blob[:-1],
    "one byte more": lambda blob: blob + b"\0",
    "twice": lambda blob: blob + blob,
    "nothing but zeros": lambda blob: bytes(len(blob)),
    "something else": lambda blob: random.Random(1).randbytes(len(blob)),
    "one byte": lambda blob: b"K",
}


def _flipped(blob: bytes, at: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :]


def payload(shard: Shard, chunk: int) -> Bytes:
    return truth(shard, chunk)


def verify(shard: Shard, chunk: int, found: Bytes) -> None:
    assert (found == truth(shard, chunk)).all(), (shard.tag, chunk)


def saved(tier: Tier, **policy: object) -> tuple[Store, HashedPrompt]:
    store = Store(SCHEMA, TierStack((tier, TierPolicy(inline=True, **policy))))  # type: ignore[arg-type]
    prompt = store.prompt(TOKENS, namespace(SPEC))
    store.save(prompt, payload, points=[512, 1024])
    return store, prompt


def keys_of(prompt: HashedPrompt, tag: str, chunk: int) -> list[bytes]:
    keys = prompt.keys(SCHEMA.ids)
    return [keys[chunk * len(SCHEMA.shards) + i] for i, shard in enumerate(SCHEMA.shards) if shard.tag == tag]


def stored(tier: Tier, key: bytes) -> bytes:
    shard = next(shard for shard in SCHEMA.shards if key.endswith(shard.id))
    buffer = np.zeros(blob_bytes(shard), np.uint8)
    assert tier.get([key], [buffer]) == [len(buffer)]
    return buffer.tobytes()


def replace(tier: Tier, key: bytes, blob: bytes) -> None:
    assert tier.delete([key]) == 1
    assert tier.put([key], [whole(blob)]) == [True]


class FaultContract:
    """Inherit beside the tier's contract: needs its fixture `tier`."""

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_blob_is_a_miss_that_is_counted_and_right_afterwards(self, tier: Tier, damage: str) -> None:
        store, prompt = saved(tier)
        key = keys_of(prompt, "full", 2)[0]
        replace(tier, key, DAMAGE[damage](stored(tier, key)))
        assert store.lookup(prompt).position == 1024
        assert store.load(store.lookup(prompt), verify) == 512
        assert store.stats().tiers[0].damaged == 1
        assert not tier.contains([key]).any()
        assert store.save(prompt, payload).stored == 1
        assert store.load(store.lookup(prompt), verify) == 1024
        assert store.stats().tiers[0].damaged == 1

    def test_swapped_blobs_are_both_misses(self, tier: Tier) -> None:
        store, prompt = saved(tier)
        one, other = (keys_of(prompt, "full", chunk)[0] for chunk in (1, 3))
        first, second = stored(tier, one), stored(tier, other)
        replace(tier, one, second)
        replace(tier, other, first)
        assert store.load(store.lookup(prompt), verify) == 0
        assert store.stats().tiers[0].damaged == 2
        store.save(prompt, payload, points=[512, 1024])
        assert store.load(store.lookup(prompt), verify) == 1024

    def test_the_blob_of_another_tenant_is_a_miss(self, tier: Tier) -> None:
        store, prompt = saved(tier)
        other = store.prompt(TOKENS, namespace(SPEC, tenant="other"))
        store.save(other, payload)
        mine, theirs = (keys_of(p, "state", 3)[0] for p in (prompt, other))
        replace(tier, mine, stored(tier, theirs))
        assert store.load(store.lookup(prompt), verify) == 512

    def test_deleted_entries_are_misses(self, tier: Tier) -> None:
        store, prompt = saved(tier)
        hit = store.lookup(prompt)
        tier.delete(keys_of(prompt, "window", 3))
        assert store.load(hit, verify) == 512
        assert store.lookup(prompt).position == 512
        assert store.stats().tiers[0].damaged == 0

"""Removals of announced blocks: each block once, whichever of its chunks is lost first."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.integrations.keyed_pages import KeyedPool, page_schema
from kvweave.integrations.vllm import announced_blocks
from kvweave.integrations.vllm.announced_blocks import AnnouncedBlocks, RemovalFollower, groups_of_shards
from kvweave.integrations.vllm.engine_groups import EngineGroup
from kvweave.spec import Full, State
from kvweave.store import DictTier, Schema, Store, TierStack
from tests.store.models import hybrid

SHARDS = {b"attentio": [0, 1], b"states..": [2]}
PREFIXES = np.arange(4 * 32, dtype=np.uint8).reshape(4, 32)


def key(shard: bytes, chunk: int) -> bytes:
    return b"tenant.." + bytes(PREFIXES[chunk]) + shard


def group(number: int, block_tokens: int) -> EngineGroup:
    return EngineGroup(number, block_tokens, State() if number == 2 else Full(), ("layers.0",))


def test_a_shard_is_of_the_groups_whose_tables_lead_to_its_tag_on_any_worker() -> None:
    schema = Schema.of(hybrid(), stages=(0, 2), parts=1)
    tags = {("group 0", "full"), ("group 1", "window"), ("group 2", "window"), ("group 2", "state")}
    found = groups_of_shards(schema, [group(number, 64) for number in range(3)], tags)
    assert [found[shard.id] for shard in schema.shards if shard.tag == "window"] == [[1, 2], [1, 2]]
    assert [found[shard.id] for shard in schema.shards if shard.tag != "window"] == [[0], [2]]


def test_blocks_larger_and_smaller_than_chunks_are_removed_with_any_of_their_chunks() -> None:
    made = AnnouncedBlocks(SHARDS)
    made.add(group(0, 128), 64, PREFIXES, 0, ["large 0", "large 1"])
    made.add(group(1, 32), 64, PREFIXES, 2, ["small 2", "small 3", "small 4"])
    assert made.removed([key(b"attentio", 1)]) == {0: ["large 0"], 1: ["small 2", "small 3"]}
    assert made.removed([key(b"attentio", 0), key(b"attentio", 1)]) == {}
    assert made.removed([key(b"unknown.", 2), key(b"attentio", 2)]) == {0: ["large 1"], 1: ["small 4"]}


def test_a_state_is_removed_with_the_chunk_at_whose_end_it_was_taken() -> None:
    made = AnnouncedBlocks(SHARDS)
    made.add(group(2, 128), 64, PREFIXES, 1, ["state"])
    assert made.removed([key(b"states..", 2), key(b"attentio", 3)]) == {}
    assert made.removed([key(b"states..", 3)]) == {2: ["state"]}


def test_a_block_that_is_announced_again_is_removed_again() -> None:
    made = AnnouncedBlocks(SHARDS)
    for _ in range(2):
        made.add(group(0, 64), 64, PREFIXES, 1, ["block"])
        assert made.removed([key(b"attentio", 1)]) == {0: ["block"]}


def test_more_than_is_remembered_is_announced_as_removed_the_oldest_first() -> None:
    made = AnnouncedBlocks(SHARDS, most=2)
    made.add(group(0, 64), 64, PREFIXES, 0, ["a", "b", "c"])
    assert made.forgotten() == {0: ["a"]}
    assert made.forgotten() == {}
    assert made.everything() == {0: ["b", "c"]}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(page_schema([KeyedPool("kv", 64)]), TierStack(DictTier())) as made:
        yield made


def test_a_store_is_asked_again_also_after_it_failed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced_blocks, "ASK_EVERY_S", 0.0)
    follower, answers = RemovalFollower(store), 0
    monkeypatch.setattr(store, "_removed", lambda *_: (_ for _ in ()).throw(StoreError("gone")))
    for _ in range(5):
        follower.take()
        time.sleep(0.01)
    monkeypatch.undo()
    monkeypatch.setattr(announced_blocks, "ASK_EVERY_S", 0.0)
    until = time.monotonic() + 10
    while answers < 2 and time.monotonic() < until:
        answers += follower.take() is not None
    assert answers == 2

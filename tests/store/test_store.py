"""The store: the longest resume point that the tiers hold, and exactly what it needs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave import ModelSpec
from kvweave.errors import StoreError
from kvweave.spec import Chunk, Full, Reach, SinkWindow, State, Window
from kvweave.store import DictTier, DiskTier, MemoryTier, Saved, Schema, Shard, Store, TierPolicy, TierStack
from kvweave.store.blob import HEADER, blob_bytes, seal
from kvweave.store.keys import Bytes
from kvweave.store.shard_group import refreshed
from kvweave.store.tier import joined
from tests.store.models import SINKS, fill, hybrid, namespace, one, rank, share, truth

SIZE = 256
NEAR = TierPolicy(inline=True)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(Schema.of(hybrid()), TierStack((MemoryTier("16MiB"), NEAR)))
    yield made
    made.close()


def everything(shard: Shard, chunk: int) -> Bytes:
    return truth(shard, chunk)


def checked(seen: set[tuple[str, int, int]]):  # type: ignore[no-untyped-def]
    """A sink that compares with the truth and notes what came."""

    def sink(shard: Shard, chunk: int, payload: Bytes) -> None:
        assert (payload == truth(shard, chunk)).all()
        seen.add((shard.tag, shard.part, chunk))

    return sink


def tokens(number: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1000, number).astype(np.int32)


def test_a_saved_prompt_is_found_again_and_loaded_whole(store: Store) -> None:
    prompt = store.prompt(tokens(1100), namespace(hybrid()))
    saved = store.save(prompt, everything)
    assert saved == Saved(stored=4 * 4 + 2 * 4 + 8, present=0, dropped=0)
    hit = store.lookup(prompt)
    assert hit.position == 1024
    seen: set[tuple[str, int, int]] = set()
    assert store.load(hit, checked(seen)) == 1024
    assert len(seen) == saved.stored


def test_a_load_brings_exactly_what_the_reaches_need(store: Store) -> None:
    prompt = store.prompt(tokens(1100), namespace(hybrid()))
    store.save(prompt, everything, points=[512, 1024])
    seen: set[tuple[str, int, int]] = set()
    store.load(store.lookup(prompt), checked(seen))
    chunks = {tag: {chunk for t, _, chunk in seen if t == tag} for tag in ("full", "window", "state")}
    assert chunks == {"full": {0, 1, 2, 3}, "window": {2, 3}, "state": {3}}


def test_windows_and_states_are_kept_at_resume_points_only(store: Store) -> None:
    prompt = store.prompt(tokens(2100), namespace(hybrid()))
    store.save(prompt, everything, points=[512, 2048])
    present = store.lookup(prompt).tiers >= 0
    by_tag = {shard.tag: np.flatnonzero(present[i]).tolist() for i, shard in enumerate(store.schema.shards)}
    assert by_tag == {"full": [*range(8)], "window": [0, 1, 6, 7], "state": [1, 7]}
    sibling = np.concatenate([tokens(2100)[:1500], tokens(600, seed=1)])
    assert store.lookup(store.prompt(sibling, namespace(hybrid()))).position == 512


def test_a_lookup_hits_what_its_hit_needs_and_refreshes_all_but_other_states(store: Store) -> None:
    prompt = store.prompt(tokens(2100), namespace(hybrid()))
    store.save(prompt, everything, points=[512, 2048])
    tier = store.tier_stack.executors[0].tier
    assert isinstance(tier, MemoryTier)
    catalog = tier._catalog
    before = catalog.ticks.copy()
    hit = store.lookup(prompt)
    needed = {piece for group in store.schema.groups for piece in map(tuple, group.needs(2048, hit.present).tolist())}
    shards = len(store.schema.shards)
    for number, key in enumerate(hit.keys):
        slot = catalog.slot_of.get(key)
        if slot is not None:
            is_needed = (number % shards, number // shards) in needed
            is_state = store.schema.shards[number % shards].tag == "state"
            assert (catalog.ticks[slot] > before[slot]) == (is_needed or not is_state)
            assert catalog.hits[slot] == is_needed


def test_what_is_found_in_memory_is_used_on_disk_as_well(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, "16MiB")
    with Store(Schema.of(hybrid()), TierStack((MemoryTier("16MiB"), NEAR), disk)) as store:
        prompt = store.prompt(tokens(600), namespace(hybrid()))
        store.save(prompt, everything)
        assert store.flush()
        assert store.lookup(prompt).position == 512
        assert disk._catalog.hits.max() == 1


def test_what_a_hit_needs_is_not_refreshed_before_its_age_is_counted() -> None:
    groups = Schema.of(hybrid()).groups
    present = np.ones((groups[-1].stop, 4), bool)
    needed = np.zeros_like(present)
    needed[groups[0].first : groups[0].stop, 0] = True
    others = refreshed(groups, present, needed)
    assert not np.isin(np.flatnonzero(needed.T), others).any()
    assert {number % len(present) for number in others.tolist()} == {*range(len(present))} - {
        *range(groups[2].first, groups[2].stop)
    }


def test_the_last_token_is_left_to_compute(store: Store) -> None:
    prompt = store.prompt(tokens(1024), namespace(hybrid()))
    store.save(prompt, everything, points=[768, 1024])
    assert store.lookup(prompt).position == 768
    assert store.lookup(store.prompt(tokens(1025)[:1025], namespace(hybrid()))).position in (0, 1024)


def test_other_namespaces_find_nothing(store: Store) -> None:
    store.save(store.prompt(tokens(600), namespace(hybrid())), everything)
    for fields in ({"tenant": "b"}, {"adapter": "lora"}, {"weights": "2"}, {"salt": b"x"}):
        assert store.lookup(store.prompt(tokens(600), namespace(hybrid(), **fields))).position == 0


def test_saving_again_stores_nothing_and_asks_for_no_payload(store: Store) -> None:
    prompt = store.prompt(tokens(600), namespace(hybrid()))
    first = store.save(prompt, everything)

    def never(shard: Shard, chunk: int) -> Bytes:
        raise AssertionError("asked")

    assert store.save(prompt, never) == Saved(0, first.stored, 0)


def test_a_prompt_shorter_than_a_chunk_is_no_work(store: Store) -> None:
    prompt = store.prompt(tokens(255), namespace(hybrid()))
    assert store.save(prompt, everything) == Saved()
    hit = store.lookup(prompt)
    assert hit.position == 0
    assert store.load(hit, checked(set())) == 0


def test_what_is_lost_between_lookup_and_load_shortens_it(store: Store) -> None:
    prompt = store.prompt(tokens(2100), namespace(hybrid()))
    store.save(prompt, everything, points=[512, 1024, 2048])
    hit = store.lookup(prompt)
    shards = len(store.schema.shards)
    state = next(i for i, shard in enumerate(store.schema.shards) if shard.tag == "state")
    store.tier_stack.executors[0].tier.delete([hit.keys[7 * shards + state]])
    seen: set[tuple[str, int, int]] = set()
    assert store.load(hit, checked(seen)) == 1024
    assert {("window", 0, 2), ("window", 0, 3), ("state", 0, 3)} <= seen
    assert store.stats().shortened == 1


def test_a_payload_of_the_wrong_size_is_an_error_of_the_caller(store: Store) -> None:
    prompt = store.prompt(tokens(300), namespace(hybrid()))
    with pytest.raises(StoreError, match="is needed"):
        store.save(prompt, lambda shard, chunk: np.zeros(3, np.uint8))


def test_first_chunks_outlive_the_last_when_room_gets_tight() -> None:
    spec = one(Full())
    schema = Schema.of(spec, parts=1)
    store = Store(schema, TierStack((MemoryTier(20 * blob_bytes(schema.shards[0])), NEAR)))
    first, second = (store.prompt(tokens(12 * SIZE + 1, seed), namespace(spec)) for seed in (1, 2))
    store.save(first, everything)
    store.save(second, everything)
    assert store.lookup(second).position == 12 * SIZE
    assert 6 * SIZE <= store.lookup(first).position <= 9 * SIZE


def test_the_header_of_a_blob_says_what_it_is() -> None:
    shard = Schema.of(hybrid()).shards[0]
    blob = joined(seal(shard, 2, bytes(range(48)), truth(shard, 2)))
    meta = json.loads(blob[HEADER.size : len(blob) - shard.payload_bytes])
    assert (meta["tag"], meta["layers"], meta["part"]) == ("full", [0], 0)
    assert HEADER.unpack_from(blob)[-2:] == (512, 768)


def test_ranks_of_other_degrees_share_a_hybrid_prompt() -> None:
    spec = hybrid()
    schema = Schema.of(spec, parts=4)
    store = Store(schema, TierStack((DictTier(), NEAR)))
    prompt = store.prompt(tokens(1100), namespace(spec))
    wishes: dict[str, Any] = {"block_tokens": {"full": 16, "window": 64, "state": 256}}
    for at in range(2):
        writer = rank(schema, spec, 1024, tp=2, at=at, **wishes)
        fill(schema, writer, 4)
        store.save(prompt, writer.pages.source(writer.table), shards=writer.pages.writes)
    for at in range(4):
        reader, right = (rank(schema, spec, 1024, tp=4, at=at, block_tokens=64) for _ in range(2))
        fill(schema, right, 4)
        hit = store.lookup(prompt)
        assert store.load(hit, reader.pages.sink(reader.table), shards=reader.pages.reads) == 1024
        for place, shards in share(right).items():
            needed = {"full": slice(None), "window": slice(512, None), "state": slice(-1, None)}[place[1]]
            assert share(reader)[place][needed] == shards[needed], place


REACHES = st.one_of(
    st.just(Full()),
    st.just(State()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(Chunk, st.integers(1, 40)),
    st.builds(SinkWindow, st.integers(1, 12), st.integers(1, 30)),
)


@given(st.lists(REACHES, min_size=1, max_size=3), st.integers(0, 2**32))
def test_the_hit_is_the_longest_position_whose_needs_are_all_there(reaches: list[Reach], seed: int) -> None:
    """Against brute force, over random presence."""
    chance = random.Random(seed)
    size, count = 4, 12
    spec = ModelSpec("random", tuple(layer for i, reach in enumerate(reaches) for layer in _layers(i, reach)))
    schema = Schema.of(spec, chunk_tokens=size, parts=2)
    tier = DictTier()
    store = Store(schema, TierStack((tier, NEAR)))
    prompt = store.prompt([*range(size * count + 1)], namespace(spec))
    store.save(prompt, everything, points=range(0, size * count + 1, size))
    tier.delete([key for key in prompt.keys(schema.ids) if chance.random() < 0.15])
    present = store.lookup(prompt).tiers >= 0
    fine = [
        p for p in range(0, size * count + 1, size)
        if all(present[i, chunk] for i, shard in enumerate(schema.shards) for chunk in _needs(shard.reach, p, size))
    ]  # fmt: skip
    hit = store.lookup(prompt)
    assert hit.position == max(fine)
    assert store.load(hit, checked(set())) == hit.position


def _layers(number: int, reach: Reach):  # type: ignore[no-untyped-def]
    layer = one(reach).layers[0]
    return ModelSpec("x", (layer,)).retag({"only": f"group {number}"}).layers


def _needs(reach: Reach, position: int, size: int) -> set[int]:
    needed = {*range(min(reach.head, position)), *range(reach.tail(position), position)}
    return {token // size for token in needed}


def test_sinks_are_loaded_with_the_window() -> None:
    store = Store(Schema.of(SINKS), TierStack((DictTier(), NEAR)))
    prompt = store.prompt(tokens(10 * SIZE + 1), namespace(SINKS))
    store.save(prompt, everything)
    seen: set[tuple[str, int, int]] = set()
    assert store.load(store.lookup(prompt), checked(seen)) == 10 * SIZE
    assert {chunk for _, _, chunk in seen} == {0, 1, 8, 9}


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(0, 9))
@pytest.mark.parametrize("spec", [hybrid(), SINKS])
def test_a_save_keeps_what_each_of_its_points_needs_from_its_start_on(
    spec: ModelSpec, chunks: set[int], first: int
) -> None:
    schema, points = Schema.of(spec), [256 * chunk for chunk in chunks]
    store = Store(schema, TierStack(DictTier()))
    prompt = store.prompt(np.arange(2560, dtype=np.int32), namespace(spec))
    found = store._to_keep(prompt, truth, points, None, 256 * first)
    needed = {(number, chunk) for point in points for number, s in enumerate(schema.shards) for chunk in s.needs(point)}
    assert found == sorted((piece for piece in needed if piece[1] >= first), key=lambda piece: piece[::-1])

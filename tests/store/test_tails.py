"""Windows stored as the tail that a point needs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvweave import LayerCache
from kvweave.spec import Chunk, DType, Full, Reach, Role, SinkWindow, State, Window
from kvweave.store import DictTier, Schema, Shard, Store, TierPolicy, TierStack
from kvweave.store.keys import Bytes
from kvweave.store.shard_group import tail_start
from tests.store.models import hybrid, kv, model, namespace, one

TOKENS = np.arange(2000)


class Kept:
    """A source that has lost the tokens of windows before `first`."""

    def __init__(self, first: int) -> None:
        self.first, self.asked = first, list[tuple[str, int, int]]()

    def holds(self, shard: Shard, chunk: int) -> bool:
        return shard.tag != "window" or shard.tokens(chunk)[0] >= self.first

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        assert self.holds(shard, chunk)
        self.asked.append((shard.tag, shard.first_token, chunk))
        return np.full(shard.payload_bytes, chunk, np.uint8)


def opened(window: int = 300, *, tails: bool = True, tier: DictTier | None = None) -> Store:
    schema = Schema.of(hybrid(window), parts=1, tails=tails)
    return Store(schema, TierStack((tier or DictTier(), TierPolicy(inline=True))))


def windows(source: Kept) -> list[tuple[int, int]]:
    return [(first, chunk) for tag, first, chunk in source.asked if tag == "window"]


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        (Window(300), 213), (Window(257), 0), (Window(1), 0), (Window(2), 255), (Window(128), 129),
        (SinkWindow(4, 300), 213), (Full(), 0), (State(), 0), (Chunk(512), 0), (Chunk(300), 0), (Chunk(100), 0),
    ],
)  # fmt: skip
def test_the_tail_of_every_point_begins_with_the_same_token_of_its_chunk(reach: Reach, expected: int) -> None:
    assert tail_start(reach, 256, 1) == expected
    offsets = {int(reach.tail(point)) % 256 for point in range(5120, 51200, 256)} if reach.per_token else set()
    assert expected == 0 or offsets == {expected}


def test_a_tail_begins_with_a_whole_row() -> None:
    compressed = Role("compressed", (6,), DType.BFLOAT16, tokens_per_row=4)
    schema = Schema.of(model(LayerCache("c", Window(302), (compressed,))), tails=True)
    assert [shard.first_token for shard in schema.shards] == [0, 208]  # 211 in rows of 4


def test_whole_chunks_keep_their_keys_and_tails_say_what_they_are() -> None:
    without, with_tails = (Schema.of(hybrid(), tails=tails) for tails in (False, True))
    assert {shard.id for shard in without.shards} < {shard.id for shard in with_tails.shards}
    tail = [shard for shard in with_tails.shards if shard.first_token]
    assert len(tail) == 4
    assert {json.loads(shard.meta)["first_token"] for shard in tail} == {213}
    whole = next(shard for shard in without.shards if shard.tag == "window")
    assert tail[0].payload_bytes * 256 == whole.payload_bytes * (256 - 213)


def test_an_engine_that_has_only_the_window_saves_a_point_and_finds_it() -> None:
    store = opened()
    prompt, source = store.prompt(TOKENS, namespace(hybrid())), Kept(1024 - 299)
    store.save(prompt, source, points=[1024])
    assert windows(source) == [(213, 2), (0, 3)]
    hit = store.lookup(prompt)
    assert hit.position == 1024
    given = []
    assert store.load(hit, lambda shard, chunk, _: given.append((shard.tag, shard.first_token, chunk))) == 1024
    assert [(first, chunk) for tag, first, chunk in given if tag == "window"] == [(213, 2), (0, 3)]


def test_tails_are_saved_and_loaded_by_what_is_submitted_too() -> None:
    store = opened()
    prompt, source, given = store.prompt(TOKENS, namespace(hybrid())), Kept(1024 - 299), list[tuple[str, int, int]]()
    assert store.submit_save(prompt, source, points=[1024]).result().dropped == 0
    load = store.submit_load(
        store.redeem(store.lookup(prompt).ticket()),
        lambda shard, chunk, _: given.append((shard.tag, shard.first_token, chunk)),
        start=600,
    )
    assert (load.result(), load.failed) == (1024, ())
    assert given == [("full", 0, 2), ("full", 0, 3), ("window", 213, 2), ("window", 0, 3), ("state", 0, 3)]
    assert store.load(store.lookup(prompt), lambda *_: None, start=1024) == 1024


def test_whole_chunks_are_saved_where_they_are_there_and_serve_as_tails() -> None:
    store = opened()
    prompt, source = store.prompt(TOKENS, namespace(hybrid())), Kept(0)
    store.save(prompt, source, points=[1024])
    assert windows(source) == [(0, 2), (0, 3)]
    assert store.lookup(prompt).position == 1024


def test_a_source_that_says_nothing_of_its_pages_is_asked_for_whole_chunks() -> None:
    store, asked = opened(), list[int]()

    def source(shard: Shard, chunk: int) -> Bytes:
        asked.append(shard.first_token)
        return np.full(shard.payload_bytes, chunk, np.uint8)

    store.save(store.prompt(TOKENS, namespace(hybrid())), source)
    assert {*asked} == {0}


def test_a_tail_does_not_pass_for_its_chunk() -> None:
    """At 512 the window needs the first chunk from token 213 on, at 256 from its first."""
    store = opened()
    prompt = store.prompt(TOKENS, namespace(hybrid()))
    store.save(prompt, Kept(0), points=[1024])  # states and full attention of all points below
    store.save(prompt, Kept(213), points=[512])
    assert store.lookup(store.prompt(TOKENS[:600], namespace(hybrid()))).position == 512
    assert store.lookup(store.prompt(TOKENS[:500], namespace(hybrid()))).position == 0


def test_before_a_window_is_full_its_first_chunk_is_needed_whole() -> None:
    (group,) = Schema.of(one(Window(300)), parts=1, tails=True).groups
    assert group.pieces(256, lambda *_: True).tolist() == [[0, 0]]
    assert group.pieces(512, lambda *_: True).tolist() == [[1, 0], [0, 1]]


def test_a_damaged_chunk_is_replaced_by_its_tail_if_there_is_one() -> None:
    tier = DictTier()
    store = opened(tier=tier)
    prompt = store.prompt(TOKENS, namespace(hybrid()))
    store.save(prompt, Kept(1024 - 299), points=[1024])
    store.save(prompt, Kept(0), points=[1024])
    hit, whole = store.lookup(prompt), next(s for s in store.schema.shards if s.tag == "window")
    number = store.schema.shards.index(whole)
    key = hit.keys[2 * len(store.schema.shards) + number]
    tier.blobs[key] = tier.blobs[key][:-1] + b"?"
    given = []
    assert store.load(hit, lambda shard, chunk, _: given.append((shard.tag, shard.first_token, chunk))) == 1024
    assert ("window", 213, 2) in given


def test_a_store_without_tails_finds_whole_chunks_of_one_with_tails_and_the_other_way_round() -> None:
    for wrote, read in ((False, True), (True, False)):
        tier = DictTier()
        prompt = opened(tails=wrote).prompt(TOKENS, namespace(hybrid()))
        opened(tails=wrote, tier=tier).save(prompt, Kept(0), points=[1024])
        assert opened(tails=read, tier=tier).lookup(prompt).position == 1024


def test_sinks_are_whole_even_where_the_window_begins_among_them() -> None:
    schema = Schema.of(one(SinkWindow(300, 500)), parts=1, tails=True)
    (group,) = schema.groups
    assert group.tail_start == 13
    takes = group.pieces(768, lambda *_: True).tolist()
    assert takes == [[0, 0], [0, 1], [0, 2]]  # the window begins at 269, in a chunk that the sinks need whole
    assert group.pieces(2560, lambda *_: True).tolist() == [[0, 0], [0, 1], [1, 8], [0, 9]]


def test_kv_is_not_shared_between_windows_of_two_lengths_by_accident() -> None:
    a, b = (Schema.of(model(LayerCache("w", Window(w), kv(2))), tails=True).shards[-1] for w in (300, 301))
    assert a.id != b.id

"""What one rank stored, any other reads, bit for bit: all pairs of degree, block and layout."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvweave import LayerCache, ModelSpec
from kvweave.errors import StoreError
from kvweave.spec import Full
from kvweave.store import DictTier, Schema, Shard, Store, TierPolicy, TierStack
from tests.store.models import (
    CHUNK,
    KINDS,
    LAYOUTS,
    SINKS,
    Rank,
    fill,
    hybrid,
    kv,
    model,
    namespace,
    rank,
    share,
    truth,
)

CHUNKS = 2
TOKENS = CHUNK * CHUNKS
SHAPES = tuple(product((1, 2, 4), (16, 64, 256), LAYOUTS))


def ranks(schema: Schema, spec: ModelSpec, tp: int, block: int, layout: str) -> list[Rank]:
    state = dict.fromkeys(spec.groups(), block)
    return [rank(schema, spec, TOKENS, tp=tp, at=at, block_tokens=state, layout=layout) for at in range(tp)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_pairs_of_degree_block_and_layout_agree_bit_for_bit(kind: str) -> None:
    spec = KINDS[kind]
    schema = Schema.of(spec, parts=4)
    tokens = np.arange(TOKENS + 1, dtype=np.int32)
    everybody = {shape: ranks(schema, spec, *shape) for shape in SHAPES}
    for members in everybody.values():
        for member in members:
            fill(schema, member, CHUNKS)
    computed = {shape: [share(member) for member in members] for shape, members in everybody.items()}
    stores = {}
    for shape, members in everybody.items():
        stores[shape] = Store(schema, TierStack((DictTier(), TierPolicy(inline=True))))
        prompt = stores[shape].prompt(tokens, namespace(spec))
        for member in members:
            stores[shape].save(prompt, member.pages.source(member.table), shards=member.pages.writes)
    for (wrote, store), (read, members) in product(stores.items(), everybody.items()):
        hit = store.lookup(prompt)
        assert hit.position == TOKENS
        for member, right in zip(members, computed[read], strict=True):
            for pool in member.pools.values():
                pool[:] = 0x55
            assert store.load(hit, member.pages.sink(member.table), shards=member.pages.reads) == TOKENS
            for place, shards in share(member).items():
                assert shards[_loaded(place, spec)] == right[place][_loaded(place, spec)], (wrote, read, place)


def stage_ranks(schema: Schema, spec: ModelSpec, pp: int, tp: int) -> list[Rank]:
    block = dict.fromkeys(spec.groups(), 64)
    places = product(range(pp), range(tp))
    return [rank(schema, spec, TOKENS, tp=tp, at=at, pp=pp, stage=stage, block_tokens=block) for stage, at in places]


def test_ranks_of_pipeline_stages_write_what_ranks_of_any_other_degrees_read() -> None:
    spec, degrees = hybrid(), [*product((1, 2, 3), (1, 2))]
    schema = Schema.of(spec, parts=2, stages=(0, 2, 3, 4), tails=True)  # of 2 and of 3
    stores, tokens = {}, np.arange(TOKENS + 1, dtype=np.int32)
    everybody = {degree: stage_ranks(schema, spec, *degree) for degree in degrees}
    for degree, members in everybody.items():
        assert sorted(number for each in members for number in each.pages.writes) == [*range(len(schema.shards))]
        stores[degree] = Store(schema, TierStack((DictTier(), TierPolicy(inline=True))))
        prompt = stores[degree].prompt(tokens, namespace(spec))
        for member in members:
            fill(schema, member, CHUNKS)
            stores[degree].save(prompt, member.pages.source(member.table), shards=member.pages.writes)
    for store, members in product(stores.values(), everybody.values()):
        hit = store.lookup(prompt)
        assert hit.position == TOKENS
        for member in members:
            right = share(member)
            for pool in member.pools.values():
                pool[:] = 0x55
            assert store.load(hit, member.pages.sink(member.table), shards=member.pages.reads) == TOKENS
            assert {place: rows[_loaded(place, spec)] for place, rows in share(member).items()} == {
                place: rows[_loaded(place, spec)] for place, rows in right.items()
            }


def test_a_stage_that_has_some_layers_of_a_shard_reads_it_but_cannot_write_it() -> None:
    spec = KINDS["gqa"]  # three layers
    schema = Schema.of(spec, parts=1)
    first, second = stage_ranks(schema, spec, 2, 1)
    assert first.pages.reads == second.pages.reads == (0,)
    with pytest.raises(StoreError, match=r"layers 0, 1, 2, this pipeline stage 1, 2 of them"):
        _ = second.pages.writes


def test_shards_of_all_layers_have_the_same_keys_with_and_without_stages() -> None:
    spec = KINDS["gqa"]
    assert Schema.of(spec, stages=(0,)) == Schema.of(spec, stages=(0, 3)) == Schema.of(spec)
    assert [shard.layers for shard in Schema.of(spec, parts=1, stages=(0, 1)).shards] == [(0,), (1, 2)]


def _loaded(place: tuple[int, str, str], spec: ModelSpec) -> slice:
    """Which rows a load brings: all; of states the last snapshot."""
    return slice(None) if spec.groups()[place[1]][0].reach.per_token else slice(-1, None)


def test_a_group_read_by_more_ranks_than_heads_is_shared_by_them() -> None:
    spec = KINDS["gqa"]  # two heads
    schema = Schema.of(spec, parts=8)
    assert [shard.parts for shard in schema.shards] == [2, 2]
    assert [schema.read_by(8, at) for at in range(8)] == [(0,)] * 4 + [(1,)] * 4
    assert [schema.written_by(8, at) for at in range(8)] == [(0,), (), (), (), (1,), (), (), ()]


def test_roles_that_every_rank_holds_are_written_by_one() -> None:
    schema = Schema.of(KINDS["mla"])
    assert [schema.written_by(4, at) for at in range(4)] == [(0,), (), (), ()]
    assert [schema.read_by(4, at) for at in range(4)] == [(0,)] * 4


def test_a_degree_that_holds_no_part_whole_is_told_how_many_to_cut() -> None:
    schema = Schema.of(KINDS["mha"], parts=2)
    assert schema.read_by(4, 3) == (1,)
    with pytest.raises(StoreError, match="parts=4"):
        schema.written_by(4, 0)


def test_all_ranks_together_write_every_row_once() -> None:
    for spec, tp in product(KINDS.values(), (1, 2, 4, 8)):
        schema = Schema.of(spec, parts=8)
        written = [shard for at in range(tp) for shard in schema.written_by(tp, at)]
        assert sorted(written) == list(range(len(schema.shards)))


def test_a_payload_is_layers_then_roles_then_tokens_then_heads() -> None:
    spec = model(LayerCache("full", Full(), kv(4, 2)), layers=2)
    shard = Schema.of(spec, parts=2).shards[1]
    assert [(layer, role.name, where.start, where.stop) for layer, role, where in shard.fields()] == [
        (0, "key", 0, 2048), (0, "value", 2048, 4096), (1, "key", 4096, 6144), (1, "value", 6144, 8192),
    ]  # fmt: skip
    assert shard.payload_bytes == 2 * 2 * 256 * 2 * 2 * 2


@pytest.mark.parametrize("spec", [hybrid(), SINKS])
def test_a_row_needs_what_its_reach_does(spec: ModelSpec) -> None:
    def needs(shard: Shard) -> list[int]:
        return list(shard.needs(4 * CHUNK))

    found = {shard.tag: needs(shard) for shard in Schema.of(spec).shards}
    expected = {"full": [0, 1, 2, 3], "window": [2, 3], "state": [3], "only": [0, 1, 2, 3]}
    assert found == {tag: expected[tag] for tag in found}
    assert list(next(shard for shard in Schema.of(spec).shards).needs(0)) == []


def test_a_chunk_of_which_pages_are_gone_is_not_stored_as_a_whole_one() -> None:
    spec = hybrid()
    schema = Schema.of(spec)
    one = rank(schema, spec, TOKENS, block_tokens=16)
    one.table["window"][16:20] = 0
    shard = next(shard for shard in schema.shards if shard.tag == "window")
    source = one.pages.source(one.table)
    assert source(shard, 0).nbytes == shard.payload_bytes
    with pytest.raises(StoreError, match="4 of the 16 pages of chunk 1 in table 'window' are not there"):
        source(shard, 1)


def test_sinks_need_head_and_tail() -> None:
    assert list(Schema.of(SINKS).shards[0].needs(10 * CHUNK)) == [0, 1, 8, 9]


def test_truth_is_cut_like_the_rows() -> None:
    for spec in KINDS.values():
        for shard in Schema.of(spec).shards:
            assert truth(shard, 0).nbytes == shard.payload_bytes


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_gets_the_heads_that_are_its_own(tp: int) -> None:
    """Against whole arrays, cut by hand."""
    spec = model(LayerCache("full", Full(), kv(8, 4, axis=1)), layers=1)
    schema = Schema.of(spec, parts=8)
    whole = np.random.default_rng(0).integers(0, 2**16, (TOKENS, 8, 4), np.uint16)
    for at in range(tp):
        member = rank(schema, spec, TOKENS, tp=tp, at=at, block_tokens=64)
        sink = member.pages.sink(member.table)
        for shard, chunk in product(schema.shards, range(CHUNKS)):
            keys = np.ascontiguousarray(whole[chunk * CHUNK : (chunk + 1) * CHUNK, shard.part])
            sink(shard, chunk, np.concatenate([keys.ravel(), keys.ravel() + 1]).view(np.uint8))
        mine = whole[:, at * 8 // tp : (at + 1) * 8 // tp]
        shards = share(member)
        assert shards[0, "full", "key"] == [token.tobytes() for token in mine]
        assert shards[0, "full", "value"] == [(token + np.uint16(1)).tobytes() for token in mine]

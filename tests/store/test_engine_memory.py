"""Memory of other engines: what one wrote any other reads, bit for bit, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import Parallel
from kvweave.errors import StoreError
from kvweave.store import (
    DictTier,
    EngineMemory,
    PagePayloads,
    Schema,
    Store,
    TableUse,
    TierPolicy,
    TierStack,
    prove_layout,
    region_view,
)
from kvweave.store.page_payloads import HostGather
from tests.store.engines import HEADS, KEY, LAYOUTS, SPEC, WINDOW, WINDOWS, Engine, Truth
from tests.store.models import namespace

BLOCKS, CHUNKS, DEGREES = (16, 32, 64, 128, 528, 1152), (64, 128, 256), (1, 2, 4)
SHAPES = [*product(LAYOUTS, BLOCKS, DEGREES)]


def schema_of(chunk: int) -> Schema:
    return Schema.of(SPEC, chunk_tokens=chunk, parts=4, tails=True)


def length(chunk: int, *blocks: int) -> int:
    """Whole chunks, at least two blocks and some of a third: edges of both kinds fall everywhere."""
    return -(-(2 * max(chunk, *blocks) + 17) // chunk) * chunk


def ranks(schema: Schema, shape: tuple[str, int, int], tokens: int) -> list[Engine]:
    layout, block, tp = shape
    return [Engine(schema, layout, block, tokens, tp, rank) for rank in range(tp)]


def check_alone(shape: tuple[str, int, int], chunk: int) -> None:
    """Payloads are what the neutral format says, and payloads that come back are what kernels would have written."""
    schema, tokens = schema_of(chunk), length(chunk, shape[1])
    truth, count = Truth(tokens, chunk), length(chunk, shape[1]) // chunk
    for engine in ranks(schema, shape, tokens):
        engine.compute(truth, states=range(count))
        computed = engine.snapshot()
        source = engine.pages.source(engine.tables)
        for number, part in product(engine.pages.writes, range(count)):
            shard = schema.shards[number]
            assert np.array_equal(source(shard, part), truth.payload(shard, part)), (shape, shard.tag, part)
        engine.poison()
        sink = engine.pages.sink(engine.tables)
        for number, part in product(engine.pages.reads, range(count)):
            sink(schema.shards[number], part, truth.payload(schema.shards[number], part))
        assert engine.snapshot() == computed, shape


def written(wrote: tuple[str, int, int], chunk: int, tokens: int) -> DictTier:
    """What engines leave in a store that keep of windows what they must: the pages before are NULL."""
    schema, tier = schema_of(chunk), DictTier()
    store, tail = Store(schema, TierStack((tier, TierPolicy(inline=True)))), tokens - WINDOW + 1
    prompt = store.prompt(np.arange(tokens + 1), namespace(SPEC))
    for engine in ranks(schema, wrote, tokens):
        engine.lose_windows(tail)
        engine.compute(Truth(tokens, chunk), tail // engine.block * engine.block, [tokens // chunk - 1])
        saved = store.save(prompt, engine.pages.source(engine.tables), shards=engine.pages.writes)
        assert saved.stored
        assert not saved.dropped
    return tier


def check_read(read: tuple[str, int, int], chunk: int, tokens: int, tier: DictTier, *, whole: bool) -> None:
    """What is loaded is what kernels would have written, NULL pages and all else untouched. `whole`: the store has all
    of the chunk in which the window begins."""
    schema, tail = schema_of(chunk), tokens - WINDOW + 1
    store = Store(schema, TierStack((tier, TierPolicy(inline=True))))
    hit = store.lookup(store.prompt(np.arange(tokens + 1), namespace(SPEC)))
    assert hit.position == tokens
    for engine in ranks(schema, read, tokens):
        engine.lose_windows(tail)
        assert store.load(hit, engine.pages.sink(engine.tables), shards=engine.pages.reads) == tokens
        loaded = engine.snapshot()
        engine.poison()
        first = tail // chunk * chunk if whole else tail
        engine.compute(Truth(tokens, chunk), max(first, tail // engine.block * engine.block), [tokens // chunk - 1])
        assert engine.snapshot() == loaded, (read, chunk)


def _holds_whole(wrote: tuple[str, int, int], chunk: int, tokens: int) -> bool:
    """Whether a writer still has all of the chunk in which the window begins."""
    tail = tokens - WINDOW + 1
    return tail // wrote[1] * wrote[1] <= tail // chunk * chunk


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_payload_is_the_same_for_every_layout_and_block(layout: str, block: int) -> None:
    index = BLOCKS.index(block) + LAYOUTS.index(layout)
    check_alone((layout, block, DEGREES[index % 3]), CHUNKS[(index // 2) % 3])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES), st.sampled_from(CHUNKS))
def test_what_any_engine_wrote_any_other_reads(
    wrote: tuple[str, int, int], read: tuple[str, int, int], chunk: int
) -> None:
    tokens = length(chunk, wrote[1], read[1])
    check_read(read, chunk, tokens, written(wrote, chunk, tokens), whole=_holds_whole(wrote, chunk, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_pair_of_engines(chunk: int) -> None:
    """All write the same bytes, but for the chunk in which the window begins: some have it whole, others its tail. So
    whoever reads one store of each kind reads them all."""
    tokens, kinds = length(chunk, *BLOCKS), dict[bool, DictTier]()
    for wrote in SHAPES:
        tier, whole = written(wrote, chunk, tokens), _holds_whole(wrote, chunk, tokens)
        assert tier.blobs == kinds.setdefault(whole, tier).blobs, wrote
    for read in SHAPES:
        check_alone(read, chunk)
        for whole, tier in kinds.items():
            check_read(read, chunk, tokens, tier, whole=whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_payloads_that_are_collected_together_are_those_that_are_collected_one_by_one(layout: str) -> None:
    """In any order, and from chunks that begin within their pages."""
    schema, chunks = schema_of(64), [3, 0, 2, 5]
    engine = Engine(schema, layout, 128, 512)
    engine.compute(Truth(512, 64), states=range(8))
    source = engine.pages.source(engine.tables)
    assert isinstance(source, HostGather)
    for shard in (shard for shard in schema.shards if shard.reach.per_token):
        together = np.zeros(len(chunks) * shard.payload_bytes, np.uint8)
        source.fill(shard, chunks, together)
        assert together.tobytes() == b"".join(source(shard, chunk).tobytes() for chunk in chunks)


def test_pages_that_are_not_there_are_never_written_and_never_passed_for_rows() -> None:
    schema, chunk = schema_of(128), 128
    engine = Engine(schema, "[B, 2, N, H, D]", 32, 512)
    truth = Truth(512, chunk)
    engine.compute(truth, states=range(4))
    window = next(shard for shard in schema.shards if shard.tag == "window" and not shard.first_token)
    for layer in WINDOWS:
        engine.tables[f"window {layer}"][4:6] = 0
    with pytest.raises(StoreError, match="2 of the 4 pages of chunk 1 in table 'window \\d' are not there"):
        engine.pages.source(engine.tables)(window, 1)
    assert not engine.pages.holds(window, 1, engine.tables)
    before = {layer: engine.arrays[f"kv {layer}"][0].copy() for layer in WINDOWS}
    engine.pages.sink(engine.tables)(window, 1, truth.payload(window, 1))
    for layer in WINDOWS:
        assert np.array_equal(engine.arrays[f"kv {layer}"][0], before[layer])


def test_a_snapshot_without_a_page_is_refused_both_ways() -> None:
    schema = schema_of(64)
    engine = Engine(schema, "[B, 2, N, H, D]", 64, 256)
    engine.tables["state"][:3] = 0
    state = next(shard for shard in schema.shards if shard.tag == "state")
    engine.pages.source(engine.tables)(state, 3)
    for call in (
        lambda: engine.pages.source(engine.tables)(state, 1),
        lambda: engine.pages.sink(engine.tables)(state, 1, np.zeros(state.payload_bytes, np.uint8)),
    ):
        before = engine.snapshot()
        with pytest.raises(StoreError, match="1 of the 1 pages of chunk 1"):
            call()
        assert engine.snapshot() == before


def test_memory_that_is_not_as_the_spec_says_is_refused_by_name() -> None:
    schema = schema_of(64)
    good = Engine(schema, "[B, 2, N, H, D]", 64, 256).memory
    lost = tuple(view for view in good.views if (view.layer, view.role) != (0, "value"))
    with pytest.raises(StoreError, match="group 'full', layer 0, 'value': in the schema, but not in the memory"):
        PagePayloads(schema, EngineMemory(lost, good.tables, good.pools))
    with pytest.raises(StoreError, match=r"\(4, 8\) of float16 in the memory, but \(2, 8\) of bfloat16 on each of 2"):
        PagePayloads(schema, EngineMemory(good.views, good.tables, good.pools, Parallel(tp=2)))
    odd = {**good.tables, (0, "full"): TableUse("tokens", 96)}
    with pytest.raises(StoreError, match="blocks of 64 tokens do not divide the pages of 96"):
        PagePayloads(schema, EngineMemory(good.views, odd, good.pools))
    with pytest.raises(StoreError, match="layer 1 of group 'latent' has views, but no block table"):
        EngineMemory(good.views, {}, good.pools)
    with pytest.raises(StoreError, match=r"are 2048 bytes, but the region's slots have 1024"):
        region_view(0, "full", KEY, pool="p", base=0, stride=4096, slots=4, size=1024, num_rows=32)


def test_a_table_that_is_missing_or_too_short_is_named() -> None:
    schema = schema_of(64)
    engine = Engine(schema, "[B, 2, N, H, D]", 64, 256)
    full = schema.shards[0]
    with pytest.raises(StoreError, match="no block table 'tokens' among others"):
        engine.pages.source({"others": engine.tables["tokens"]})(full, 0)
    with pytest.raises(StoreError, match="chunk 3 ends at 256, but table 'tokens' has 2 pages of 64 tokens"):
        engine.pages.source({"tokens": engine.tables["tokens"][:2]})(full, 3)


@pytest.mark.parametrize("wrong", [-1, 5, 1 << 30])
def test_a_page_that_the_memory_does_not_have_is_refused_both_ways(wrong: int) -> None:
    schema = schema_of(64)
    engine = Engine(schema, "[B, 2, N, H, D]", 64, 256)
    engine.tables["tokens"][1] = wrong
    with pytest.raises(StoreError, match=f"table 'tokens' names page {wrong}: its pages are 0 to 4"):
        engine.pages.source(engine.tables)(schema.shards[0], 1)
    with pytest.raises(StoreError, match=f"names page {wrong}"):
        engine.pages.sink(engine.tables)(schema.shards[0], 1, np.zeros(schema.shards[0].payload_bytes, np.uint8))


def test_keys_come_from_the_model_and_not_from_the_tables_of_an_engine() -> None:
    assert {shard.tag for shard in schema_of(64).shards} == {"full", "latent", "indexer", "state", "window"}
    whole = next(shard for shard in schema_of(64).shards if shard.tag == "window")
    assert whole.layers == WINDOWS
    assert whole.parts == HEADS


@pytest.mark.parametrize("tp", DEGREES)
def test_a_layout_is_proved_by_what_the_engine_wrote_itself(tp: int) -> None:
    schema, truth = schema_of(64), Truth(256, 64)
    for engine in ranks(schema, ("K as [D, N]", 16, tp), 256):
        engine.compute(truth, states=range(4))
        mine = slice(engine.rank * engine.heads, (engine.rank + 1) * engine.heads)
        rows = {(0, "full", name): truth.rows[0, name][:64, mine] for name in ("key", "value")}
        rows[1, "latent", "latent"] = truth.rows[1, "latent"][:64]
        expected = 3 if engine.rank == 0 else 2  # one rank writes what all hold
        assert prove_layout(schema, engine.pages, engine.tables, rows) == expected


def test_a_wrong_orientation_of_the_right_shape_is_found_out() -> None:
    schema, truth = schema_of(64), Truth(256, 64)
    engine = Engine(schema, "K as [D, N]", 16, 256)
    engine.compute(truth)
    rows = {(0, "full", name): truth.rows[0, name][:64] for name in ("key", "value")}
    keys = engine.arrays["kv 0"][:, :, : 16 * 8].reshape(-1, HEADS, 16, 8).transpose(0, 2, 1, 3)  # in truth [8, 16]
    at, right = next((i, view) for i, view in enumerate(engine.memory.views) if (view.layer, view.role) == (0, "key"))
    wrong = replace(right, strides=keys.strides)
    memory = replace(engine.memory, views=(*engine.memory.views[:at], wrong, *engine.memory.views[at + 1 :]))
    with pytest.raises(StoreError, match="layer 0 of group 'full', 'key': 64 of 64 rows, from token 0 on"):
        prove_layout(schema, PagePayloads(schema, memory), engine.tables, rows)


def test_torch_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    cache = torch.zeros(5, 2, 16, HEADS, 8, dtype=torch.bfloat16)
    tensors = {(0, "full", name): cache[:, side] for side, name in enumerate(("key", "value"))}
    memory = EngineMemory.of_tensors(tensors, {(0, "full"): TableUse("t", 16)})
    schema = Schema.of(SPEC.restrict(range(1)), chunk_tokens=64, parts=1)
    pages = PagePayloads(schema, memory)
    (shard,) = schema.shards
    payload = np.random.default_rng(0).integers(0, 256, shard.payload_bytes, np.uint8)
    table = {"t": np.array([3, 1, 4, 2], np.int32)}
    pages.sink(table)(shard, 0, payload)
    assert np.array_equal(pages.source(table)(shard, 0), payload)
    assert cache[3, 0, 0].view(torch.uint8).flatten().tolist() == payload[: HEADS * 16].tolist()
    assert not cache[0].view(torch.uint8).any()


@pytest.mark.parametrize("smaller_first", [True, False])
def test_arrays_over_one_memory_may_begin_at_the_same_place_and_end_elsewhere(smaller_first: bool) -> None:
    memory = bytearray(3 * 16 * HEADS * 8 * 2 * 2)
    key = np.ndarray((3, 16, HEADS, 8), np.float16, memory)
    value = np.ndarray((2, 3, 16, HEADS, 8), np.float16, memory)[1]
    tensors = {(0, "full", "key"): key, (0, "full", "value"): value}
    if not smaller_first:
        tensors = dict(reversed(tensors.items()))
    schema = Schema.of(SPEC.restrict(range(1)), chunk_tokens=32, parts=1)
    pages = PagePayloads(schema, EngineMemory.of_tensors(tensors, {(0, "full"): TableUse("t", 16)}))
    (shard,), table = schema.shards, {"t": np.array([2, 1], np.int32)}
    payload = np.random.default_rng(0).integers(0, 256, shard.payload_bytes, np.uint8)
    pages.sink(table)(shard, 0, payload)
    assert np.array_equal(pages.source(table)(shard, 0), payload)
    assert value[2].tobytes() == payload[payload.nbytes // 2 :].tobytes()[: value[2].nbytes]


@pytest.mark.parametrize("dtype", ["complex128", "object", "V3"])
def test_items_that_no_role_has_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(StoreError, match=r"layer 0, 'key': items of .* give views of 1, 2, 4 or 8 bytes each"):
        EngineMemory.of_tensors({(0, "full", "key"): np.zeros((2, 16, 1), dtype)}, {(0, "full"): TableUse("t", 16)})

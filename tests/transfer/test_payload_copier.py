"""On a GPU: payloads come straight out of an engine's pages, and back, as on the host. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.copying import PartChecksums
from kvweave.errors import BadCopy, StoreError
from kvweave.store import EngineMemory, PagePayloads, Schema, checksums
from kvweave.store.page_payloads import StagedGather, StagedScatter
from tests.store.engines import LAYOUTS, SPEC, Engine, Truth

CHUNK, TOKENS = 64, 256
SCHEMA = Schema.of(SPEC, chunk_tokens=CHUNK, parts=2, tails=True)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def on_device(engine: Engine) -> tuple[PagePayloads, dict[str, torch.Tensor]]:
    """The same engine, its memory copied to the GPU."""
    from kvweave.transfer.payload_copier import payload_copier

    pools = {name: torch.from_numpy(pool).cuda() for name, pool in engine.memory.pools.items()}
    memory: EngineMemory = replace(engine.memory, pools=pools)
    return PagePayloads(SCHEMA, memory, payload_copier(pools)), pools


def came_back(engine: Engine, pools: dict[str, torch.Tensor]) -> dict[str, bytes]:
    torch.cuda.synchronize()
    for name, pool in pools.items():
        engine.memory.pools[name][:] = pool.cpu().numpy()
    return engine.snapshot()


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [16, 48, 160])
def test_payloads_on_a_gpu_are_those_of_the_host(layout: str, block: int) -> None:
    truth = Truth(TOKENS, CHUNK)
    for rank in range(2):
        engine = Engine(SCHEMA, layout, block, TOKENS, 2, rank)
        engine.compute(truth, states=range(4))
        pages, pools = on_device(engine)
        computed, source = engine.snapshot(), pages.source(engine.tables)
        for number, chunk in product(pages.writes, range(4)):
            assert np.array_equal(source(SCHEMA.shards[number], chunk), truth.payload(SCHEMA.shards[number], chunk))
        for pool in pools.values():
            pool.fill_(0xA5)
        sink = pages.sink(engine.tables)
        for number, chunk in product(pages.reads, range(4)):
            sink(SCHEMA.shards[number], chunk, truth.payload(SCHEMA.shards[number], chunk))
        assert came_back(engine, pools) == computed


@on_gpu
def test_pages_on_a_gpu_that_are_not_there_are_not_written() -> None:
    truth, engine = Truth(TOKENS, CHUNK), Engine(SCHEMA, LAYOUTS[0], 32, TOKENS)
    engine.lose_windows(TOKENS - 74)
    pages, pools = on_device(engine)
    sink = pages.sink(engine.tables)
    for number in pages.reads:
        if SCHEMA.shards[number].tag == "window":
            sink(SCHEMA.shards[number], 2, truth.payload(SCHEMA.shards[number], 2))
    came_back(engine, pools)
    for layer in (3, 4, 5):
        assert (engine.arrays[f"kv {layer}"][0].view(np.uint8) == 0xA5).all()


@on_gpu
@pytest.mark.parametrize("fine", [True, False])
def test_a_payload_on_its_way_to_a_gpu_is_judged_before_pages_are_written(fine: bool) -> None:
    truth, engine = Truth(TOKENS, CHUNK), Engine(SCHEMA, LAYOUTS[0], 16, TOKENS)
    engine.compute(truth, states=range(4))
    expected = engine.snapshot() if fine else {}
    engine.poison()
    pages, pools = on_device(engine)
    expected = expected or engine.snapshot()
    sink = pages.sink(engine.tables)
    assert isinstance(sink, StagedScatter)
    for number, chunk in product(pages.reads, range(4)):
        payload = truth.payload(SCHEMA.shards[number], chunk)

        def judged(found: Any, payload: Any = payload, expected: int = checksums.checksum(payload)) -> bool:
            payload[:] = 0xEE  # it was read by then
            return fine and [checksums.of_parts(parts) for parts in found] == [expected]

        assert sink.begin_landing(SCHEMA.shards[number], [chunk], [payload])(judged) is fine
    assert came_back(engine, pools) == expected


@on_gpu
def test_what_is_gathered_from_a_gpu_comes_with_its_sums() -> None:
    truth, engine = Truth(TOKENS, CHUNK), Engine(SCHEMA, LAYOUTS[0], 16, TOKENS)
    engine.compute(truth, states=range(4))
    pages, _ = on_device(engine)
    source = pages.source(engine.tables)
    assert isinstance(source, StagedGather)
    for shard in (SCHEMA.shards[number] for number in pages.writes):
        expected = [truth.payload(shard, chunk) for chunk in range(1 if shard.payload_bytes % 8 else 4)]
        payloads = [np.zeros(shard.payload_bytes, np.uint8) for _ in expected]
        found = source.begin_gather(shard, range(len(expected)), payloads)()
        assert [checksums.of_parts(parts) for parts in found] == [*map(checksums.checksum, expected)]
        assert np.array_equal(payloads, expected)


@on_gpu
def test_a_page_that_a_gpu_does_not_have_is_refused_and_its_staging_memory_used_again() -> None:
    engine = Engine(SCHEMA, LAYOUTS[0], 16, TOKENS)
    pages, _ = on_device(engine)
    sink: Any = pages.sink({name: table + (1 << 20) for name, table in engine.tables.items()})
    shard = SCHEMA.shards[pages.reads[0]]
    for _ in range(2):
        with pytest.raises(StoreError, match="names page"):
            sink.begin_landing(shard, [0], [np.zeros(shard.payload_bytes, np.uint8)])
    assert len(sink._copier._idle) == 1


@on_gpu
@pytest.mark.parametrize("gaps", [(4096, 4096, 4096), (4096, 0, 64), (0, 0, 0)])
def test_payloads_go_to_wherever_they_lie_on_the_host_and_come_back_from_there(gaps: tuple[int, ...]) -> None:
    truth, engine = Truth(TOKENS, CHUNK), Engine(SCHEMA, LAYOUTS[0], 16, TOKENS)
    engine.compute(truth, states=range(4))
    pages, _ = on_device(engine)
    source, sink = pages.source(engine.tables), pages.sink(engine.tables)
    assert isinstance(source, StagedGather)
    assert isinstance(sink, StagedScatter)
    shard = next(shard for shard in SCHEMA.shards if not shard.payload_bytes % 8 and len([*shard.needs(TOKENS)]) > 3)
    starts = np.cumsum([0, *(shard.payload_bytes + gap for gap in gaps)])
    memory = np.full(starts[-1] + shard.payload_bytes, 0x77, np.uint8)
    payloads = [memory[at : at + shard.payload_bytes] for at in starts]
    found = source.begin_gather(shard, range(4), payloads)()
    for chunk, (payload, parts) in enumerate(zip(payloads, found, strict=True)):
        assert np.array_equal(payload, truth.payload(shard, chunk))
        assert checksums.of_parts(parts) == checksums.checksum(payload)
    assert np.count_nonzero(memory == 0x77) >= sum(gaps), "what lies between them is left alone"
    judged = list[int]()

    def judge(sums: Sequence[PartChecksums]) -> bool:
        judged.extend(checksums.of_parts(parts) for parts in sums)
        return True

    assert sink.begin_landing(shard, range(4), payloads)(judge)
    assert judged == [checksums.checksum(payload) for payload in payloads]


@on_gpu
@pytest.mark.parametrize("size", [0, 8, 100, 32_760, 32_768, 32_776, 65_535, 65_536, 98_304, 1 << 20, 3_000_008])
@pytest.mark.parametrize("count", [1, 3])
def test_sums_of_parts_on_a_gpu_are_those_of_the_host(size: int, count: int) -> None:
    from kvweave.transfer.checksum_kernel import ChecksumLayout
    from kvweave.transfer.driver import ImmediateCommands, context_of

    if count > 1 and size % 8:
        pytest.skip("several payloads have a multiple of 8 bytes")
    payloads = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    staged = torch.zeros(count * size + 8, dtype=torch.uint8, device="cuda")
    staged[: count * size] = torch.from_numpy(payloads.reshape(-1)).cuda()
    sums = ChecksumLayout(size)
    out = torch.zeros(8 * sums.words * count + 8, dtype=torch.uint8).pin_memory()
    commands = ImmediateCommands(context_of(0))
    sums.launch(commands, count, staged.data_ptr(), out.data_ptr(), torch.cuda.current_stream().cuda_stream, 0)
    commands.flush()
    torch.cuda.synchronize()
    found = [checksums.of_parts(parts) for parts in sums.found(out.numpy(), count)]
    assert found == [checksums.checksum(payload) for payload in payloads]


@on_gpu
def test_several_threads_gather_at_once_and_after_what_the_stream_still_writes() -> None:
    truth, engine = Truth(TOKENS, CHUNK), Engine(SCHEMA, LAYOUTS[0], 16, TOKENS)
    pages, pools = on_device(engine)
    engine.compute(truth, states=range(4))
    computed = {name: torch.from_numpy(pool).cuda() for name, pool in engine.memory.pools.items()}
    torch.cuda._sleep(50_000_000)
    for name, pool in pools.items():
        pool.copy_(computed[name])
    source: Any = pages.source(engine.tables)
    pieces = [*product(pages.writes, range(4))] * 4
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda piece: source(SCHEMA.shards[piece[0]], piece[1]), pieces))
    for (number, chunk), payload in zip(pieces, found, strict=True):
        assert np.array_equal(payload, truth.payload(SCHEMA.shards[number], chunk))


@on_gpu
def test_pools_on_two_devices_are_refused() -> None:
    from kvweave.transfer.payload_copier import payload_copier

    with pytest.raises(BadCopy, match="pools must be on one GPU"):
        payload_copier({"a": torch.zeros(8, dtype=torch.uint8).cuda(), "b": torch.zeros(8, dtype=torch.uint8)})


@on_gpu
def test_what_was_gathered_ahead_is_copied_once_and_dropped_memory_is_used_again() -> None:
    truth, engine = Truth(TOKENS, CHUNK), Engine(SCHEMA, LAYOUTS[0], 16, TOKENS)
    engine.compute(truth, states=range(4))
    pages, _ = on_device(engine)
    source: Any = pages.source(engine.tables)
    shard = next(shard for shard in SCHEMA.shards if not shard.payload_bytes % 8 and len([*shard.needs(TOKENS)]) > 3)
    torch.cuda.synchronize()
    for is_dropped in (True, False, True):
        source.gather_ahead(shard, [1, 2])
        if is_dropped:
            source.drop_ahead()
        payloads = [np.zeros(shard.payload_bytes, np.uint8) for _ in range(2)]
        source.begin_gather(shard, [1, 2], payloads)()
        assert np.array_equal(payloads, [truth.payload(shard, chunk) for chunk in (1, 2)])
        assert len(source._copier._idle) == 1

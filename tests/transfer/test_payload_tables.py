"""The copy kernel's tables for a store's payloads, carried out tile by tile on the host: as the CPU copies them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import pytest

from kvweave.copying import BlockCopy, Bytes
from kvweave.errors import BadCopy
from kvweave.store import PagePayloads, Schema
from kvweave.transfer.payload_tables import PayloadTable, PooledFields
from tests.store.engines import LAYOUTS, SPEC, Engine, Truth


class TableCopier:
    """As the device does it: a table made of what pages look like, then a copy a tile, in words."""

    together_bytes = 1

    def __init__(self, pools: dict[str, Bytes]) -> None:
        addresses = {name: pool.ctypes.data for name, pool in pools.items()}
        self._pooled = PooledFields(addresses, {name: pool.nbytes for name, pool in pools.items()})

    def after_caller(self) -> TableCopier:
        return self

    def gather(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        self._carry_out(copies, payload, gather=True)

    def scatter(self, copies: Iterable[BlockCopy], payload: Bytes) -> None:
        self._carry_out(copies, payload, gather=False)

    def _carry_out(self, copies: Iterable[BlockCopy], payload: Bytes, *, gather: bool) -> None:
        table = PayloadTable(copies, self._pooled, payload.nbytes)
        at = 0
        for batch in table.batches:
            count = batch.num_pages
            pages, places = table.address_table[at : at + 2 * count].reshape(2, count)
            at += 2 * count
            tiles = batch.tiling.tiles
            here, there = (numbers[:, None] + tiles[:, side] for side, numbers in enumerate((pages, places)))
            for number in (here, there, tiles[:, 2]):
                assert not (number % table.vector_bytes).any()
            for one, other, size in zip(here.flat, there.flat, np.tile(tiles[:, 2], count), strict=True):
                ends = (payload.ctypes.data + int(other), int(one))
                ctypes.memmove(*(ends if gather else ends[::-1]), int(size))
        assert at == len(table.address_table)


@pytest.mark.parametrize(
    ("layout", "block", "tp"), [*zip(LAYOUTS, (32, 48, 16, 160, 64), (1, 2, 1, 4, 2), strict=True)]
)
def test_what_the_kernel_is_told_is_what_the_cpu_does(layout: str, block: int, tp: int) -> None:
    schema = Schema.of(SPEC, chunk_tokens=64, parts=2, tails=True)
    truth = Truth(192, 64)
    for rank in range(tp):
        engine = Engine(schema, layout, block, 192, tp, rank)
        engine.compute(truth, states=range(3))
        computed = engine.snapshot()
        pages = PagePayloads(schema, engine.memory, TableCopier(dict(engine.memory.pools)))
        source, sink = pages.source(engine.tables), pages.sink(engine.tables)
        for number in pages.writes if tp < 4 else ():
            assert np.array_equal(source(schema.shards[number], 1), truth.payload(schema.shards[number], 1))
        engine.poison()
        for number in pages.reads:
            for chunk in range(3):
                sink(schema.shards[number], chunk, truth.payload(schema.shards[number], chunk))
        assert engine.snapshot() == computed


def test_what_does_not_lie_in_the_pool_is_refused_before_any_address_is_made_of_it() -> None:
    schema = Schema.of(SPEC, chunk_tokens=64, parts=1)
    engine = Engine(schema, LAYOUTS[0], 32, 192)
    short = {name: pool[:-1] for name, pool in engine.memory.pools.items()}
    pages = PagePayloads(schema, engine.memory, TableCopier(short))
    engine.tables["tokens"][:] = 6  # the last page
    with pytest.raises(BadCopy, match="is a page number wrong"):
        pages.source(engine.tables)(schema.shards[0], 0)

"""Payloads of the store, straight out of the arena's pages and back: by C on the host, by the copy kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvweave.cache import Cache, Sequence
from kvweave.copying import PayloadCopier
from kvweave.plan import View
from kvweave.pool import NULL, Ids
from kvweave.store import EngineMemory, PagePayloads, Schema, Sink
from kvweave.store.page_payloads import Gather
from kvweave.tensor import Arena


class ArenaPayloads:
    """The pages of sequences as payloads of a schema, whose chunks are whole blocks of every group."""

    def __init__(self, core: Cache, arena: Arena, schema: Schema) -> None:
        self._core, self._groups = core, [group for group in arena.plan.groups if group.layers]
        pools = {pool.name: arena.pool(pool.name) for pool in arena.plan.pools}
        copier: PayloadCopier | None = None
        if arena.memory.device.type == "cuda":
            from kvweave.transfer.payload_copier import CUDAPayloadCopier  # noqa: PLC0415 - needs Triton

            copier = CUDAPayloadCopier(pools)
        held = pools if copier else {name: pool.numpy() for name, pool in pools.items()}
        memory = _stored(EngineMemory.of_plan(arena.plan, held), schema)
        self._pages = PagePayloads(schema, memory, copier)

    def source(self, sequence: Sequence) -> Gather:
        """The payloads of a sequence, as its pages are when they are asked for; states as they are at its length."""
        return self._pages.source(self._tables(sequence))

    def sink(self, sequence: Sequence) -> Sink:
        """Fills a sequence's pages, but for those that were found in memory, which others share."""
        tables = self._tables(sequence)
        for group in self._groups:
            if group.cache.reach.per_token:
                tables[group.tag][: -(-sequence.num_cached // group.block_tokens)] = NULL
        return self._pages.sink(tables)

    def _tables(self, sequence: Sequence) -> dict[str, Ids]:
        return {group.tag: self._table(sequence, group.tag) for group in self._groups}

    def _table(self, sequence: Sequence, tag: str) -> Ids:
        """The pages of a sequence's blocks; for a state its one page, at the end of whichever block is asked for."""
        group, row = self._core.plan.group(tag), self._core.table(tag)[sequence.row]
        count = -(-sequence.length // group.block_tokens)
        return row[:count].copy() if group.cache.reach.per_token else np.repeat(row[:1], count)


def _stored(memory: EngineMemory, schema: Schema) -> EngineMemory:
    """The same, without the columns of convolutions that a store does not keep (`stored_spec`)."""
    columns = {
        (layer, shard.tag, role.name): role.shape[-1]
        for shard in schema.shards
        if not shard.reach.per_token
        for layer, role, _ in shard.fields()
    }

    def last_columns(view: View) -> View:
        count = columns.get((view.layer, view.tag, view.role), view.shape[-1])
        offset = view.offset + (view.shape[-1] - count) * view.strides[-1]
        return replace(view, offset=offset, shape=(*view.shape[:-1], count))

    return replace(memory, views=tuple(map(last_columns, memory.views)))

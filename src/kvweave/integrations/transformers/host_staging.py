"""Host staging: one chunk's pages of every group in host memory, between the arena (on any device) and payloads of the
store.

arena  --hold-->  host   --payload-->  store      pages have the layout of the arena,
arena  <--give--  host   <---take----  store      payloads that of the schema
"""

from __future__ import annotations

import numpy as np
import torch

from kvweave.plan import Place
from kvweave.pool import NULL, Ids
from kvweave.store import EngineMemory, PagePayloads, Schema, Shard
from kvweave.store.keys import Bytes
from kvweave.tensor import Arena, HostMirror


class HostStaging:
    """Holds the pages of one chunk of each group; new pages replace the ones before."""

    def __init__(self, arena: Arena, schema: Schema) -> None:
        plan, chunk = arena.plan, schema.chunk_tokens
        groups = [group for group in plan.groups if group.layers]
        counts = {g.tag: chunk // g.block_tokens if g.cache.reach.per_token else 1 for g in groups}
        place = Place.PINNED if arena.memory.device.type == "cuda" else Place.HOST
        self._mirror = HostMirror(arena, counts, place=place)
        self._host = self._mirror.arena
        self._ids = {tag: np.arange(1, count + 1, dtype=np.int32) for tag, count in counts.items()}
        pools = {pool.name: self._host.pool(pool.name).numpy() for pool in self._host.plan.pools}
        pages = PagePayloads(schema, EngineMemory.of_plan(self._host.plan, pools))
        # for states, all blocks of a chunk share the page at its end
        first = {g.tag: np.resize(self._ids[g.tag], chunk // g.block_tokens) for g in groups}
        self._source, self._sink = pages.source(first), pages.sink(first)

    # ---- pages

    def hold(self, tag: str, pages: Ids) -> None:
        """Copy these pages of the arena to the host: those of a chunk, in order, or a state's."""
        self._mirror.store(tag, pages, self._ids[tag])

    def give(self, tag: str, pages: Ids) -> None:
        """Copy to these pages of the arena; pages that are NULL are skipped."""
        wanted = np.flatnonzero(pages != NULL)
        self._mirror.load(tag, self._ids[tag][wanted], pages[wanted])

    def copy(self, tag: str) -> torch.Tensor:
        """A copy of what is held, for `put`."""
        return self._host.pages(tag)[1:].clone()

    def put(self, tag: str, copied: torch.Tensor) -> None:
        self._host.pages(tag)[1:].copy_(copied)

    # ---- payloads

    def payload(self, shard: Shard) -> Bytes:
        """The payload of a shard, from what is held."""
        return self._source(shard, 0)

    def take(self, shard: Shard, payload: Bytes) -> None:
        """Write a shard's payload; the other shards of the group stay as they are."""
        self._sink(shard, 0, payload)

    def close(self) -> None:
        self._mirror.close()

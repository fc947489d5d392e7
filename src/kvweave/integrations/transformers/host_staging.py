"""A stage: one chunk's pages of every group on the host, between the arena (on any device) and the store's payloads.

arena  --hold-->  stage  --payload-->  store      pages look here as they do in the arena,
arena  <--give--  stage  <---take----  store      payloads as the schema has them
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
    """Holds the pages of one chunk of each group at a time: what is put there takes the place of what was."""

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
        first = {g.tag: np.resize(self._ids[g.tag], chunk // g.block_tokens) for g in groups}  # a state is at the end
        self._source, self._sink = pages.source(first), pages.sink(first)

    # ---- pages

    def hold(self, tag: str, pages: Ids) -> None:
        """Take these pages of the arena, in order: those of a chunk, or a state's."""
        self._mirror.store(tag, pages, self._ids[tag])

    def give(self, tag: str, pages: Ids) -> None:
        """Fill these pages of the arena; where one is NULL, what is held for its place stays here."""
        wanted = np.flatnonzero(pages != NULL)
        self._mirror.load(tag, self._ids[tag][wanted], pages[wanted])

    def copy(self, tag: str) -> torch.Tensor:
        """What is held, to be put back later."""
        return self._host.pages(tag)[1:].clone()

    def put(self, tag: str, copied: torch.Tensor) -> None:
        self._host.pages(tag)[1:].copy_(copied)

    # ---- payloads

    def payload(self, shard: Shard) -> Bytes:
        """A row of what is held, as the store keeps it."""
        return self._source(shard, 0)

    def take(self, shard: Shard, payload: Bytes) -> None:
        """Write a row; the group's other rows stay."""
        self._sink(shard, 0, payload)

    def close(self) -> None:
        self._mirror.close()

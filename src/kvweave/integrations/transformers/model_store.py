"""The store of a model: opened, or checked if it is open already, before pages are planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvweave.errors import StoreError
from kvweave.integrations.open_store import open_store
from kvweave.integrations.transformers.identity import Identity
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.store_sync import StoreSync
from kvweave.integrations.transformers.support import Served
from kvweave.plan import Plan
from kvweave.spec import LayerCache, ModelSpec, Window
from kvweave.store import BaseStore, Schema

CHUNK_TOKENS = 256
"""Tokens of a chunk, where blocks divide it."""


@dataclass(frozen=True, slots=True)
class ModelStore:
    """An open store; `is_ours`: it was opened here, and must be closed here. `served` has the spec for planning
    pages."""

    store: BaseStore[Any]
    is_ours: bool
    served: Served

    def store_sync(self, model: Any, memory: PagedMemory, weights: str | None, wait_s: float) -> StoreSync:
        identity = Identity(model, self.served.stored, memory.model_changes, weights)
        return StoreSync(self.store, memory.core, memory.arena, identity, wait_s=wait_s, close=self.close)

    def close(self) -> None:
        if self.is_ours:
            self.store.close()


def open_model_store(store: str | Path | BaseStore[Any], served: Served, plan: Plan, model: str) -> ModelStore:
    """Open the store at a location for this model; or use an open one, checked to fit model and plan."""
    grid = math.lcm(*(group.block_tokens for group in plan.groups))
    is_ours = not isinstance(store, BaseStore)
    if isinstance(store, BaseStore):
        _check(store.schema, served.stored, grid)
    else:
        chunk = math.lcm(CHUNK_TOKENS, grid)
        store = open_store(store, Schema.of(served.stored, chunk_tokens=chunk, parts=1), model=model)
    planned = replace(served, spec=in_chunks(served.spec, store.schema.chunk_tokens))
    return ModelStore(store, is_ours, planned)


def _check(given: Schema, spec: ModelSpec, grid: int) -> None:
    if given.chunk_tokens % grid:
        raise StoreError(
            f"the store has chunks of {given.chunk_tokens} tokens, which blocks of {grid} do not divide; open it for"
            f" chunks of {math.lcm(CHUNK_TOKENS, grid)}"
        )
    own = Schema.of(spec, chunk_tokens=given.chunk_tokens, parts=given.parts)
    if own != given:
        here, there = (", ".join(dict.fromkeys(shard.tag for shard in schema.shards)) for schema in (own, given))
        raise StoreError(
            f"the store is open for another model, or other dtypes: groups {there} there, {here} here; open it with"
            " Schema.of(examine(model).stored), or let KVWeave open it"
        )


def in_chunks(spec: ModelSpec, chunk_tokens: int) -> ModelSpec:
    """The same model with windows extended so that, seen from the end of a chunk, they begin at a chunk.

    A chunk is stored completely or not at all: an incomplete one would be taken for complete by a prompt that ends
    earlier.
    """

    def longer(cache: LayerCache) -> LayerCache:
        if not isinstance(cache.reach, Window):
            return cache
        return replace(cache, reach=Window(-(-(cache.reach.tokens - 1) // chunk_tokens) * chunk_tokens + 1))

    layers = tuple(replace(layer, caches=tuple(map(longer, layer.caches))) for layer in spec.layers)
    return replace(spec, layers=layers)

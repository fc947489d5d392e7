"""Binds vLLM's tensors to what the model's own config says its layers keep.

    config.json -> spec: layer 3 keeps keys and values of 8 heads, as a window
    vLLM        -> layer 3: a tensor, a kernel, a group with a block table          } a spec to store by, and views

Keys of a store come from that spec: engines that group, block or lay out a model differently share what they store.
A layer that the spec or the table of layouts does not know is stored as opaque pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from kvweave.errors import CannotServe
from kvweave.integrations.vllm.engine_groups import EngineGroup, EngineLayer
from kvweave.integrations.vllm.layouts import Views, attention_views, state_views
from kvweave.plan import Parallel
from kvweave.spec import DType, Layer, LayerCache, ModelSpec, Role, Segment
from kvweave.store import EngineMemory, TableUse

Tensors = dict[tuple[int, str, str], Any]


@dataclass(frozen=True)
class Bound:
    """One worker's memory, and the spec by which it is stored."""

    spec: ModelSpec
    """Of this worker's layers, until those of other pipeline stages are joined to them (`join_stages`)."""
    memory: EngineMemory
    opaque: tuple[EngineLayer, ...]
    """Layers that are stored as opaque pages."""

    @property
    def unit_tokens(self) -> int:
        """Tokens that a chunk must not split: of opaque pages, a page."""
        return math.lcm(*(role.tokens_per_row for _, cache in self.spec.caches() for role in cache.roles))

    @property
    def tags(self) -> frozenset[tuple[str, str]]:
        """The engine's tables that lead to layers of this worker, with the tags of what they keep there."""
        return frozenset((use.name, tag) for (_, tag), use in self.memory.tables.items())


@dataclass(frozen=True, slots=True)
class Binder:
    """What holds for all layers of a worker."""

    spec: ModelSpec | None
    """What the model's config says; None: it could not be read."""
    parallel: Parallel
    version: str
    """Of vLLM: part of what opaque pages are tied to."""
    channels_first: bool
    chunk_tokens: int

    def bind(self, groups: Sequence[EngineGroup], layers: Sequence[EngineLayer]) -> Bound:
        by_name = {layer.name: layer for layer in layers}
        caches: dict[int, list[LayerCache]] = {}
        tensors: Tensors = {}
        tables: dict[tuple[int, str], TableUse] = {}
        opaque: list[EngineLayer] = []
        for group in groups:
            for layer in (by_name[name] for name in group.layers):
                bound = self._known(group, layer)
                if bound is None:
                    opaque.append(layer)
                    bound = self._opaque(group, layer)
                cache, views = bound
                caches.setdefault(layer.index, []).append(cache)
                tensors |= {(layer.index, cache.tag, role): view for role, view in views.items()}
                block_tokens = self.chunk_tokens if group.is_state else group.block_tokens
                tables[layer.index, cache.tag] = TableUse(group.table, block_tokens)
        model_type = self.spec.model_type if self.spec else "opaque"
        kept = tuple(Layer(tuple(caches.get(index, ()))) for index in range(max(caches, default=0) + 1))
        memory = EngineMemory.of_tensors(tensors, tables, parallel=self.parallel)
        return Bound(ModelSpec(model_type, kept), memory, tuple(opaque))

    # ---- layers of a known kind

    def _known(self, group: EngineGroup, layer: EngineLayer) -> tuple[LayerCache, Views] | None:
        cache = self._declared(group, layer)
        views = self._views(group, layer, cache) if cache else None
        if cache is None or views is None or views.keys() != {role.name for role in cache.roles}:
            return None
        roles = []
        for role in cache.roles:
            mine = role.shard(self.parallel.tp).shape
            if tuple(views[role.name].shape[1 if group.is_state else 2 :]) != mine:
                return None
            roles.append(replace(role, dtype=DType.parse(views[role.name].dtype)))
        # The engine may keep more than the layer needs (windows without its hybrid manager): then it must be whole.
        tag = cache.tag if cache.reach == group.reach else f"{cache.tag}.{group.reach.kind}"
        return replace(cache, tag=tag, reach=group.reach, roles=tuple(roles)), views

    def _declared(self, group: EngineGroup, layer: EngineLayer) -> LayerCache | None:
        """The one cache of this kind that the config declares for a layer."""
        if self.spec is None or layer.index >= len(self.spec.layers):
            return None
        own = [
            cache for cache in self.spec.layers[layer.index].caches if cache.reach.per_token is group.reach.per_token
        ]
        return own[0] if len(own) == 1 else None

    def _views(self, group: EngineGroup, layer: EngineLayer, cache: LayerCache) -> Views | None:
        if group.is_state:
            return state_views(layer.kind, layer.tensors, channels_first=self.channels_first)
        return attention_views(layer.kind, layer.tensors[0], cache.roles[0].shape[-1])

    # ---- others

    def _opaque(self, group: EngineGroup, layer: EngineLayer) -> tuple[LayerCache, Views]:
        """A kernel's block as bytes, tied to everything that its bytes may depend on."""
        blocks = _block_bytes(layer)
        size, tp, version = blocks.shape[1], self.parallel.tp, self.version.replace(".", "-")
        name = f"{layer.kind} {version} block {group.block_tokens} tp {tp} {size}"
        num_tokens = 1 if group.is_state else group.block_tokens // layer.blocks_per_page
        role = Role(name, (tp * size,), DType.UINT8, tokens_per_row=num_tokens, split=(Segment(tp, size),))
        views = {name: blocks if group.is_state else blocks.unsqueeze(1)}
        return LayerCache(f"opaque.{group.reach.kind}.{size}", group.reach, (role,)), views


def join_stages(specs: Sequence[ModelSpec]) -> ModelSpec:
    """The whole model, of what each pipeline stage has bound: every layer is in one of them."""
    layers = zip_longest(*(spec.layers for spec in specs), fillvalue=Layer())
    joined = tuple(Layer(tuple(cache for layer in same for cache in layer.caches)) for same in layers)
    return ModelSpec(specs[0].model_type, joined)


def _block_bytes(layer: EngineLayer) -> Any:
    """`[blocks, bytes]`, in the order of memory, whatever the order of axes."""
    import torch  # noqa: PLC0415 - the engine's

    raw = layer.raw
    sizes, strides = raw.shape[1:], raw.stride()[1:]
    if sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1 != math.prod(sizes):
        raise CannotServe(f"{layer.name} ({layer.kind})", f"a block of {tuple(sizes)} has gaps: strides {strides}")
    flat = raw.as_strided((raw.shape[0], math.prod(sizes)), (raw.stride()[0], 1))
    return flat.view(torch.uint8)

"""What a store keeps of a model's caches: what the next token cannot do without, as serving engines keep it.

    a convolution over K inputs    x[p-K]  x[p-K+1] ... x[p-1]     transformers' state at p: K columns
                                           x[p-K+1] ... x[p-1]     what is stored: the next output begins here

transformers shifts its first column out before it computes, and so never reads it. Without it, stored states are those
of vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvweave.errors import ConfigError
from kvweave.spec import LayerCache, ModelSpec, Role
from kvweave.spec.hf import from_config


def stored_spec(spec: ModelSpec, config: Any) -> ModelSpec:
    """The spec of transformers' caches without the columns that engines do not keep."""
    try:
        engines = from_config(config, dtype="auto")
    except ConfigError:  # of a decoder alone, which no engine serves
        return spec
    if len(engines.layers) != len(spec.layers):
        return spec
    columns = {
        (number, cache.tag, role.name): role.shape
        for number, cache in engines.caches()
        if not cache.reach.per_token
        for role in cache.roles
    }

    def stored(number: int, cache: LayerCache, role: Role) -> Role:
        shape = columns.get((number, cache.tag, role.name), role.shape)
        return replace(role, shape=shape) if shape == (*role.shape[:-1], role.shape[-1] - 1) else role

    layers = (
        replace(
            layer,
            caches=tuple(
                replace(cache, roles=tuple(stored(number, cache, role) for role in cache.roles))
                for cache in layer.caches
            ),
        )
        for number, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))

"""Small plans for the core's tests."""

from __future__ import annotations

from collections.abc import Mapping

from kvweave.plan import Plan, PoolRequest, make_plan
from kvweave.spec import Full, Layer, LayerCache, ModelSpec, Reach, Role


def group(tag: str, reach: Reach, width: int = 4, *, context_split: bool = False) -> LayerCache:
    return LayerCache(tag, reach, (Role("key", (width,), "float32"),), context_split=context_split)  # type: ignore[arg-type]


def plan_of(
    *caches: LayerCache,
    pages: int = 64,
    blocks: int | Mapping[str, int] = 4,
    pools: str = "independent",
    own_pools: Mapping[str, PoolRequest] | None = None,
    **more: object,
) -> Plan:
    """A plan for one layer a cache, with `pages` pages (NULL included) a group when pools are independent."""
    spec = ModelSpec("test", tuple(Layer((cache,)) for cache in caches))
    requests = {cache.tag: PoolRequest(pages=pages - 1) for cache in caches} if pools == "independent" else {}
    return make_plan(spec, 10**9, block_tokens=blocks, pools=pools, own_pools={**requests, **(own_pools or {})}, **more)  # type: ignore[arg-type]


def full_plan(pages: int = 64, blocks: int = 4) -> Plan:
    return plan_of(group("full", Full()), pages=pages, blocks=blocks)

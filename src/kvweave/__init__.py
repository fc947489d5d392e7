"""kvweave: a KV-cache engine for LLMs whose layers differ."""

from kvweave.cache import Batch, Cache, Copy, Sequence
from kvweave.errors import KVWeaveError
from kvweave.plan import Parallel, Plan, PoolRequest, explain, merge_draft, plan
from kvweave.spec import Layer, LayerCache, ModelSpec, Role
from kvweave.spec.hf import from_config

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "Cache",
    "Copy",
    "KVWeaveError",
    "Layer",
    "LayerCache",
    "ModelSpec",
    "Parallel",
    "Plan",
    "PoolRequest",
    "Role",
    "Sequence",
    "explain",
    "from_config",
    "merge_draft",
    "plan",
]

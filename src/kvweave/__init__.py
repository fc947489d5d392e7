"""kvweave: a KV-cache engine for LLMs whose layers differ."""

from kvweave.cache import Batch, Cache, Copies, Copy, Sequence
from kvweave.errors import CacheError, KVWeaveError, NeverFits, OutOfPages
from kvweave.plan import Parallel, Plan, PoolRequest, explain, make_plan, merge_draft
from kvweave.policy import EvictionCandidate
from kvweave.prefix import Retention, Span
from kvweave.spec import Chunk, Full, Layer, LayerCache, ModelSpec, Role, SinkWindow, State, Window
from kvweave.spec.hf import from_config

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "Cache",
    "CacheError",
    "Chunk",
    "Copies",
    "Copy",
    "EvictionCandidate",
    "Full",
    "KVWeaveError",
    "Layer",
    "LayerCache",
    "ModelSpec",
    "NeverFits",
    "OutOfPages",
    "Parallel",
    "Plan",
    "PoolRequest",
    "Retention",
    "Role",
    "Sequence",
    "SinkWindow",
    "Span",
    "State",
    "Window",
    "explain",
    "from_config",
    "make_plan",
    "merge_draft",
]

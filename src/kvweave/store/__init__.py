"""KEEPING pages: content keys, self-describing blobs, tiers, and the stack that combines them."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.store", "store"):
    from kvweave.store.base_store import BaseStore
    from kvweave.store.catalog import Quota
    from kvweave.store.disk_tier import DiskTier
    from kvweave.store.engine_memory import EngineMemory, TableUse, region_view
    from kvweave.store.keys import HashedPrompt, Namespace
    from kvweave.store.layout_proof import prove_layout
    from kvweave.store.memory_tier import MemoryTier
    from kvweave.store.operations import Operation
    from kvweave.store.page_payloads import PagePayloads, Sink, Source
    from kvweave.store.results import BaseHit, GatheredSave, Saved, StoreStats
    from kvweave.store.shards import Schema, Shard, model_digest
    from kvweave.store.store import Hit, Store
    from kvweave.store.tier import DictTier, Tier, TierStats
    from kvweave.store.tier_executor import TierExecutorStats, TierPolicy
    from kvweave.store.tier_stack import TierStack
    from kvweave.store.weights import weights_digest

__all__ = [
    "BaseHit",
    "BaseStore",
    "DictTier",
    "DiskTier",
    "EngineMemory",
    "GatheredSave",
    "HashedPrompt",
    "Hit",
    "MemoryTier",
    "Namespace",
    "Operation",
    "PagePayloads",
    "Quota",
    "Saved",
    "Schema",
    "Shard",
    "Sink",
    "Source",
    "Store",
    "StoreStats",
    "TableUse",
    "Tier",
    "TierExecutorStats",
    "TierPolicy",
    "TierStack",
    "TierStats",
    "model_digest",
    "prove_layout",
    "region_view",
    "weights_digest",
]

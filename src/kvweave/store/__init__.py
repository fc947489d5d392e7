"""KEEPING pages: content keys, self-describing blobs, tiers, and the cascade that joins them."""

from kvweave.store.base import AnyStore
from kvweave.store.catalog import Quota
from kvweave.store.disk_tier import DiskTier
from kvweave.store.keys import HashedPrompt, Namespace
from kvweave.store.memory_tier import MemoryTier
from kvweave.store.operations import Operation
from kvweave.store.page_payloads import PagePayloads, Sink, Source
from kvweave.store.results import AnyHit, GatheredSave, Saved, StoreStats
from kvweave.store.shards import Schema, Shard, model_digest
from kvweave.store.store import Hit, Store
from kvweave.store.tier import DictTier, Tier, TierStats
from kvweave.store.tier_executor import TierExecutorStats, TierPolicy
from kvweave.store.tier_stack import TierStack
from kvweave.store.weights import weights_digest

__all__ = [
    "AnyHit",
    "AnyStore",
    "DictTier",
    "DiskTier",
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
    "Tier",
    "TierExecutorStats",
    "TierPolicy",
    "TierStack",
    "TierStats",
    "model_digest",
    "weights_digest",
]

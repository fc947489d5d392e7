"""KEEPING pages: content keys, self-describing blobs, tiers, and the cascade that joins them."""

from kvweave.store.base import AnyHit, AnyStore, Saved, StoreStats
from kvweave.store.cascade import Cascade
from kvweave.store.catalog import Quota
from kvweave.store.disk import DiskTier
from kvweave.store.keys import Namespace, Prompt
from kvweave.store.lane import LanePolicy, LaneStats
from kvweave.store.memory import MemoryTier
from kvweave.store.pages import Pages, Sink, Source
from kvweave.store.rows import Row, Schema, model_digest
from kvweave.store.store import Hit, Store
from kvweave.store.tier import DictTier, Tier, TierStats

__all__ = [
    "AnyHit",
    "AnyStore",
    "Cascade",
    "DictTier",
    "DiskTier",
    "Hit",
    "LanePolicy",
    "LaneStats",
    "MemoryTier",
    "Namespace",
    "Pages",
    "Prompt",
    "Quota",
    "Row",
    "Saved",
    "Schema",
    "Sink",
    "Source",
    "Store",
    "StoreStats",
    "Tier",
    "TierStats",
    "model_digest",
]

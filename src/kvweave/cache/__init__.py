"""The core's face: a cache of sequences over a plan."""

from kvweave.cache.cache import Cache
from kvweave.cache.sequence import Batch, Copy, Sequence
from kvweave.cache.stats import GroupStats, PoolStats, Stats

__all__ = ["Batch", "Cache", "Copy", "GroupStats", "PoolStats", "Sequence", "Stats"]

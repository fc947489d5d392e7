"""The core's face: a cache of sequences over a plan."""

from kvweave.cache.cache import Cache
from kvweave.cache.sequence import Batch, Checkpoint, Copy, Pin, Sequence
from kvweave.cache.stats import GroupStats, PoolStats, Stats

__all__ = ["Batch", "Cache", "Checkpoint", "Copy", "GroupStats", "Pin", "PoolStats", "Sequence", "Stats"]

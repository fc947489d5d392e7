"""The core's interface: open, extend, commit, accept, fork, truncate, close; stats, snapshots, events."""

from kvweave.cache.cache import Cache
from kvweave.cache.copies import Copies, Copy
from kvweave.cache.sequence import Batch, Checkpoint, Pin, Sequence

__all__ = ["Batch", "Cache", "Checkpoint", "Copies", "Copy", "Pin", "Sequence"]

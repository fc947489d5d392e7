"""kvweave under transformers: any model generates on pages, and never computes a prefix twice."""

from kvweave.integrations.transformers.attach import attach, detach
from kvweave.integrations.transformers.past import Past
from kvweave.integrations.transformers.record import Record, StoreUse, WeaveStats
from kvweave.integrations.transformers.session import Session
from kvweave.integrations.transformers.weave import KVWeave

__all__ = ["KVWeave", "Past", "Record", "Session", "StoreUse", "WeaveStats", "attach", "detach"]

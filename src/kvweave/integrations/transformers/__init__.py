"""kvweave under transformers: any model generates on pages, and never computes a prefix twice."""

from kvweave.integrations.transformers.attach import attach, detach
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.request_record import RequestRecord, StoreUsage, WeaveStats
from kvweave.integrations.transformers.session import Session
from kvweave.integrations.transformers.weave import KVWeave

__all__ = ["KVWeave", "PagedCache", "RequestRecord", "Session", "StoreUsage", "WeaveStats", "attach", "detach"]

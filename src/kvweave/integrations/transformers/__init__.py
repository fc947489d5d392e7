"""kvweave under transformers: models generate on pages, and reuse every prefix that was computed before."""

from kvweave.errors import MissingExtra

with MissingExtra.on_import("kvweave.integrations.transformers", "transformers"):
    from kvweave.integrations.transformers.attach import attach, detach
    from kvweave.integrations.transformers.paged_cache import PagedCache
    from kvweave.integrations.transformers.request_record import RequestRecord, StoreUsage, WeaveStats
    from kvweave.integrations.transformers.session import Session
    from kvweave.integrations.transformers.weave import KVWeave

__all__ = ["KVWeave", "PagedCache", "RequestRecord", "Session", "StoreUsage", "WeaveStats", "attach", "detach"]

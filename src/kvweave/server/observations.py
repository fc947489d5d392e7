"""How long requests take, which were the slowest, and what each tenant finds: what an operator asks first.

Lookups are timed by the daemon; loads and saves by the clients, who copy, and report the time with a later request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from kvweave.server.report import SlowRequest, TenantReport
from kvweave.store import Quota
from kvweave.store.blocking_store import LATENCIES
from kvweave.store.histogram import Histogram, HistogramStats
from kvweave.store.keys import tenant_id

SLOWEST, SLOW_S = 20, 600.0
"""Requests that are listed, and how long they are kept."""
TENANTS = 64
"""Tenants that are counted apart, as those with a quota always are; the others are counted together, since every one is
a line for Prometheus."""
OTHERS = "others"


class Observations:
    """Not thread-safe: for the thread of the event loop."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._latency = {kind: Histogram() for kind in LATENCIES}
        self._slowest: list[SlowRequest] = []
        """The slowest first; until the report is made, `age_s` is the time at which they were reported."""
        self._names = {tenant_id(name): name for name in quotas}
        self._tenants: dict[str, Counter[str]] = {}

    def took(self, kind: str, seconds: float, client: str, num_tokens: int) -> None:
        """A request, with the tokens of its prompt."""
        self._latency[kind].observe(seconds)
        self._forget_old()
        if len(self._slowest) < SLOWEST or seconds > self._slowest[-1].seconds:
            request = SlowRequest(kind, client, num_tokens, seconds, time.monotonic())
            self._slowest = sorted([*self._slowest, request], key=lambda each: -each.seconds)[:SLOWEST]

    def _forget_old(self) -> None:
        least = time.monotonic() - SLOW_S
        self._slowest = [each for each in self._slowest if each.age_s > least]

    def asked(self, tenant: bytes, numbers: Mapping[str, int]) -> None:
        """A tenant's lookup: tokens that it asked for, and found."""
        name = self._names.get(tenant, tenant.hex())
        if name not in self._tenants and tenant not in self._names and len(self._tenants) >= TENANTS:
            name = OTHERS
        self._tenants.setdefault(name, Counter()).update(numbers)

    # ---- telling

    def latency(self) -> dict[str, HistogramStats]:
        return {kind: histogram.stats() for kind, histogram in self._latency.items()}

    def slowest(self) -> tuple[SlowRequest, ...]:
        self._forget_old()
        return tuple(replace(each, age_s=time.monotonic() - each.age_s) for each in self._slowest)

    def tenants(self) -> tuple[TenantReport, ...]:
        return tuple(
            TenantReport(name, counts["lookups"], counts["tokens_asked"], counts["tokens_found"])
            for name, counts in self._tenants.items()
        )

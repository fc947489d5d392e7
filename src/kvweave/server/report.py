"""The report of a daemon: frozen records of its counters, which `inspect`, metrics and tests read."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.store import TierExecutorStats
from kvweave.store.histogram import HistogramStats


def printable(text: str) -> str:
    """A client's name without control characters, which a terminal or log could interpret."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A registered model by the digest of its schema, with counts of its lookups."""

    model: str
    schema: str
    lookups: int
    tokens_asked: int
    tokens_found: int


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """A prefix that was found, by the digest of its tokens."""

    digest: str
    model: str
    tokens: int
    uses: int


@dataclass(frozen=True, slots=True)
class ClientReport:
    """A connection, and what it holds."""

    name: str
    pid: int
    uid: int
    connected_s: float
    requests: int
    sequences: int
    leases: int
    leased_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a tenant asked for. Its name where it has a quota, else its digest; many tenants' as one beyond a bound."""

    tenant: str
    lookups: int
    tokens_asked: int
    tokens_found: int


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A lookup as the daemon saw it, a load or save as its client did: how long it took, and how long ago."""

    kind: str
    client: str
    num_tokens: int
    seconds: float
    age_s: float


@dataclass(frozen=True, slots=True)
class TierCleared:
    """The result of clearing a tier: the number of deleted entries, and why others may remain, if so."""

    name: str
    entries: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report."""

    version: str
    pid: int
    boot: str
    uptime_s: float
    stopping: bool
    tiers: tuple[TierExecutorStats, ...]
    lookups: int
    tokens_asked: int
    tokens_found: int
    unanswered: int
    """Lookups that some tier did not answer in time: blobs that were not found may still be stored."""
    requests: int
    failures: int
    expired: int
    """Leases and reservations that expired."""
    returned: int
    """Leases and reservations that were released because their connection ended."""
    models: tuple[ModelReport, ...]
    prefixes: tuple[PrefixReport, ...]
    clients: tuple[ClientReport, ...]
    tenants: tuple[TenantReport, ...]
    latency: dict[str, HistogramStats]
    """Of lookups, loads and saves."""
    slowest: tuple[SlowRequest, ...]
    """Of the last minutes, the slowest first."""
    waiting: dict[str, int]
    """Requests that wait for a thread of the daemon's: those that read from tiers, that write, that flush."""

    @property
    def hit_rate(self) -> float:
        return self.tokens_found / self.tokens_asked if self.tokens_asked else 0.0

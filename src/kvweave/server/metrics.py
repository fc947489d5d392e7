"""A report in the text format of Prometheus (0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.server.report import Report
from kvweave.store import TierExecutorStats

Sample = tuple[dict[str, str], float]


def metrics(report: Report) -> str:
    return "".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    for name, kind, words, samples in _families(report):
        yield f"# HELP kvweave_{name} {words}\n# TYPE kvweave_{name} {kind}\n"
        for labels, value in samples:
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            yield f"kvweave_{name}{{{pairs}}} {value:.17g}\n" if pairs else f"kvweave_{name} {value:.17g}\n"


def _families(report: Report) -> Iterator[tuple[str, str, str, list[Sample]]]:
    yield "info", "gauge", "The daemon's version.", [({"version": report.version}, 1)]
    yield "uptime_seconds", "gauge", "Seconds since the start.", [({}, report.uptime_s)]
    yield "stopping", "gauge", "1 while the daemon drains.", [({}, report.stopping)]
    yield "requests_total", "counter", "Messages that were answered.", [({}, report.requests)]
    yield "failures_total", "counter", "... with an error.", [({}, report.failures)]
    yield (
        "lookups_unanswered_total",
        "counter",
        "Lookups to which some tier did not answer in time.",
        [({}, report.unanswered)],
    )
    yield "leases_expired_total", "counter", "Leases taken back because their time was over.", [({}, report.expired)]
    yield "leases_returned_total", "counter", "Leases taken back from connections that ended.", [({}, report.returned)]
    yield "connections", "gauge", "Open connections.", [({}, len(report.clients))]
    yield "leased_bytes", "gauge", "Bytes that are being read.", [({}, sum(c.leased_bytes for c in report.clients))]
    held = sum(client.reserved_bytes for client in report.clients)
    yield "reserved_bytes", "gauge", "Bytes that are being written.", [({}, held)]
    for name in ("lookups", "tokens_asked", "tokens_found"):
        samples: list[Sample] = [({"model": m.model, "schema": m.schema}, getattr(m, name)) for m in report.models]
        yield f"{name}_total", "counter", f"{name.replace('_', ' ').capitalize()}, by model.", samples
    yield from _tiers(report.tiers)


def _tiers(tiers: tuple[TierExecutorStats, ...]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    for name, kind, words in (
        ("entries", "gauge", "Blobs in a tier."),
        ("used_bytes", "gauge", "Bytes in use."),
        ("capacity_bytes", "gauge", "Bytes that may be used."),
        ("evicted", "counter", "Blobs that made room for others."),
        ("refused", "counter", "Blobs that found no room."),
    ):
        values = [(executor.tier.name, getattr(executor.tier, name)) for executor in tiers]
        samples: list[Sample] = [({"tier": tier}, value) for tier, value in values if value is not None]
        yield f"tier_{name}{'_total' if kind == 'counter' else ''}", kind, words, samples
    for name in ("hits", "misses", "stored", "dropped", "damaged", "late", "failed", "skipped", "retried"):
        counted: list[Sample] = [({"tier": executor.tier.name}, getattr(executor, name)) for executor in tiers]
        yield f"tier_{name}_total", "counter", f"Questions to a tier: {name}.", counted
    yield (
        "tier_open",
        "gauge",
        "1 while a tier is left alone.",
        [({"tier": executor.tier.name}, executor.open) for executor in tiers],
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

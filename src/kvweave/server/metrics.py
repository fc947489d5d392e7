"""A report in the text format of Prometheus (0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from kvweave.server.report import Report
from kvweave.store import TierExecutorStats
from kvweave.store.histogram import BUCKETS_S, HistogramStats
from kvweave.store.tier_executor import DROPS

Sample = tuple[dict[str, str], float]


class MetricFamily(NamedTuple):
    """A name, what kind of number it is, what it means, and its values by labels. Of a histogram only its name, and
    each value with the end of its own."""

    name: str
    kind: str
    words: str
    samples: list[Sample]
    ends: tuple[str, ...] = ()


def metrics(report: Report) -> str:
    return "".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    for name, kind, words, samples, ends in _families(report):
        yield f"# HELP kvweave_{name} {words}\n# TYPE kvweave_{name} {kind}\n"
        for (labels, value), end in zip(samples, ends or [""] * len(samples), strict=True):
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            yield f"kvweave_{name}{end}{{{pairs}}} {value:.17g}\n" if pairs else f"kvweave_{name}{end} {value:.17g}\n"


def _families(report: Report) -> Iterator[MetricFamily]:
    yield MetricFamily("info", "gauge", "The daemon's version.", [({"version": report.version}, 1)])
    for name, kind, words, value in (
        ("uptime_seconds", "gauge", "Seconds since the start.", report.uptime_s),
        ("stopping", "gauge", "1 while the daemon drains.", report.stopping),
        ("requests_total", "counter", "Messages that were answered.", report.requests),
        ("failures_total", "counter", "... with an error.", report.failures),
        ("lookups_unanswered_total", "counter", "Lookups that some tier did not answer in time.", report.unanswered),
        ("leases_expired_total", "counter", "Leases that ended because their time was over.", report.expired),
        ("leases_returned_total", "counter", "Leases taken back from connections that ended.", report.returned),
        ("connections", "gauge", "Open connections.", len(report.clients)),
        ("leases", "gauge", "Leases and reservations that are held.", sum(c.leases for c in report.clients)),
        ("leased_bytes", "gauge", "Bytes that are being read.", sum(c.leased_bytes for c in report.clients)),
        ("reserved_bytes", "gauge", "Bytes that are being written.", sum(c.reserved_bytes for c in report.clients)),
    ):
        yield MetricFamily(name, kind, words, [({}, value)])
    waiting: list[Sample] = [({"kind": kind}, number) for kind, number in report.waiting.items()]
    yield MetricFamily("waiting_requests", "gauge", "Requests that wait for a thread of the daemon's.", waiting)
    for kind, stats in report.latency.items():
        yield _histogram(f"{kind}_seconds", f"Seconds that a {kind} takes.", stats)
    yield from _asked(report)
    yield from _tiers(report.tiers)


def _histogram(name: str, words: str, stats: HistogramStats) -> MetricFamily:
    bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
    samples: list[Sample] = [({"le": le}, count) for le, count in zip(bounds, accumulate(stats.counts), strict=True)]
    samples += [({}, stats.seconds), ({}, stats.count)]
    return MetricFamily(name, "histogram", words, samples, ("_bucket",) * len(bounds) + ("_sum", "_count"))


def _asked(report: Report) -> Iterator[MetricFamily]:
    """What was asked for, and found: by model, and by tenant."""
    for name in ("lookups", "tokens_asked", "tokens_found"):
        words = name.replace("_", " ").capitalize()
        models: list[Sample] = [({"model": m.model, "schema": m.schema}, getattr(m, name)) for m in report.models]
        yield MetricFamily(f"{name}_total", "counter", f"{words}, by model.", models)
        tenants: list[Sample] = [({"tenant": each.tenant}, getattr(each, name)) for each in report.tenants]
        yield MetricFamily(f"tenant_{name}_total", "counter", f"{words}, by tenant.", tenants)


def _tiers(tiers: tuple[TierExecutorStats, ...]) -> Iterator[MetricFamily]:
    for name, kind, words in (
        ("entries", "gauge", "Blobs in a tier."),
        ("used_bytes", "gauge", "Bytes in use."),
        ("capacity_bytes", "gauge", "Bytes that may be used."),
        ("evicted", "counter", "Blobs that made room for others."),
    ):
        values = [(executor.tier.name, getattr(executor.tier, name)) for executor in tiers]
        samples: list[Sample] = [({"tier": tier}, value) for tier, value in values if value is not None]
        yield MetricFamily(f"tier_{name}{'_total' if kind == 'counter' else ''}", kind, words, samples)
    for name in ("hits", "misses", "stored", "damaged", "late", "failed", "skipped", "retried"):
        counted: list[Sample] = [({"tier": executor.tier.name}, getattr(executor, name)) for executor in tiers]
        yield MetricFamily(f"tier_{name}_total", "counter", f"Questions to a tier: {name}.", counted)
    drops: list[Sample] = [
        ({"tier": executor.tier.name, "reason": why}, executor.drops.get(why, 0)) for executor in tiers for why in DROPS
    ]
    yield MetricFamily("tier_dropped_total", "counter", "Blobs that were not stored, by reason.", drops)
    yield _both_ways(
        tiers, "tier_bytes_total", "counter", "Bytes that a tier gave and took.", "read_bytes", "written_bytes"
    )
    yield _both_ways(tiers, "tier_queued", "gauge", "What waits for a tier's threads.", "queued_reads", "queued_writes")
    left_alone: list[Sample] = [({"tier": executor.tier.name}, executor.open) for executor in tiers]
    yield MetricFamily("tier_open", "gauge", "1 while a tier is paused after failures.", left_alone)


def _both_ways(
    tiers: tuple[TierExecutorStats, ...], name: str, kind: str, words: str, read: str, written: str
) -> MetricFamily:
    samples: list[Sample] = [
        ({"tier": executor.tier.name, "direction": direction}, getattr(executor, field))
        for executor in tiers
        for direction, field in (("read", read), ("write", written))
    ]
    return MetricFamily(name, kind, words, samples)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

"""`kvweave inspect`: what a daemon stores, and what its clients hold."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from kvweave.cli.daemon_options import Connect, Json, Socket, TlsCa, TokenFile, connected
from kvweave.cli.format import count, format_size
from kvweave.cli.table import console, plain_table, plain_text, print_table

if TYPE_CHECKING:
    from kvweave.server import Description, Report
    from kvweave.store import TierExecutorStats


def inspect_command(
    *,
    socket: Socket = None,
    connect: Connect = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    json: Json = False,
) -> None:
    """Show what a daemon stores and who uses it: tiers, hit rates, models, most used prefixes, connected clients.

    Changes nothing in the daemon.

    [bold]Examples[/bold]

      kvweave inspect
      kvweave inspect --socket /run/kvweave.sock --json
      kvweave inspect --connect cache.local:9401 --token-file token
    """
    with connected("inspect", socket, connect, token_file, tls_ca) as client:
        from kvweave.server.protocol import Describe, DescribeReply, StatsReply, StatsRequest  # noqa: PLC0415 - an extra

        report = client.ask(StatsRequest(), StatsReply).report
        description = client.ask(Describe(), DescribeReply).description
    if json:
        more = {"hit_rate": report.hit_rate, "description": asdict(description)}
        typer.echo(json_format.dumps(asdict(report) | more))
    else:
        _print(report, description)


def _print(report: Report, description: Description) -> None:
    out = console()
    out.print(Text(f"kvweave {report.version}, process {report.pid}, up {_time(report.uptime_s)}", style="bold"))
    found = f"{report.tokens_found:,} of {report.tokens_asked:,} tokens found ({report.hit_rate:.1%})"
    out.print(
        f"{count(report.lookups, 'lookup')}, {found}, {report.unanswered:,} unanswered;"
        f" {count(report.requests, 'request')}, {report.failures:,} failed"
    )
    out.print(
        f"leases last {description.lease_s:g} s; limits of a connection: {format_size(description.reserve_bytes)}"
        f" reserved, {format_size(description.pin_bytes)} pinned"
    )
    for executor in report.tiers:
        if executor.dropped:
            reasons = ", ".join(f"{why} {number:,}" for why, number in executor.drops.items())
            out.print(plain_text(f"{executor.tier.name} dropped {count(executor.dropped, 'blob')}: {reasons}"))
    for table in (_tiers(report), _models(report, description), _prefixes(report), _clients(report)):
        if table.row_count:
            out.print()
            print_table(out, table)


def _tiers(report: Report) -> Table:
    counts = (">entries", ">used", ">of", ">hits", ">misses", ">stored", ">dropped", ">damaged", ">evicted")
    table = plain_table("tier", *counts, ">state")
    for executor in report.tiers:
        tier = executor.tier
        sizes = ("-" if number is None else format_size(number) for number in (tier.used_bytes, tier.capacity_bytes))
        numbers = (
            executor.hits,
            executor.misses,
            executor.stored,
            executor.dropped,
            executor.damaged,
            tier.evicted,
        )
        entries = "-" if tier.entries is None else f"{tier.entries:,}"
        counted = (f"{number:,}" for number in numbers)
        table.add_row(plain_text(tier.name), entries, *sizes, *counted, plain_text(_state(executor)))
    return table


def _state(executor: TierExecutorStats) -> str:
    words = "paused" if executor.open else "slow" if executor.late else "ok"
    return f"{words}: {executor.last_error}" if executor.last_error else words


def _models(report: Report, description: Description) -> Table:
    table = plain_table("model", "group", "reach", ">layers", ">parts", ">a chunk", ">lookups", ">found")
    counted = {model.schema: model for model in report.models}
    for model in description.models:
        counts = counted.get(model.schema)
        rate = counts.tokens_found / counts.tokens_asked if counts and counts.tokens_asked else 0.0
        lookups = counts.lookups if counts else 0  # it was registered between the two requests
        firsts: Iterator[tuple[str, str, str]] = iter([(model.model or "-", f"{lookups:,}", f"{rate:.1%}")])
        for group in model.groups:
            name, *numbers = next(firsts, ("", "", ""))
            chunk = f"{format_size(group.chunk_bytes)} / {model.chunk_tokens}"
            parts = f"{len(group.rows)}"
            words = (plain_text(name), plain_text(group.tag), plain_text(group.reach))
            table.add_row(*words, f"{len(group.layers)}", parts, chunk, *numbers)
    return table


def _prefixes(report: Report) -> Table:
    table = plain_table("prefix", "model", ">tokens", ">uses")
    for prefix in report.prefixes[:10]:
        table.add_row(prefix.digest, plain_text(prefix.model or "-"), f"{prefix.tokens:,}", f"{prefix.uses:,}")
    return table


def _clients(report: Report) -> Table:
    counts = (">process", ">user", ">connected", ">requests", ">sequences", ">leases", ">reads", ">writes")
    table = plain_table("client", *counts)
    for client in report.clients:
        sizes = (format_size(client.leased_bytes), format_size(client.reserved_bytes))
        numbers = (client.requests, client.sequences, client.leases)
        who = (f"{client.pid}", f"{client.uid}") if client.pid else ("-", "-")  # not known over TCP
        table.add_row(
            plain_text(client.name or "-"), *who, _time(client.connected_s),
            *(f"{number:,}" for number in numbers), *sizes,
        )  # fmt: skip
    return table


def _time(seconds: float) -> str:
    """`42 s`, `3 min`, `5.0 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""`kvweave clear`: delete what a daemon stores."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli.daemon_options import Connect, Json, Socket, TlsCa, TokenFile, connected
from kvweave.cli.table import console, plain_table, plain_text, print_table
from kvweave.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from kvweave.server import Client
    from kvweave.server.protocol import ClearReply

Tenant = Annotated[str | None, typer.Option(metavar="NAME", help="Only KV of this tenant.")]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only KV of this model, named as in `kvweave inspect`.")
]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="The time that all tiers together may take.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]


def clear_command(
    *,
    tenant: Tenant = None,
    model: Model = None,
    yes: Yes = False,
    wait: Wait = 60.0,
    socket: Socket = None,
    connect: Connect = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    json: Json = False,
) -> None:
    """Delete the KV that a daemon stores: all of it, or that of a tenant, of a model, or both.

    Entries are deleted in every tier. Other data in the same server or bucket stays. Engines then compute and save
    again. A model has a name here once an engine has registered it. Exit code 1: nothing was deleted, or some tier may
    still have entries.

    [bold]Examples[/bold]

      kvweave clear --tenant team-a
      kvweave clear --model llama-3.1-8b --yes
      kvweave clear --connect cache.local:9401 --token-file token
    """
    with connected("clear", socket, connect, token_file, tls_ca) as client:
        _check_model(client, model)
        if not (yes or _agreed(client, _scope(tenant, model))):
            typer.echo("nothing was deleted", err=True)
            raise typer.Exit(1)
        cleared = _clear(client, tenant, model, wait)
    if json:
        typer.echo(json_format.dumps({"entries": cleared.entries, "tiers": [asdict(tier) for tier in cleared.tiers]}))
    else:
        _print(cleared)
    if cleared.kept_by:
        raise typer.Exit(1)


def _check_model(client: Client, model: str | None) -> None:
    from kvweave.server.protocol import Describe, DescribeReply  # noqa: PLC0415 - an extra

    if model is not None:
        known = {each.model for each in client.ask(Describe(), DescribeReply).description.models if each.model}
        if not known:
            raise ConfigError(f"no engine has registered {model!r} with this daemon yet; --tenant needs no such name")
        if model not in known:
            raise UnknownName("model", model, known)


def _agreed(client: Client, what: str) -> bool:
    """Ask the user. Raises `ConfigError` if stdin is not a terminal."""
    from kvweave.server.protocol import StatsReply, StatsRequest  # noqa: PLC0415 - an extra

    if not sys.stdin.isatty():
        raise ConfigError(f"stdin is no terminal, so it cannot be asked whether to delete {what}: give --yes")
    executors = client.ask(StatsRequest(), StatsReply).report.tiers
    held = [
        f"{executor.tier.name} ({'?' if executor.tier.entries is None else f'{executor.tier.entries:,}'})"
        for executor in executors
    ]
    typer.echo(f"Delete {what}? Tiers and their entries: {', '.join(held)}. [y/N] ", nl=False, err=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False


def _scope(tenant: str | None, model: str | None) -> str:
    named = {"tenant": tenant, "model": model}
    return " ".join(["everything", *(f"of {what} {name!r}" for what, name in named.items() if name is not None)])


def _clear(client: Client, tenant: str | None, model: str | None, wait_s: float) -> ClearReply:
    from kvweave.server.protocol import Clear, ClearReply  # noqa: PLC0415 - an extra
    from kvweave.store.keys import tenant_id  # noqa: PLC0415

    digest = None if tenant is None else tenant_id(tenant)
    return client.ask(Clear(digest, model, wait_s), ClearReply, wait_s + 5.0)


def _print(cleared: ClearReply) -> None:
    table = plain_table("tier", ">deleted", "~state")
    for tier in cleared.tiers:
        table.add_row(plain_text(tier.name), f"{tier.entries:,}", plain_text(tier.trouble or "done"))
    print_table(console(), table)

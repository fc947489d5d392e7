"""`kvweave serve`: one daemon for all engine processes of a host."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvweave.errors import MissingExtra

_storage, _access, _times = (partial(typer.Option, rich_help_panel=title) for title in ("Storage", "Access", "Times"))

Memory = Annotated[str | None, _storage(metavar="SIZE", help="Shared memory that holds KV.", show_default="8GiB")]
DiskOption = Annotated[
    str | None,
    _storage(
        metavar="DIR[:SIZE]", help="Also store KV in this directory, up to SIZE (default 20GiB). It survives restarts."
    ),
]
Redis = Annotated[str | None, _storage(metavar="URL", help="Also store KV in a Redis server or cluster.")]
Mooncake = Annotated[
    str | None, _storage(metavar="HOST:PORT", help="Also store KV in the Mooncake cluster of this master.")
]
Object = Annotated[str | None, _storage(metavar="URL", help="Also store KV in an object store: s3://, gs://, az://.")]
Socket = Annotated[
    Path | None,
    _access(metavar="PATH", help="The Unix socket for engine processes.", show_default="$XDG_RUNTIME_DIR/kvweave.sock"),
]
Group = Annotated[str | None, _access(metavar="NAME", help="A Unix group whose members may connect too.")]
Inbox = Annotated[
    str | None,
    _access(
        metavar="SIZE",
        help="Clients map the shared memory read-only. Each saves through a buffer of this size, which the daemon"
        " checks and copies.",
    ),
]
Http = Annotated[
    str | None, _access(metavar="HOST:PORT", help="Serve a dashboard, /metrics and /health at this address.")
]
Listen = Annotated[
    str | None,
    _access(metavar="HOST:PORT", help="Accept inspect and clear over TCP at this address; needs --token-file."),
]
TokenFile = Annotated[Path | None, _access(metavar="FILE", help="A file with the token that TCP clients must send.")]
TlsCert = Annotated[Path | None, _access(metavar="FILE", help="The certificate for TLS on --listen.")]
TlsKey = Annotated[Path | None, _access(metavar="FILE", help="The private key of --tls-cert.")]
LeaseS = Annotated[
    float | None,
    _times("--lease", metavar="SECONDS", help="Leases of lookups and saves end after this.", show_default="30"),
]
DrainS = Annotated[
    float | None,
    _times("--drain", metavar="SECONDS", help="At SIGTERM, the time to finish pending writes.", show_default="60"),
]
PollS = Annotated[
    float | None,
    _times(
        "--poll",
        metavar="SECONDS",
        help="After a request, look for the next one for this long instead of sleeping: replies come sooner, and a"
        " processor is busy meanwhile.",
        show_default="0",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A TOML file with these options, quotas and limits; options given here override it."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also log refused requests.")]


def serve_command(
    *,
    memory: Memory = None,
    disk: DiskOption = None,
    redis: Redis = None,
    mooncake: Mooncake = None,
    object: Object = None,
    socket: Socket = None,
    group: Group = None,
    inbox: Inbox = None,
    http: Http = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    lease: LeaseS = None,
    drain: DrainS = None,
    poll: PollS = None,
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """Run a daemon that stores KV for all engine processes of this host, in shared memory and in slower tiers.

    Needs neither torch nor a GPU. SIGTERM finishes pending writes, then ends the daemon.

    [bold]Examples[/bold]

      kvweave serve --memory 16GiB --disk /var/kv:200GiB
      kvweave serve --redis redis://cache.local --http 127.0.0.1:9400
      kvweave serve --disk /var/kv:200GiB --object s3://bucket/kv
      kvweave serve --config /etc/kvweave.toml
    """
    with MissingExtra.on_import("kvweave serve", "server"):
        from kvweave.server.run import run  # noqa: PLC0415 - an extra
        from kvweave.server.settings import Settings  # noqa: PLC0415

    settings = (Settings.read(config) if config else Settings()).changed(
        memory=memory, disk=disk, redis=redis, mooncake=mooncake, object=object, socket=socket, group=group,
        inbox=inbox, http=http, listen=listen, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key,
        lease_s=lease, drain_s=drain, poll_s=poll,
    )  # fmt: skip
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    run(settings)

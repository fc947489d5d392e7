"""`kvweave serve`: one daemon for all engine processes of a host."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvweave.errors import ConfigError

STORAGE, ACCESS, TIMES = "Storage", "Access", "Times"

Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The arena in shared memory.", show_default="8GiB", rich_help_panel=STORAGE),
]
DiskOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR[:SIZE]",
        help="Keep it on disk too, 20 GiB of it if no size is given: it survives restarts.",
        rich_help_panel=STORAGE,
    ),
]
Redis = Annotated[
    str | None, typer.Option(metavar="URL", help="Keep it in a Redis server or cluster too.", rich_help_panel=STORAGE)
]
Mooncake = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Keep it in a Mooncake cluster too: its master.", rich_help_panel=STORAGE),
]
Object = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Keep it in an object store too: s3://, gs://, az://.", rich_help_panel=STORAGE),
]
Socket = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The Unix socket for engine processes.",
        show_default="$XDG_RUNTIME_DIR/kvweave.sock",
        rich_help_panel=ACCESS,
    ),
]
Group = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A group whose members may connect, too.", rich_help_panel=ACCESS),
]
Inbox = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Let clients map the arena read-only, and save through so much memory each, which the daemon copies in.",
        rich_help_panel=ACCESS,
    ),
]
Http = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve /metrics and /health there.", rich_help_panel=ACCESS),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Answer inspect and clear over TCP; needs --token-file.", rich_help_panel=ACCESS
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The token that TCP clients must know.", rich_help_panel=ACCESS)
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS for --listen.", rich_help_panel=ACCESS)]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="... and its key.", rich_help_panel=ACCESS)]
LeaseS = Annotated[
    float | None,
    typer.Option(
        "--lease",
        metavar="SECONDS",
        help="After which a client that is silent holds nothing.",
        show_default="30",
        rich_help_panel=TIMES,
    ),
]
DrainS = Annotated[
    float | None,
    typer.Option(
        "--drain",
        metavar="SECONDS",
        help="How long a stop may write.",
        show_default="60",
        rich_help_panel=TIMES,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A TOML file with these options, quotas and limits; the command line overrides it."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what is refused, too.")]


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
    config: Config = None,
    verbose: Verbose = False,
) -> None:
    """Keep KV for all engine processes of this host: an arena in shared memory, and tiers behind it.

    Needs neither torch nor a GPU. SIGTERM writes what is left to write, and ends.

    [bold]Examples[/bold]

      kvweave serve --memory 16GiB --disk /var/kv:200GiB
      kvweave serve --redis redis://cache.local --http 127.0.0.1:9400
      kvweave serve --disk /var/kv:200GiB --object s3://bucket/kv
      kvweave serve --config /etc/kvweave.toml
    """
    with server_extra():
        from kvweave.server.run import run  # noqa: PLC0415 - an extra
        from kvweave.server.settings import Settings  # noqa: PLC0415

    settings = (Settings.read(config) if config else Settings()).changed(
        memory=memory, disk=disk, redis=redis, mooncake=mooncake, object=object, socket=socket, group=group,
        inbox=inbox, http=http, listen=listen, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key,
        lease_s=lease, drain_s=drain,
    )  # fmt: skip
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    run(settings)


@contextmanager
def server_extra() -> Iterator[None]:
    """Imports that need `kvweave[server]`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'kvweave[server]'") from error

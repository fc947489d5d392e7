"""Options for connecting to a daemon, shared by `kvweave inspect` and `kvweave clear`."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.errors import ConfigError, MissingExtra, ServerGone

if TYPE_CHECKING:
    from kvweave.server import Client

Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="The daemon's Unix socket.", show_default="$XDG_RUNTIME_DIR/kvweave.sock"),
]
Connect = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The address of its --listen, over TCP, instead of the socket.")
]
TokenFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the token for --connect.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Use TLS for --connect: the certificate of the authority that signed the daemon's."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def connected(
    name: str, socket: Path | None, connect: str | None, token_file: Path | None, tls_ca: Path | None
) -> Client:
    """Connect without mapping the arena. Raises `ServerGone`, `Refused`."""
    with MissingExtra.on_import(f"kvweave {name}", "server"):
        from kvweave.server import Client, default_socket  # noqa: PLC0415 - an extra
        from kvweave.server.settings import address, read_token  # noqa: PLC0415

    if connect is not None:
        address(connect)
    token = read_token(token_file) if token_file else ""
    try:
        tls = ssl.create_default_context(cafile=str(tls_ca)) if tls_ca else None
    except OSError as error:  # also of ssl; it does not name the file
        raise ConfigError(f"--tls-ca {tls_ca} cannot be used: {error}") from error
    try:
        return Client(connect or socket or default_socket(), name=name, token=token, tls=tls, arena=False)
    except ServerGone as error:
        option = "--connect" if connect else "--socket"
        raise ServerGone(f"{error}: start one with `kvweave serve`, or say where it is with {option}") from error

"""The settings of a daemon: one frozen record, from options or a TOML file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError, UnknownName
from kvweave.store import Quota
from kvweave.units import parse_bytes, parse_directory

NAME_LENGTH = 200
"""Characters of a client's, a model's or a group's name, and of a token, at most."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory, and the bytes it may use."""

    directory: Path
    capacity: int

    @classmethod
    def parse(cls, text: str) -> Disk:
        """`/var/kv:100GiB`, or `/var/kv` for 20 GiB of it."""
        return cls(*parse_directory(text))


def address(text: str) -> tuple[str, int]:
    """`127.0.0.1:9000`, `:0` (all interfaces, any port)."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"an address is HOST:PORT, for example 127.0.0.1:9400, not {text!r}")
    if ":" in host and not re.fullmatch(r"\[[0-9a-fA-F:.]+(%\w+)?\]", host):
        raise ConfigError(f"an address is HOST:PORT with one colon, or [IPV6]:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def read_token(path: Path) -> str:
    """The token in a file."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text, so no token: {error}") from error
    if not 0 < len(token) <= NAME_LENGTH:
        what = f"a token of {len(token)} characters" if token else "empty"
        raise ConfigError(f"{path} is {what}: 1 to {NAME_LENGTH} characters are needed")
    return token


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection. Beyond `requests_per_s` it is served more slowly; beyond the others requests are
    refused."""

    requests_per_s: float = 20_000.0
    connections: int = 256
    """Over all processes; the same number again over TCP."""
    sequences: int = 64
    keys: int = 1 << 18
    """Over all its sequences: shards x chunks. Each takes about 100 bytes of the daemon's memory."""
    schemas: int = 16
    leases: int = 4096
    reserve_share: float = 0.25
    """Share of the arena that a connection may reserve, and that its fetches may lease, at once."""
    lease_share: float = 0.25
    """Share of the arena that its lookups may lease. Beyond it, and when half of the arena is leased, lookups take no
    lease; fetches take none when three quarters are."""
    pin_share: float = 0.25
    """Share of the arena that it may pin."""

    def __post_init__(self) -> None:
        for name, least, most in _BOUNDS:
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"[limits] {name} = {value:g}: {least:g} to {most:g} is possible")


_BOUNDS = (
    ("requests_per_s", 1, 1e9), ("connections", 1, 1e6), ("sequences", 2, 1e9), ("keys", 1, 1e12), ("schemas", 1, 1e6),
    ("leases", 1, 1e9), ("reserve_share", 0, 1), ("lease_share", 0, 1), ("pin_share", 0, 1),
)  # fmt: skip
"""Clients leave half of the sequences to other stores of their connection, so they need two."""
SMALLEST_BYTES = 1 << 20
MOST_DRAIN_S, MOST_POLL_S = 86_400, 3600


def default_socket() -> Path:
    """In the user's runtime directory, or else in a directory of the user's own in /tmp."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return (Path(folder) if Path(folder).is_dir() else Path(f"/tmp/kvweave-{os.getuid()}")) / "kvweave.sock"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `kvweave serve`."""

    memory: int = 8 << 30
    inbox: int = 0
    """Bytes through which a connection saves, while it maps the arena read-only; 0: it writes to the arena."""
    disk: Disk | None = None
    redis: str | None = None
    object: str | None = None
    mooncake: str | None = None
    socket: Path = field(default_factory=default_socket)
    group: str | None = None
    http: str | None = None
    listen: str | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    lease_s: float = 30.0
    drain_s: float = 60.0
    poll_s: float = 0.0
    """How long after a request the daemon looks for the next one instead of sleeping."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for place in (self.listen, self.http):
            if place is not None:
                address(place)
        if self.listen and not self.token_file:
            raise ConfigError("--listen opens a TCP port, which needs --token-file: a file with the token to ask for")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together")
        if self.tls_cert and not self.listen:
            raise ConfigError("--tls-cert is for --listen, which is not given")
        if self.inbox > self.memory // 4:
            raise ConfigError(f"inboxes of {self.inbox} bytes: a quarter of the arena's {self.memory} at most")
        if not 0 < self.lease_s <= 3600:
            raise ConfigError(f"a lease of {self.lease_s:g} s: more than 0 and at most 3600 s")
        if not 0 <= self.drain_s <= MOST_DRAIN_S:
            raise ConfigError(f"{self.drain_s:g} s to drain: 0 to {MOST_DRAIN_S} s")
        if not 0 <= self.poll_s <= MOST_POLL_S:
            raise ConfigError(f"polling for {self.poll_s:g} s after a request: 0 to {MOST_POLL_S} s")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """A TOML file: the long options without dashes, and tables `[quotas.TENANT]` and `[limits]`."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls().changed(**{name.replace("-", "_"): value for name, value in data.items()})

    def changed(self, **values: Any) -> Settings:
        """A copy with these values, as text or as TOML gives them; None values are ignored."""
        given = {name: value for name, value in values.items() if value is not None}
        for name in given:
            if name not in _READ:
                raise UnknownName("setting", name, _READ)
        return replace(self, **{name: _READ[name](value) for name, value in given.items()})


def _memory(what: str, value: Any) -> int:
    size = parse_bytes(value, what=what)
    if size < SMALLEST_BYTES:
        raise ConfigError(f"an {what} of {size} bytes holds no chunk of a model; {SMALLEST_BYTES} bytes at least")
    return size


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"expected a number, got {value!r}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"expected text, got {value!r}")
    return value


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_text(value))


def _quotas(data: Any) -> dict[str, Quota]:
    return {tenant: _quota(shares) for tenant, shares in _table("quotas", data).items()}


def _quota(data: Any) -> Quota:
    shares = {name: parse_bytes(size, what=name, least=0) for name, size in _table("quota", data).items()}
    for name in shares:
        if name not in ("floor", "limit"):
            raise UnknownName("quota", name, ("floor", "limit"))
    return Quota(shares.get("floor", 0), shares.get("limit"))


def _limits(data: Any) -> Limits:
    known = {each.name: each for each in fields(Limits)}
    for name in _table("limits", data):
        if name not in known:
            raise UnknownName("limit", name, known)
    given: dict[str, Any] = {name: _number(value) for name, value in data.items()}
    Limits(**given)  # raises for what is out of bounds, before it is made whole
    return Limits(**{name: type(getattr(Limits(), name))(value) for name, value in given.items()})


def _table(name: str, data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name} must be a table, not {data!r}")
    return data


_READ: dict[str, Any] = {
    "memory": partial(_memory, "arena"),
    "inbox": partial(_memory, "inbox"),
    "disk": lambda value: Disk.parse(_text(value)),
    "redis": _text,
    "object": _text,
    "mooncake": _text,
    "socket": _path,
    "group": _text,
    "http": _text,
    "listen": _text,
    "token_file": _path,
    "tls_cert": _path,
    "tls_key": _path,
    "lease_s": _number,
    "drain_s": _number,
    "poll_s": _number,
    "quotas": _quotas,
    "limits": _limits,
}

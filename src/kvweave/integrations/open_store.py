"""Opens a store from a string: a directory, a daemon's socket, a Redis server, or a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvweave.errors import MissingExtra, UnknownName
from kvweave.store import BaseStore, DiskTier, MemoryTier, Schema, Store, Tier, TierPolicy, TierStack
from kvweave.units import parse_directory

NEAR_BYTES = 1 << 30
"""Host memory in front of a tier on the network. A disk has the page cache instead."""


def open_store(where: str | Path, schema: Schema, *, model: str = "") -> BaseStore[Any]:
    """Open the store at `where`. Close it when done: that finishes queued writes.

    `DIR`, `DIR:SIZE`        a directory of this process, at most SIZE of it (20 GiB)
    `SOCKET`, `unix://...`   the daemon (`kvweave serve`) that listens there: many processes at once
    `redis://`, `rediss://`  a Redis server
    `s3://`, `gs://`, `az://`, `file://`   objects of a bucket, or of a folder
    """
    scheme, colon, rest = str(where).partition("://")
    if not colon:
        return _daemon(Path(where), schema, model) if Path(where).is_socket() else _directory(str(where), schema)
    if scheme not in SCHEMES:
        raise UnknownName("kind of store", scheme, SCHEMES)
    if scheme == "unix":
        return _daemon(Path(rest), schema, model)
    near = MemoryTier(NEAR_BYTES), TierPolicy(inline=True, promote=True)
    return Store(schema, TierStack(near, (SCHEMES[scheme](str(where)), TierPolicy(write="back"))))


def _directory(where: str, schema: Schema) -> Store:
    return Store(schema, TierStack((DiskTier(*parse_directory(where)), TierPolicy(write="back"))))


def _daemon(socket: Path, schema: Schema, model: str) -> BaseStore[Any]:
    with MissingExtra.on_import("a store behind a daemon", "server"):
        from kvweave.server import RemoteStore  # noqa: PLC0415 - an extra
    return RemoteStore(schema, socket, model=model)


def _redis(url: str) -> Tier:
    with MissingExtra.on_import(f"a store at {url}", "redis"):
        from kvweave.store.redis_tier import RedisTier  # noqa: PLC0415 - an extra
    return RedisTier(url)


def _objects(url: str) -> Tier:
    with MissingExtra.on_import(f"a store at {url}", "object"):
        from kvweave.store.object_tier import ObjectTier  # noqa: PLC0415 - an extra
    return ObjectTier(url)


SCHEMES: dict[str, Callable[[str], Any]] = {
    "unix": Path,
    "redis": _redis,
    "rediss": _redis,
    **dict.fromkeys(("s3", "gs", "az", "file"), _objects),
}
"""By URL scheme."""

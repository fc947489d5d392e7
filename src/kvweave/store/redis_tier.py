"""The Redis tier: blobs in a server or cluster shared with others. Needs `kvweave[redis]`.

Capacity and eviction are the server's: `maxmemory` with the policy `allkeys-lru`. A full server that may not evict
raises `TierFull` on writes and can still be read.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

from kvweave.errors import ConfigError, TierError, TierFull
from kvweave.store.batches import batches
from kvweave.store.closeable import Closeable
from kvweave.store.keys import KEY_BYTES, Bytes
from kvweave.store.tier import ALL, UNREADABLE, Blob, ChecksumObserver, KeyFilter, TierStats, fill, joined

BATCH_KEYS = 4096
TRIP_BYTES = 4 << 20
"""Bytes of one round trip: transferring them takes longer than the latency, and with more the client becomes slower."""


class RedisTier(Closeable):
    """Blobs under `prefix` + key. `url` is `redis://`, `rediss://` or `unix://`: a server, or any node of a cluster.

    No connection is made before the first use, so the server may start later. `cluster` says whether it is one; by
    default the server is asked.
    """

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        prefix: bytes = b"kvweave:",
        ttl_s: int | None = None,
        timeout_s: float = 2.0,
        cluster: bool | None = None,
        name: str = "redis",
    ) -> None:
        self.name, self._prefix, self._ttl_s = name, prefix, ttl_s
        self._url, self._options = url, {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        try:
            self._node = redis.Redis.from_url(url, **self._options)
        except ValueError as error:
            raise ConfigError(f"tier {name!r}: {error}") from None
        self._cluster, self._lock = cluster, threading.Lock()
        self._client: Any = None

    @property
    def _server(self) -> Any:
        with self._lock:
            if self._client is None:
                if self._cluster is None:
                    self._cluster = bool(self._node.info("cluster").get("cluster_enabled"))
                self._client = redis.RedisCluster.from_url(self._url, **self._options) if self._cluster else self._node
            return self._client

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.array(self._each("exists", keys), bool)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:  # noqa: ARG002
        lengths: list[int] = []
        with _errors(self.name):
            for batch in batches(zip(keys, into, strict=True), lambda pair: pair[1].nbytes, TRIP_BYTES):
                values = self._at_once("get", [(key,) for key, _ in batch], errors_are_answers=True)
                lengths += [_filled(target, value) for (_, target), value in zip(batch, values, strict=True)]
        return lengths

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        with _errors(self.name):
            for batch in batches(zip(keys, blobs, strict=True), lambda pair: pair[1].num_bytes, TRIP_BYTES):
                self._at_once("set", [(key, joined(blob)) for key, blob in batch], nx=True, ex=self._ttl_s)
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self._each("unlink", keys))

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        """Other keys of the server, also those under another prefix, are not touched."""
        return sum(self.delete(keys) for keys in _key_batches(self._listed(key_filter)))

    def _listed(self, key_filter: KeyFilter) -> Iterator[bytes]:
        begin = self._prefix + key_filter.tenant
        with _errors(self.name):
            for name in self._server.scan_iter(match=_literal(begin) + b"*", count=BATCH_KEYS):
                key = name.removeprefix(self._prefix)
                if len(key) == KEY_BYTES and key in key_filter:
                    yield key

    def _each(self, command: str, keys: Sequence[bytes]) -> list[int]:
        answers: list[int] = []
        with _errors(self.name):
            for batch in _key_batches(keys):
                answers += self._at_once(command, [(key,) for key in batch])
        return answers

    def _at_once(
        self, command: str, calls: Iterable[tuple[bytes, ...]], *, errors_are_answers: bool = False, **options: Any
    ) -> list[Any]:
        """One command for each key, in one round trip (of a cluster: one to each node)."""
        pipe = self._server.pipeline(transaction=False)
        for key, *values in calls:
            getattr(pipe, command)(self._prefix + key, *values, **options)
        answers: list[Any] = pipe.execute(raise_on_error=not errors_are_answers)
        return answers

    def stats(self) -> TierStats:
        return TierStats(self.name)

    def close(self) -> None:
        for server in (self._node, self._client):
            if server is not None:
                server.close()


def _filled(target: Bytes, value: Any) -> int:
    """As `fill`. A value that is not a string is `UNREADABLE`; any other error is raised."""
    if isinstance(value, redis.ResponseError) and "WRONGTYPE" in str(value):
        return UNREADABLE
    if isinstance(value, Exception):
        raise value
    return fill(target, value)


def _key_batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    return batches(keys, lambda _: 1, BATCH_KEYS)


def _literal(text: bytes) -> bytes:
    """A glob pattern that matches exactly these bytes."""
    return re.sub(rb"([*?\[\]\\])", rb"\\\1", text)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        full = isinstance(error, redis.exceptions.OutOfMemoryError) or "MISCONF" in str(error)
        words = str(error).rpartition("caused error: ")[2]  # the message starts with the bytes of the command's key
        raise (TierFull if full else TierError)(f"tier {name!r}: {words}") from error

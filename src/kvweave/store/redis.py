"""The Redis tier: blobs in a server, or a cluster, that others use too. Needs `kvweave[redis]`.

The quota is the server's: `maxmemory` with the policy `allkeys-lru`. A server that must not evict and is full raises
`TierFull` on writes, and goes on being read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

from kvweave.errors import TierError, TierFull
from kvweave.store.keys import Bytes
from kvweave.store.tier import Blob, TierStats, Watch, fill, joined

BATCH_KEYS = 4096


class RedisTier:
    """Blobs under `prefix` + key. `url` is `redis://`, `rediss://` or `unix://`; `cluster` for a Redis Cluster."""

    def __init__(
        self,
        url: str,
        *,
        prefix: bytes = b"kvweave:",
        ttl_s: int | None = None,
        timeout_s: float = 2.0,
        cluster: bool = False,
        name: str = "redis",
    ) -> None:
        self.name, self._prefix, self._ttl_s = name, prefix, ttl_s
        make: Any = redis.RedisCluster.from_url if cluster else redis.Redis.from_url
        with _errors(name):
            self._server = make(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.array(self._each("exists", keys), bool)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], watch: Sequence[Watch] = ()) -> list[int]:  # noqa: ARG002
        with _errors(self.name):
            return [fill(target, self._server.get(self._prefix + key)) for key, target in zip(keys, into, strict=True)]

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        with _errors(self.name):
            for key, blob in zip(keys, blobs, strict=True):
                self._server.set(self._prefix + key, joined(blob), nx=True, ex=self._ttl_s)
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self._each("unlink", keys))

    def _each(self, command: str, keys: Sequence[bytes]) -> list[int]:
        """One command a key, many in one round trip."""
        answers: list[int] = []
        with _errors(self.name):
            for first in range(0, len(keys), BATCH_KEYS):
                pipe = self._server.pipeline(transaction=False)
                for key in keys[first : first + BATCH_KEYS]:
                    getattr(pipe, command)(self._prefix + key)
                answers += pipe.execute()
        return answers

    def stats(self) -> TierStats:
        return TierStats(self.name)

    def close(self) -> None:
        self._server.close()


@contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        full = isinstance(error, redis.exceptions.OutOfMemoryError) or "MISCONF" in str(error)
        raise (TierFull if full else TierError)(f"tier {name!r}: {error}") from error

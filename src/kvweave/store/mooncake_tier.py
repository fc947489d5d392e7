"""The Mooncake tier: the memory of a cluster, through Mooncake Store. Needs `kvweave[mooncake]` and a master.

On a host without CUDA the package is `mooncake-transfer-engine-non-cuda`, with Debian's libibverbs1 and librdmacm1.
Capacity and eviction are the cluster's: each client contributes `segment` bytes of memory, and the master evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore
from numpy.typing import NDArray

from kvweave.errors import TierError
from kvweave.store.batches import batches
from kvweave.store.closeable import Closeable
from kvweave.store.keys import PREFIX_BYTES, SHARD_ID_BYTES, TENANT_BYTES, Bytes
from kvweave.store.tier import ABSENT, ALL, Blob, ChecksumObserver, KeyFilter, TierStats, fill, joined
from kvweave.units import parse_bytes

NOT_STORED = (-703, -704)
"""Mooncake's error codes: the value is being written; there is none."""
EXISTS = -705
"""Mooncake's error code: the key exists."""
NO_ROOM = -200
"""Mooncake's error code: no room for the value, even after eviction."""


class MooncakeTier(Closeable):
    """Blobs in a Mooncake cluster. `metadata` is the metadata server; by default clients exchange metadata with each
    other."""

    kind = "mooncake"

    def __init__(
        self,
        master: str,
        *,
        host: str = "localhost",
        metadata: str = "P2PHANDSHAKE",
        segment: int | str = "1GiB",
        buffer: int | str = "256MiB",
        protocol: str = "tcp",
        devices: str = "",
        name: str = "mooncake",
    ) -> None:
        self.name = name
        self._store: Any = MooncakeDistributedStore()
        self._closed = False
        sizes = parse_bytes(segment, least=0), parse_bytes(buffer)
        code = self._store.setup(host, metadata, *sizes, protocol, devices, master)
        if code:
            raise TierError(f"tier {name!r}: no Mooncake cluster at {master} (code {code})")

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        answers = np.array(self._store.batch_is_exist([key.hex() for key in keys]) if keys else [], np.int64)
        if (answers < 0).any():
            raise TierError(f"tier {self.name!r}: the cluster does not answer (code {answers.min()})")
        found: NDArray[np.bool_] = answers == 1
        return found

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:  # noqa: ARG002
        lengths: list[int] = []
        for batch in batches(zip(keys, into, strict=True), lambda pair: pair[1].nbytes):
            values = self._store.batch_get_buffer([key.hex() for key, _ in batch])
            lengths += [
                fill(target, value and memoryview(value)) for (_, target), value in zip(batch, values, strict=True)
            ]
        if ABSENT in lengths:  # Mooncake does not say why it has no value: raise if the cluster does not answer
            self.contains(keys[:1])
        return lengths

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        pairs = zip([key.hex() for key in keys], blobs, strict=True)
        return [kept for batch in batches(pairs, lambda pair: pair[1].num_bytes) for kept in self._put(batch)]

    def _put(self, batch: Sequence[tuple[str, Blob]]) -> list[bool]:
        """Put all at once. If that fails, Mooncake does not say for which key, so each is put by itself."""
        keys, blobs = zip(*batch, strict=True)
        if self._store.put_batch([*keys], [joined(blob) for blob in blobs]) == 0:
            return [True] * len(batch)
        return [self._put_one(key, blob) for key, blob in batch]

    def _put_one(self, key: str, blob: Blob) -> bool:
        code = self._store.put(key, joined(blob))
        if code not in (0, EXISTS, NO_ROOM):
            raise TierError(f"tier {self.name!r}: a value was not taken (code {code})")
        return bool(code != NO_ROOM)

    def delete(self, keys: Sequence[bytes]) -> int:
        codes = self._store.batch_remove([key.hex() for key in keys], True) if keys else []
        if wrong := [code for code in codes if code not in (0, *NOT_STORED)]:
            raise TierError(f"tier {self.name!r}: {len(wrong)} of {len(keys)} were not deleted (code {min(wrong)})")
        return sum(code == 0 for code in codes)

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        """Values whose keys are not of kvweave's form are not touched."""
        gone: int = self._store.remove_by_regex(_pattern(key_filter), True)
        if gone < 0:
            raise TierError(f"tier {self.name!r}: the cluster does not answer (code {gone})")
        return gone

    def stats(self) -> TierStats:
        return TierStats(self.name)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._store.close()


def _pattern(key_filter: KeyFilter) -> str:
    tenant = key_filter.tenant.hex() or _hex(TENANT_BYTES)
    shards = (
        _hex(SHARD_ID_BYTES)
        if key_filter.shards is None
        else f"({'|'.join(sorted(shard.hex() for shard in key_filter.shards))})"
    )
    return f"^{tenant}{_hex(PREFIX_BYTES)}{shards}$"


def _hex(num_bytes: int) -> str:
    return f"[0-9a-f]{{{2 * num_bytes}}}"

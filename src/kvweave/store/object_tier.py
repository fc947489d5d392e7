"""The object tier: S3, GCS, Azure, or a folder, through obstore. Needs `kvweave[object]`.

    PREFIX/tenant/digest of the tokens/shard        one object a blob; an object appears whole or not at all

Eviction and quota are the bucket's (a lifecycle rule). A full bucket raises `TierFull` on writes and can still be read.
Requests run in threads, not in an event loop: obstore calls the loop back from threads that cannot be joined, and a
process that ends meanwhile aborts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import from_url

from kvweave.errors import ConfigError, TierError, TierFull
from kvweave.store.closeable import Closeable
from kvweave.store.keys import KEY_BYTES, SHARD_ID_BYTES, TENANT_BYTES, Bytes
from kvweave.store.tier import ABSENT, ALL, Blob, ChecksumObserver, KeyFilter, TierStats, fill, joined

AT_ONCE, PAGE_OBJECTS = 64, 1000
RETRYING: dict[str, Any] = {"retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}}
"""Defaults: fewer retries than obstore's own, since the tier executor retries, and skips a tier that keeps failing."""
NOT_HERE = (FileNotFoundError, NotFoundError)
FULL = ("QuotaExceeded", "StorageFull", "507 Insufficient Storage", "No space left on device", "Disk quota exceeded")
"""Substrings by which buckets and disks report that they are full: Ceph, MinIO, other HTTP servers, a folder."""
Answer = TypeVar("Answer")


class ObjectTier(Closeable):
    """Blobs as objects of `url`: `s3://bucket/prefix`, `gs://`, `az://`, `file:///folder`, or an obstore store.

    `options` are obstore's (`endpoint`, `region`, `client_options`, ...); missing ones are read from the environment,
    as the clouds' own tools do (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...).
    """

    kind = "object"

    def __init__(self, url: str | Any, *, name: str = "object", **options: Any) -> None:
        self.name = name
        self._threads = ThreadPoolExecutor(AT_ONCE, f"kvweave-{name}")
        with _errors(name):
            self._store = from_url(url, **RETRYING | options) if isinstance(url, str) else url

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.array(self._all(self._has, keys), bool)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:  # noqa: ARG002
        return self._all(self._get, keys, into)

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        return self._all(self._put, keys, blobs)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._delete([keys[i] for i in np.flatnonzero(self.contains(keys)).tolist()])

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        """Objects under the prefix that are not blobs are not touched."""
        with _errors(self.name):
            pages = obstore.list(self._store, key_filter.tenant.hex() or None, chunk_size=PAGE_OBJECTS)
            return sum(self._delete([*_ours(page, key_filter)]) for page in pages)

    def _delete(self, keys: Sequence[bytes]) -> int:
        """Delete in one request, if the store supports it. If some objects were missing, others may not have been
        deleted, so each is deleted by itself."""
        with _errors(self.name):
            try:
                obstore.delete(self._store, [_path(key) for key in keys])
            except NOT_HERE:
                return sum(self._all(self._delete_one, keys))
        return len(keys)

    # ---- one object, in a thread

    def _has(self, key: bytes) -> bool:
        try:
            obstore.head(self._store, _path(key))
        except NOT_HERE:
            return False
        return True

    def _get(self, key: bytes, target: Bytes) -> int:
        try:
            found = obstore.get(self._store, _path(key))
            size: int = found.meta["size"]
            return fill(target, memoryview(found.bytes())) if size == target.nbytes else size
        except NOT_HERE:
            return ABSENT

    def _put(self, key: bytes, blob: Blob) -> bool:
        with suppress(AlreadyExistsError):  # a key names its content: that object is the same blob
            obstore.put(self._store, _path(key), joined(blob), mode="create")
        return True

    def _delete_one(self, key: bytes) -> bool:
        try:
            obstore.delete(self._store, _path(key))
        except NOT_HERE:  # deleted by another client meanwhile
            return False
        return True

    def _all(self, one: Callable[..., Answer], *items: Sequence[Any]) -> list[Answer]:
        """Run one call for each item, up to `AT_ONCE` at a time."""
        with _errors(self.name):
            return [*self._threads.map(one, *items)]

    def stats(self) -> TierStats:
        return TierStats(self.name)

    def close(self) -> None:
        self._threads.shutdown()


def _path(key: bytes) -> str:
    return f"{key[:TENANT_BYTES].hex()}/{key[TENANT_BYTES:-SHARD_ID_BYTES].hex()}/{key[-SHARD_ID_BYTES:].hex()}"


def _ours(page: Iterable[Any], key_filter: KeyFilter) -> Iterator[bytes]:
    """The keys of the objects that are blobs."""
    for listed in page:
        with suppress(ValueError):  # the name is no key: another program's object
            key = bytes.fromhex(listed["path"].replace("/", ""))
            if len(key) == KEY_BYTES and key in key_filter:
                yield key


@contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"tier {name!r}: {error}; expected for example s3://bucket/prefix") from None
    except (BaseError, OSError) as error:
        words = str(error).partition("\n")[0]  # later lines are obstore's debug output
        full = any(said in words for said in FULL)
        raise (TierFull if full else TierError)(f"tier {name!r}: {words}") from error

"""The object tier: S3, GCS, Azure, or a folder, through obstore. Needs `kvweave[object]`.

    PREFIX/tenant/digest of the tokens/row        one object a blob; an object appears whole or not at all

Eviction is the bucket's business (a lifecycle rule), and so is its quota.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import from_url

from kvweave.errors import TierError
from kvweave.store.keys import ROW_BYTES, TENANT_BYTES, Bytes
from kvweave.store.tier import ABSENT, Blob, TierStats, Watch, fill, joined

AT_ONCE = 64
NOT_HERE = (FileNotFoundError, NotFoundError)
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ObjectTier:
    """Blobs as objects of `url`: `s3://bucket/prefix`, `gs://`, `az://`, `file:///folder`, or an obstore store."""

    def __init__(self, url: str | Any, *, name: str = "object", **options: Any) -> None:
        self.name = name
        with _errors(name):
            self._store = from_url(url, **options) if isinstance(url, str) else url

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        async def one(key: bytes) -> bool:
            try:
                await obstore.head_async(self._store, _path(key))
            except NOT_HERE:
                return False
            return True

        return np.array(self._all(one, keys), bool)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], watch: Sequence[Watch] = ()) -> list[int]:  # noqa: ARG002
        async def one(pair: tuple[bytes, Bytes]) -> int:
            try:
                found = await obstore.get_async(self._store, _path(pair[0]))
                return fill(pair[1], memoryview(await found.bytes_async()))
            except NOT_HERE:
                return ABSENT

        return self._all(one, list(zip(keys, into, strict=True)))

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        async def one(pair: tuple[bytes, Blob]) -> bool:
            with suppress(AlreadyExistsError):
                await obstore.put_async(self._store, _path(pair[0]), joined(pair[1]), mode="create")
            return True

        return self._all(one, list(zip(keys, blobs, strict=True)))

    def delete(self, keys: Sequence[bytes]) -> int:
        here = self.contains(keys)
        with _errors(self.name):
            for key, is_here in zip(keys, here, strict=True):
                with suppress(*NOT_HERE):  # somebody was faster
                    if is_here:
                        obstore.delete(self._store, _path(key))
        return int(here.sum())

    def _all(self, one: Callable[[Item], Awaitable[Answer]], items: Sequence[Item]) -> list[Answer]:
        """Ask for all of them, so many at once."""

        async def gather() -> list[Answer]:
            gate = asyncio.Semaphore(AT_ONCE)

            async def through(item: Item) -> Answer:
                async with gate:
                    return await one(item)

            return await asyncio.gather(*map(through, items))

        with _errors(self.name):
            return asyncio.run(gather())

    def stats(self) -> TierStats:
        return TierStats(self.name)

    def close(self) -> None:
        """There is nothing to give back."""


def _path(key: bytes) -> str:
    return f"{key[:TENANT_BYTES].hex()}/{key[TENANT_BYTES:-ROW_BYTES].hex()}/{key[-ROW_BYTES:].hex()}"


@contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        raise TierError(f"tier {name!r}: {error}") from error

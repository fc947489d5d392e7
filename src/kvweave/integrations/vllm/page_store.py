"""Pages of an engine's host memory in a store, under keys of the engine's own: for vLLM's native offloading.

A batch of keys is a prompt whose chunks are pages: each key's digest stands where the digest of a prefix would.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Role
from kvweave.store import AnyStore, HashedPrompt, Namespace, Operation, Schema, Shard
from kvweave.store.keys import PREFIX_BYTES, Bytes
from kvweave.store.ticket import VALID_S, write_ticket

DOMAIN = b"kvweave pages 1\0"


def page_schema(page_bytes: int) -> Schema:
    """Pages of this size, each by itself."""
    role = Role("page", (page_bytes,), DType.UINT8)
    return Schema.of(ModelSpec("pages", (Layer((LayerCache("page", Full(), (role,)),)),)), chunk_tokens=1, parts=1)


class PageJob(NamedTuple):
    """A job that has ended: how many of its pages were moved, from the first on."""

    number: int
    num_pages: int
    num_moved: int
    seconds: float


class PageStore:
    """Moves rows of `pages` (`[pages, bytes]`) by the store's threads. No call waits but `drain`."""

    def __init__(self, store: AnyStore[Any], namespace: Namespace, pages: Bytes) -> None:
        self._store, self._pages, self._tenant = store, pages, namespace.tenant_id
        self._root = DOMAIN + namespace.fingerprint
        self._asked: dict[bytes, Operation[list[Any]]] = {}
        self._jobs: dict[int, tuple[Operation[Any], int, float]] = {}

    def _prompt(self, keys: Sequence[bytes]) -> HashedPrompt:
        digests = b"".join(hashlib.sha256(self._root + key).digest() for key in keys)
        prefixes = np.frombuffer(digests, np.uint8).reshape(-1, PREFIX_BYTES)
        return HashedPrompt(self._tenant, len(keys) + 1, 1, prefixes)

    def has(self, key: bytes) -> bool | None:
        """Whether the store has a page; None: it was asked, ask again."""
        asked = self._asked.get(key)
        if asked is None:
            self._asked[key] = self._store.submit_lookup([self._prompt([key])], lease=False)
            return None
        if not asked.is_done:
            return None
        del self._asked[key]
        return asked.error is None and asked.result(0)[0].position == 1

    def save(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store these rows; they must not change until the job has ended."""

        def source(shard: Shard, chunk: int) -> Bytes:  # noqa: ARG001 - there is one
            page: Bytes = self._pages[rows[chunk]]
            return page

        self._begin(number, len(keys), self._store.submit_save(self._prompt(keys), source, request=number))

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Fill these rows. Of what is gone meanwhile nothing is written, and nothing behind it."""

        def sink(shard: Shard, chunk: int, payload: Bytes) -> None:  # noqa: ARG001
            self._pages[rows[chunk]] = payload

        prompt, present = self._prompt(keys), np.ones((1, len(keys)), bool)
        hit = self._store.redeem(write_ticket(self._store.schema, prompt, len(keys), present, VALID_S))
        self._begin(number, len(keys), self._store.submit_load(hit, sink, request=number))

    def _begin(self, number: int, num_pages: int, operation: Operation[Any]) -> None:
        self._jobs[number] = operation, num_pages, time.monotonic()

    def take_ended(self) -> list[PageJob]:
        """The jobs that have ended since the last call."""
        ended = []
        for number in [number for number, (operation, *_) in self._jobs.items() if operation.is_done]:
            operation, num_pages, began = self._jobs.pop(number)
            moved = 0
            if operation.error is None:
                moved = operation.result(0) if operation.kind == "load" else num_pages - len(operation.failed)
            ended.append(PageJob(number, num_pages, moved, time.monotonic() - began))
        self._store.poll()
        return ended

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def drain(self) -> None:
        """Wait until every job has ended."""
        while any(not operation.is_done for operation, *_ in self._jobs.values()):
            time.sleep(0.001)

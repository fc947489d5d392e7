"""Pages of an engine's host memory in a store, under keys of the engine's own.

A batch of keys is a prompt whose chunks are pages: each key's digest stands where the digest of a prefix would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Role
from kvweave.store import BaseStore, HashedPrompt, Namespace, Schema
from kvweave.store.keys import PREFIX_BYTES
from kvweave.store.ticket import VALID_S, write_ticket

DOMAIN = b"kvweave pages 1\0"


class KeyedPool(NamedTuple):
    """A kind of pages. Pages of another `content` (rank, layout, dtype) are never mistaken for them."""

    tag: str
    page_bytes: int
    content: str = "page"


def page_schema(pools: Iterable[KeyedPool]) -> Schema:
    """One shard for each pool, in their order; every page is by itself."""
    caches = tuple(
        LayerCache(pool.tag, Full(), (Role(pool.content, (pool.page_bytes,), DType.UINT8),)) for pool in pools
    )
    return Schema.of(ModelSpec("pages", (Layer(caches),)), chunk_tokens=1, parts=1, keyed=True)


def page_prompt(keys: Sequence[bytes], namespace: Namespace) -> HashedPrompt:
    root = DOMAIN + namespace.fingerprint
    digests = b"".join(hashlib.sha256(root + key).digest() for key in keys)
    prefixes = np.frombuffer(digests, np.uint8).reshape(-1, PREFIX_BYTES)
    return HashedPrompt(namespace.tenant_id, len(keys) + 1, 1, prefixes)


def promised(store: BaseStore[Any], prompt: HashedPrompt) -> Any:
    """A hit of all pages of a prompt, as if a lookup had found them: a load tells which are there."""
    present = np.ones((len(store.schema.shards), prompt.num_chunks), bool)
    return store.redeem(write_ticket(store.schema, prompt, prompt.num_chunks, present, VALID_S))

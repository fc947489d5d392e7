"""A prompt that a client opened: requests refer to it by a number, and to its blobs by shard and chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadRequest, OverLimit
from kvweave.server.protocol import MOST_PIECES, Open, numbers
from kvweave.server.registered_model import RegisteredModel
from kvweave.store.arena_tier import STEP_KEYS
from kvweave.store.blob import BlobCheck
from kvweave.store.keys import PREFIX_BYTES, keys_of
from kvweave.store.tier_stack import BlobRequest

Pieces = NDArray[np.int64]
"""`[n, 2]`: shards and chunks."""


class OpenSequence:
    """An open prompt: the keys of all its chunks and shards, chunk by chunk."""

    def __init__(self, registered: RegisteredModel, request: Open) -> None:
        if len(request.prefixes) % PREFIX_BYTES:
            raise BadRequest(f"{len(request.prefixes)} bytes are no digests of {PREFIX_BYTES}")
        self.registered, self.num_tokens, self.tenant = registered, request.num_tokens, request.tenant
        self.prefixes = np.frombuffer(request.prefixes, np.uint8).reshape(-1, PREFIX_BYTES)
        if self.num_chunks * registered.chunk_tokens > self.num_tokens:
            raise BadRequest(f"{self.num_chunks} chunks of {registered.chunk_tokens} tokens, but {self.num_tokens}")
        self.keys: list[bytes] = []

    def steps(self) -> Iterator[None]:
        """Make the keys in steps, between which the event loop can serve others."""
        chunks = max(1, STEP_KEYS // self.registered.num_shards)
        for first in range(0, self.num_chunks, chunks):
            self.keys += keys_of(self.tenant, self.prefixes[first : first + chunks], self.registered.ids)
            yield

    @property
    def num_keys(self) -> int:
        return self.num_chunks * self.registered.num_shards

    @property
    def num_chunks(self) -> int:
        return len(self.prefixes)

    @property
    def limit(self) -> int:
        """The longest possible hit: at least one token is left to compute."""
        size = self.registered.chunk_tokens
        return min(self.num_tokens - 1, self.num_chunks * size) // size * size

    def pieces(self, data: bytes) -> Pieces:
        """Decode pieces `[n, 2]`, and check that this sequence has them."""
        flat = numbers(data, "<i4")
        if len(flat) % 2:
            raise BadRequest("a piece is a shard and a chunk")
        pieces = flat.reshape(-1, 2)
        if len(pieces) > MOST_PIECES:
            raise OverLimit(f"{len(pieces)} pieces in one message, {MOST_PIECES} at most")
        most = (self.registered.num_shards, self.num_chunks)
        if ((pieces < 0) | (pieces >= most)).any():
            raise BadRequest(f"a piece beyond {most[0]} shards and {most[1]} chunks")
        return pieces

    def keys_at(self, pieces: Pieces) -> list[bytes]:
        at = pieces[:, 1] * self.registered.num_shards + pieces[:, 0]
        return [self.keys[i] for i in at.tolist()]

    def wants_at(self, pieces: Pieces) -> list[BlobRequest]:
        """Requests for these blobs, with their checks."""
        shards = self.registered.shards
        return [
            BlobRequest(key, shards[shard].blob_bytes, partial(BlobCheck, shards[shard], chunk, key))
            for key, (shard, chunk) in zip(self.keys_at(pieces), pieces.tolist(), strict=True)
        ]

    def lengths_at(self, pieces: Pieces) -> list[int]:
        lengths: list[int] = self.registered.sizes[pieces[:, 0]].tolist()
        return lengths

"""The store: keys, blobs and a stack of tiers. The joint formula decides, from what the tiers have, what is a hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvweave.store.any_store import AnyStore, ChunkRef, Saved, StoreStats, discard, in_thread
from kvweave.store.batches import batches
from kvweave.store.blob import BlobCheck, header_bytes, owned_payload, seal
from kvweave.store.keys import HashedPrompt
from kvweave.store.page_payloads import Source
from kvweave.store.shards import Schema
from kvweave.store.tier_stack import NOWHERE, BlobRequest, Budget, TierLookup, TierStack


@dataclass(frozen=True)
class Hit:
    """The tokens before `position` can be loaded; 0: nothing was found."""

    prompt: HashedPrompt
    position: int
    tiers: NDArray[np.int8]
    """`[shards, chunks]`: the nearest tier of each, -1 for none."""
    keys: list[bytes]
    """Chunk by chunk, shard by shard."""

    @property
    def present(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.tiers != NOWHERE
        return found


class Store(AnyStore[Hit]):
    """The KV of one model's chunks in a stack of tiers. Thread-safe."""

    def __init__(self, schema: Schema, tier_stack: TierStack) -> None:
        super().__init__(schema)
        self.tier_stack = tier_stack

    # ---- reading

    def lookup(self, prompt: HashedPrompt, *, budget_s: float | None = None) -> Hit:
        keys = prompt.keys(self.schema.ids)
        where = self.tier_stack.where(keys, Budget.of(budget_s))
        tiers = where.tiers.reshape(prompt.num_chunks, len(self.schema.shards)).T
        position = self._position(prompt, tiers != NOWHERE, prompt.num_tokens - 1)
        self._count(lookups=1, tokens_asked=prompt.num_tokens, tokens_found=position, unanswered=where.late)
        self._count_misses(prompt, position, where)
        return Hit(prompt, position, tiers, keys)

    def _count_misses(self, prompt: HashedPrompt, position: int, where: TierLookup) -> None:
        """Count what the longest hit would have needed and no tier has as a miss of every tier."""
        longest = (prompt.num_tokens - 1) // self.schema.chunk_tokens * self.schema.chunk_tokens
        if position >= longest or where.late:
            return
        shards = len(self.schema.shards)
        present = (where.tiers != NOWHERE).reshape(-1, shards).T
        needed = [chunk * shards + shard for shard, chunk in self._needs(longest, range(shards), present)]
        misses = int(np.count_nonzero(where.tiers[needed] == NOWHERE))
        for executor in self.tier_stack.executors:
            executor.count("misses", misses)

    def _fetch(
        self, hit: Hit, pieces: Sequence[ChunkRef], budget: Budget
    ) -> Iterator[tuple[ChunkRef, NDArray[np.uint8]]]:
        wants = [self._want(hit, *piece) for piece in pieces]
        for number, blob in self.tier_stack.fetch(wants, budget):
            piece = pieces[number]
            yield piece, blob[header_bytes(self.schema.shards[piece[0]]) :]

    def _want(self, hit: Hit, number: int, chunk: int) -> BlobRequest:
        shard, key = self.schema.shards[number], hit.keys[chunk * len(self.schema.shards) + number]
        tier = max(0, int(hit.tiers[number, chunk]))
        return BlobRequest(key, self._sizes[number], partial(BlobCheck, shard, chunk, key), tier)

    def prefetch(self, hit: Hit, *, shards: Sequence[int] | None = None, budget_s: float | None = None) -> Future[int]:
        """Load what a hit needs into the tiers with `promote`, in a thread of its own."""
        return in_thread("kvweave-prefetch", partial(self.load, hit, discard, shards=shards, budget_s=budget_s))

    # ---- writing

    def save(
        self,
        prompt: HashedPrompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> Saved:
        budget, pieces = Budget.of(budget_s), self._to_keep(prompt, source, points, shards)
        every = prompt.keys(self.schema.ids)
        keys = [every[chunk * len(self.schema.shards) + shard] for shard, chunk in pieces]
        lacking = self.tier_stack.missing(keys, budget)
        todo = [(*pieces[i], keys[i]) for i in np.flatnonzero(lacking).tolist()]
        turns = batches(todo, lambda piece: self._sizes[piece[0]])
        kept = sum(self._put(batch, source, budget) for batch in turns)
        self.tier_stack.touch(keys)
        return Saved(kept, len(keys) - len(todo), len(todo) - kept)

    def _put(self, batch: Sequence[tuple[int, int, bytes]], source: Source, budget: Budget) -> int:
        shards = self.schema.shards
        blobs = [
            seal(shards[shard], chunk, key, owned_payload(source(shards[shard], chunk))) for shard, chunk, key in batch
        ]
        return int(self.tier_stack.put([key for _, _, key in batch], blobs, budget).sum())

    # ---- the rest

    def stats(self) -> StoreStats:
        return self._stats(self.tier_stack.stats())

    def flush(self, wait_s: float = 60.0) -> bool:
        return self.tier_stack.flush(wait_s)

    def close(self, wait_s: float = 60.0) -> None:
        """Finish queued writes, and close every tier."""
        self.tier_stack.close(wait_s)

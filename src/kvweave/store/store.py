"""The store: keys, blobs and a stack of tiers. The joint formula decides, from what the tiers have, what is a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.store.base_store import BaseStore
from kvweave.store.batches import batches
from kvweave.store.blob import BlobCheck, flat_payload, header_bytes, owned_payload, seal
from kvweave.store.blocking_store import GATHER_BYTES, discard
from kvweave.store.keys import Bytes, HashedPrompt
from kvweave.store.operations import ChunkRef, Operation
from kvweave.store.page_payloads import Gather, Source
from kvweave.store.removals import RemovalLog, Removals
from kvweave.store.results import GatheredSave, Saved, SaveOutcome, StoreStats
from kvweave.store.shard_group import uses
from kvweave.store.shards import Schema
from kvweave.store.ticket import VALID_S, TicketContent, write_ticket
from kvweave.store.tier import Blob
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
    schema: Schema

    @property
    def present(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.tiers != NOWHERE
        return found

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, *_: object) -> None:
        """An embedded store holds nothing for a hit: blobs may be evicted at any time, and are then misses."""

    def ticket(self, valid_s: float | None = None) -> bytes:
        seconds = VALID_S if valid_s is None else valid_s
        return write_ticket(self.schema, self.prompt, self.position, self.present, seconds)


class _Piece(NamedTuple):
    """A chunk of a shard that is to be stored, and its key."""

    shard: int
    chunk: int
    key: bytes


class Store(BaseStore[Hit]):
    """The KV of one model's chunks in a stack of tiers. Thread-safe."""

    def __init__(self, schema: Schema, tier_stack: TierStack) -> None:
        super().__init__(schema)
        self.tier_stack = tier_stack
        self._removals: RemovalLog | None = None

    # ---- reading

    def lookup(self, prompt: HashedPrompt, *, budget_s: float | None = None) -> Hit:
        return self._lookup(prompt, Budget.of(budget_s))

    def _lookup(self, prompt: HashedPrompt, budget: Budget) -> Hit:
        self._check(prompt)
        with self._latency["lookup"].timed():
            keys = prompt.keys(self.schema.ids)
            where = self.tier_stack.where(keys, budget)
            tiers = where.tiers.reshape(prompt.num_chunks, len(self.schema.shards)).T
            position = self._position(prompt, tiers != NOWHERE, prompt.num_tokens - 1)
        self._count(lookups=1, tokens_asked=prompt.num_tokens, tokens_found=position, unanswered=where.late)
        self._count_misses(prompt, position, where)
        hit = Hit(prompt, position, tiers, keys, self.schema)
        if position:
            self._touch(hit)
        return hit

    def _touch(self, hit: Hit) -> None:
        """Tell the tiers what a hit uses, earlier chunks as worth more."""
        for used, is_hit in uses(self.schema.groups, hit.present, np.stack(self._needed(hit), 1)):
            self.tier_stack.touch([*map(hit.keys.__getitem__, used.tolist())], is_hit=is_hit)

    def _lookup_all(
        self,
        prompts: Sequence[HashedPrompt],
        shards: Sequence[int] | None,  # noqa: ARG002 - nothing is leased
        budget: Budget,
        *,
        lease: bool,  # noqa: ARG002
    ) -> list[Hit]:
        return [self._lookup(prompt, budget) for prompt in prompts]

    def _redeemed(self, content: TicketContent) -> Hit:
        tiers = np.where(content.present, 0, NOWHERE).astype(np.int8)  # which tier it was may have changed
        return Hit(content.prompt, content.position, tiers, content.prompt.keys(self.schema.ids), self.schema)

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

    def _farthest(self, hit: Hit, shards: NDArray[np.int64], chunks: NDArray[np.int64]) -> str:
        farthest = int(hit.tiers[shards, chunks].max(initial=NOWHERE))
        return "" if farthest == NOWHERE else self.tier_stack.executors[farthest].tier.kind

    def prefetch(
        self, hit: Hit, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Operation[int]:
        """Load what a hit needs into the tiers with `promote`, in a thread of its own."""
        operation: Operation[int] = self._operations.new("load", None, budget_s)
        operation.expect(self._needs(hit.position, self._shard_numbers(shards), hit.present))

        def work() -> tuple[int, Sequence[ChunkRef]]:
            return self._load(hit, discard, 0, shards, operation.budget, operation.arrived), operation.missing

        return self._operations.start(operation, work)

    # ---- writing

    def _save(
        self,
        prompt: HashedPrompt,
        source: Source,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        gathered: Callable[[], None],
    ) -> SaveOutcome:
        keys, todo, is_known = self._lacking(prompt, pieces, budget)
        turns = [*batches(todo, lambda piece: self._sizes[piece.shard])] if is_known else []
        failed: list[ChunkRef] = [] if is_known else [*pieces]
        for number, batch in enumerate(turns, 1):
            blobs = self._sealed(batch, source)
            if number == len(turns):
                gathered()
            failed += self._put(batch, blobs, budget)
        self.tier_stack.touch(keys)
        return SaveOutcome(Saved(len(todo) - len(failed), len(keys) - len(todo), len(failed)), failed)

    def _gather(self, prompt: HashedPrompt, source: Source, pieces: Sequence[ChunkRef], budget: Budget) -> GatheredSave:
        keys, todo, is_known = self._lacking(prompt, pieces, budget)
        taken = next(batches(todo, lambda piece: self._sizes[piece.shard], GATHER_BYTES), []) if is_known else []
        return _GatheredBlobs(self, keys, todo, self._sealed(taken, source))

    def _lacking(
        self, prompt: HashedPrompt, pieces: Sequence[ChunkRef], budget: Budget
    ) -> tuple[list[bytes], list[_Piece], bool]:
        """The keys of all pieces, the pieces that some tier lacks, and whether any tier said so: if none did, all
        pieces are lacking, and writing them would be in vain."""
        every = prompt.keys(self.schema.ids)
        keys = [every[chunk * len(self.schema.shards) + shard] for shard, chunk in pieces]
        missing = self.tier_stack.missing(keys, budget)
        self._count(unanswered=int(missing is None))
        lacking = range(len(keys)) if missing is None else np.flatnonzero(missing).tolist()
        return keys, [_Piece(*pieces[i], keys[i]) for i in lacking], missing is not None

    def _sealed(self, batch: Sequence[_Piece], source: Source) -> list[Blob]:
        shards, found = self.schema.shards, dict[ChunkRef, Bytes]()
        if isinstance(source, Gather):  # a call takes longer than to copy a small payload
            for number, of_shard in groupby(sorted(batch), lambda piece: piece.shard):
                chunks = [piece.chunk for piece in of_shard]
                payloads = source.payloads(shards[number], chunks)
                found |= {(number, chunk): payload for chunk, payload in zip(chunks, payloads, strict=True)}
        else:
            for number, chunk, _ in batch:
                found[number, chunk] = owned_payload(flat_payload(shards[number], source(shards[number], chunk)))
        return [seal(shards[shard], chunk, key, found[shard, chunk]) for shard, chunk, key in batch]

    def _put(self, batch: Sequence[_Piece], blobs: Sequence[Blob], budget: Budget) -> list[ChunkRef]:
        """Those that were not kept."""
        kept = self.tier_stack.put([key for _, _, key in batch], blobs, budget)
        return [(shard, chunk) for (shard, chunk, _), is_kept in zip(batch, kept, strict=True) if not is_kept]

    # ---- the rest

    def _removed(self, after: int, budget: Budget) -> Removals:
        if self._removals is None:
            self._removals = RemovalLog()
            self.tier_stack.follow_removals(self._removals)
        found = self._removals.since(after)
        where = self.tier_stack.where(found.keys, budget)
        if where.late:
            return Removals(after, [], complete=True)
        gone = where.tiers == NOWHERE
        return found._replace(keys=[found.keys[i] for i in np.flatnonzero(gone).tolist()])

    def stats(self, *, budget_s: float | None = None) -> StoreStats:  # noqa: ARG002 - no other process is asked
        return self._stats(self.tier_stack.stats())

    def flush(self, wait_s: float = 60.0) -> bool:
        return self.tier_stack.flush(wait_s)

    def close(self, wait_s: float = 60.0) -> None:
        """Finish submitted operations and queued writes, and close every tier."""
        budget = Budget.of(wait_s)
        self._operations.close(wait_s)
        self.tier_stack.close(budget.within(wait_s))


class _GatheredBlobs(GatheredSave):
    """Blobs in memory of their own: of the pieces that the store lacks, the first ones."""

    def __init__(self, store: Store, keys: list[bytes], lacking: Sequence[_Piece], blobs: list[Blob]) -> None:
        self._store, self._keys, self._lacking, self._blobs = store, keys, lacking, blobs
        self.failed = tuple((shard, chunk) for shard, chunk, _ in lacking[len(blobs) :])

    def commit(self, *, budget_s: float | None = None) -> Saved:
        blobs, self._blobs = self._blobs, []
        budget, present = Budget.of(budget_s), len(self._keys) - len(self._lacking)
        pairs = [*batches(zip(self._lacking, blobs, strict=False), lambda pair: pair[1].num_bytes)]
        turns = [([piece for piece, _ in batch], [blob for _, blob in batch]) for batch in pairs]
        lost = [piece for turn in turns for piece in self._store._put(*turn, budget)]
        self.failed += tuple(lost)
        self._store.tier_stack.touch(self._keys)
        return Saved(len(blobs) - len(lost), present, len(self._lacking) - len(blobs) + len(lost))

    def abandon(self) -> None:
        self._blobs = []

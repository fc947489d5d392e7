"""What embedded and remote stores have in common: prompts, the joint hit, and loads that fall back to a shorter hit."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.prefix import Span, TokenIds, joint_hit
from kvweave.store.blob import blob_bytes
from kvweave.store.closeable import Closeable
from kvweave.store.keys import Bytes, HashedPrompt, Namespace, prompt
from kvweave.store.operations import ChunkRef, Operation
from kvweave.store.page_payloads import Gather, PagedSource, Sink, Source
from kvweave.store.results import GatheredSave, GroupLoad, Saved, StoreStats
from kvweave.store.shards import Schema
from kvweave.store.submitting import Found, SubmittingStore, whole_numbers
from kvweave.store.ticket import TicketContent, blank_ticket, read_ticket
from kvweave.store.tier_executor import TierExecutorStats
from kvweave.store.tier_stack import Budget

log = logging.getLogger("kvweave.store")
GATHER_BYTES = 256 << 20
"""Bytes that one save gathers, or one request reserves or fetches, at most: enough that a round trip is short beside
the copy."""

WARNING_S = 60.0
"""Seconds between two warnings of one kind."""


class BaseStore(SubmittingStore[Found], Closeable):
    """The KV of one model's chunks. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._sizes = [blob_bytes(shard) for shard in schema.shards]
        self._blob_bytes = np.array(self._sizes)
        self._counts = Counter[str]()
        self._warn_at = 0.0
        """When the next refused ticket may be logged."""

    def prompt(self, tokens: TokenIds, namespace: Namespace, spans: Sequence[Span] = ()) -> HashedPrompt:
        """Hash a prompt; use it for any number of calls. `HashedPrompt.extend` hashes appended tokens."""
        return prompt(tokens, namespace, self.schema.chunk_tokens, spans)

    # ---- reading

    @abstractmethod
    def lookup(self, prompt: HashedPrompt, *, budget_s: float | None = None) -> Found:
        """The longest prefix at which every group can resume, with at least one token left to compute. Loads
        nothing."""

    def load(
        self,
        hit: Found,
        sink: Sink,
        *,
        start: int = 0,
        shards: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> int:
        """Pass to `sink` what the groups need at the hit; returns the position that was reached.

        If blobs turn out to be lost, damaged or late, that is the longest position that the others allow; all that it
        needs was passed to `sink`. `shards` are the numbers of those that this rank reads (`PagePayloads.reads`).
        `start`: the caller can resume there already; chunks that end before it are not fetched, and the result is not
        smaller.
        """
        self._check_start(hit.prompt, start)
        return self._load(hit, sink, start, shards, Budget.of(budget_s), discard)

    def _load(
        self,
        hit: Found,
        sink: Sink,
        start: int,
        shards: Sequence[int] | None,
        budget: Budget,
        arrived: Callable[[ChunkRef], None],
    ) -> int:
        began, position = time.monotonic(), hit.position
        wanted = self._shard_numbers(shards)
        present, given = hit.present.copy(), set[ChunkRef]()
        present[:, : start // self.schema.chunk_tokens] = True
        order = {shard: at for at, shard in enumerate(wanted)}  # an engine names first what it runs first
        while position > start:
            pieces = [piece for piece in self._needs(position, wanted, present, start) if piece not in given]
            if shards is not None:
                pieces.sort(key=lambda piece: order.get(piece[0], 0))
            for piece, payload in self._fetch(hit, pieces, budget):
                sink(self.schema.shards[piece[0]], piece[1], payload)
                given.add(piece)
                arrived(piece)
                if budget.is_cancelled:
                    break
            lost = [piece for piece in pieces if piece not in given]
            if not lost:
                break
            for piece in lost:
                present[piece] = False
            position = start if budget.is_spent else self._position(hit.prompt, present, position)
        self._count(loads=1, shortened=position < hit.position)
        self._took("load", time.monotonic() - began, hit.prompt)
        return max(start, position)

    @abstractmethod
    def _fetch(self, hit: Found, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        """The payloads that could be read and verified, in any order."""

    def redeem(self, ticket: bytes) -> Found:
        """The hit that a ticket stands for (`hit.ticket()`), in any process whose store has the same schema. No tier or
        daemon is asked. A ticket that is damaged, of another schema, or too old is an empty hit.

        The hit holds no lease: the lease of the process that did the lookup stays until it is released. `load`
        takes leases of its own, and falls back to a shorter position if blobs are gone.
        """
        try:
            content = read_ticket(self.schema, ticket)
        except StoreError as error:
            self._count(refused_tickets=1)
            if time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + WARNING_S
                log.warning("a ticket is refused, and is a miss (one warning a minute at most): %s", error)
            content = blank_ticket(self.schema)
        return self._redeemed(content)

    @abstractmethod
    def _redeemed(self, content: TicketContent) -> Found: ...

    @abstractmethod
    def prefetch(
        self, hit: Found, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Operation[int]:
        """Load what a hit needs into the tiers with `promote`; the operation's result is the position that can then be
        loaded from them. It runs in a thread of its own, and `poll` does not report it."""

    def submit_pin(self, prompt: HashedPrompt) -> Operation[Any]:  # noqa: ARG002
        """Keep in memory what the longest hit of a prompt needs, until the operation's result is released; a thread of
        its own does it. Only a daemon can: otherwise `StoreError`."""
        raise StoreError(f"{type(self).__name__} cannot pin: blobs are kept in memory by a daemon (`kvweave serve`)")

    def shorten(self, hit: Found, limit: int, multiple_of: int = 1) -> Found:
        """The longest hit of at most `limit` tokens, at a multiple of so many, by what the lookup found: no tier is
        asked. For engines that can resume at some positions only. It holds what the longer one held."""
        if multiple_of < 1:
            raise StoreError(f"a hit cannot be at a multiple of {multiple_of}: 1 at least")
        if hit.position <= limit and not hit.position % multiple_of:
            return hit
        position = self._position(hit.prompt, hit.present, min(limit, hit.position), multiple_of)
        return replace(hit, position=position)  # type: ignore[type-var]

    def farthest_tier(self, hit: Found) -> str:
        """The kind of the farthest tier that a load of this hit reads, by what the lookup found; "" if it is empty."""
        return self._farthest(hit, *self._needed(hit))

    def load_sizes(self, hit: Found, start: int = 0) -> dict[str, GroupLoad]:
        """By tag, of groups of which a load of this hit from `start` on reads anything; as the lookup found it."""
        first, found = start // self.schema.chunk_tokens, dict[str, GroupLoad]()
        for group in self.schema.groups:
            pieces = group.needs(hit.position, hit.present)
            shards, chunks = (pieces[pieces[:, 1] >= first] if first else pieces).T
            if len(shards):
                num_bytes = int(self._blob_bytes[shards].sum())
                found[group.tag] = GroupLoad(self._farthest(hit, shards, chunks), num_bytes)
        return found

    @abstractmethod
    def _farthest(self, hit: Found, shards: NDArray[np.int64], chunks: NDArray[np.int64]) -> str:
        """The kind of the farthest tier of these pieces; "" if there are none."""

    def release(self, hit: Found, *, budget_s: float | None = None) -> None:
        """Release what a hit holds; calling it twice is fine."""

    def release_later(self, hit: Found) -> None:
        """As `release`, but along with the next request to a daemon: never waits."""

    # ---- writing

    def save(
        self,
        prompt: HashedPrompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        start: int = 0,
        budget_s: float | None = None,
    ) -> Saved:
        """Store what the groups need to resume at `points` (multiples of the chunk size; default: the end of the last
        chunk).

        `source` is asked only for payloads that the store lacks. `shards` are the numbers of those that this rank
        writes (`PagePayloads.writes`). `start`: chunks that end before it were saved already, and are skipped.
        """
        pieces = self._to_keep(prompt, source, points, shards, start)
        return self._timed_save(prompt, source, pieces, Budget.of(budget_s), discard).saved

    def gather(
        self,
        prompt: HashedPrompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        start: int = 0,
        budget_s: float | None = None,
    ) -> GatheredSave:
        """The first half of a save: copy the payloads that the store lacks, so that the source's memory may be reused.

        At most `GATHER_BYTES`, or what a daemon reserves for one connection, or its inbox holds; the rest is in
        `failed`. With a daemon, `commit` must be called within the lease.
        """
        return self._gather(prompt, source, self._to_keep(prompt, source, points, shards, start), Budget.of(budget_s))

    @abstractmethod
    def _gather(
        self, prompt: HashedPrompt, source: Source, pieces: Sequence[ChunkRef], budget: Budget
    ) -> GatheredSave: ...

    # ---- the rest

    @abstractmethod
    def stats(self, *, budget_s: float | None = None) -> StoreStats: ...

    @abstractmethod
    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for queued writes; returns whether all were tried in time."""

    @abstractmethod
    def close(self, wait_s: float = 60.0) -> None:
        """Finish submitted operations and queued writes, and free all resources."""

    # ---- what the formula says

    def _position(self, prompt: HashedPrompt, present: NDArray[np.bool_], limit: int, multiple_of: int = 1) -> int:
        size = self.schema.chunk_tokens
        groups = [group.presence(present) for group in self.schema.groups]
        return joint_hit(groups, math.lcm(size, multiple_of), min(limit, prompt.num_chunks * size))

    def _needs(
        self, position: int, shards: Sequence[int] | range, present: NDArray[np.bool_], start: int = 0
    ) -> Iterator[ChunkRef]:
        """What going on from `position` needs of `shards`; tails where they are `present`, and whole chunks are not.
        Chunks that end before `start` are left out."""
        pieces = self._pieces(position, shards, present, start)
        return zip(pieces[:, 0].tolist(), pieces[:, 1].tolist(), strict=True)

    def _pieces(
        self, position: int, shards: Sequence[int] | range, present: NDArray[np.bool_], start: int = 0
    ) -> NDArray[np.int64]:
        """As `_needs`, `[n, 2]`."""
        pieces = np.concatenate([group.needs(position, present) for group in self.schema.groups])
        if start:
            pieces = pieces[pieces[:, 1] >= start // self.schema.chunk_tokens]
        if len({*shards}) < len(self.schema.shards):
            pieces = pieces[np.isin(pieces[:, 0], [*shards])]
        return pieces

    def _needed(self, hit: Found) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of shards and of chunks that a hit needs, of all groups."""
        pieces = self._pieces(hit.position, self._shard_numbers(None), hit.present)
        return pieces[:, 0], pieces[:, 1]

    def _to_keep(
        self,
        prompt: HashedPrompt,
        source: Source,
        points: Sequence[int] | None,
        shards: Sequence[int] | None,
        start: int,
    ) -> list[ChunkRef]:
        """What resuming at `points` needs, chunk by chunk: earlier chunks are worth more. A tail where the source does
        not have the complete chunk."""
        self._check(prompt)
        self._check_start(prompt, start)
        size = self.schema.chunk_tokens
        ends = [prompt.num_chunks * size] if points is None else whole_numbers("points", points)
        outside = [point for point in ends if not 0 <= point <= prompt.num_tokens]
        if outside:
            raise StoreError(f"points {outside[:4]}: the prompt has {prompt.num_tokens} tokens")
        between = [point for point in ends if point % size]
        if between:
            raise StoreError(f"points {between[:4]}: chunks are of {size} tokens, and a point is a multiple of that")
        num_shards, wanted = len(self.schema.shards), self._shard_numbers(shards)

        # asked once, and not at all of our own: of a protocol it takes long
        paged = source if isinstance(source, Gather | PagedSource) else None

        def takes_tail(shard: int, chunk: int) -> bool:
            return paged is not None and not paged.holds(self.schema.shards[shard], chunk)

        found = [np.empty((0, 2), np.int64)]
        for group in self.schema.groups:
            # what is needed from the first token on is all needed by the last point: a prompt may have thousands
            needing = ends if group.reach.tail(max(ends, default=0)) else [max(ends, default=0)]
            for end in needing:
                found.append(group.pieces(end, takes_tail, first=start // size))
        pieces = np.concatenate(found)
        if len({*wanted}) < num_shards:
            pieces = pieces[np.isin(pieces[:, 0], [*wanted])]
        numbers = pieces[:, 1] * num_shards + pieces[:, 0]
        numbers = np.unique(numbers) if len(ends) > 1 else np.sort(numbers)  # points may need the same
        return [*zip((numbers % num_shards).tolist(), (numbers // num_shards).tolist(), strict=True)]

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _stats(self, tiers: tuple[TierExecutorStats, ...]) -> StoreStats:
        names = ("lookups", "tokens_asked", "tokens_found", "loads", "shortened", "unanswered", "refused_tickets")
        with self._lock:
            numbers = {name: self._counts[name] for name in names}
        latency = {kind: histogram.stats() for kind, histogram in self._latency.items()}
        return StoreStats(**numbers, tiers=tiers, latency=latency, operations=len(self._operations.completions))


def discard(*_: object) -> None:
    """A sink that drops what it is given: for payloads that only pass through the tiers, or are in place already. Also
    the callback of callers that wait for the end."""

"""What embedded and remote stores have in common: prompts, the joint hit, and loads that fall back to a shorter hit.

These calls return when they are done; `base_store` adds those that never wait.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.prefix import Span, TokenIds
from kvweave.store.blob import blob_bytes
from kvweave.store.closeable import Closeable
from kvweave.store.forking import register_after_fork
from kvweave.store.histogram import Histogram
from kvweave.store.keys import Bytes, HashedPrompt, Namespace, prompt
from kvweave.store.operations import ChunkRef, Operation, OperationQueue
from kvweave.store.page_payloads import Sink, Source
from kvweave.store.prompt_pieces import PromptPieces
from kvweave.store.results import BaseHit, GatheredSave, GroupLoad, Saved, SaveOutcome, StoreStats
from kvweave.store.shards import Schema
from kvweave.store.ticket import TicketContent, blank_ticket, read_ticket
from kvweave.store.tier_executor import TierExecutorStats
from kvweave.store.tier_stack import Budget

Found = TypeVar("Found", bound=BaseHit)
log = logging.getLogger("kvweave.store")
LATENCIES = ("lookup", "load", "save")
GATHER_BYTES = 256 << 20
"""Bytes that one save gathers, or one request reserves or fetches, at most: enough that a round trip is short beside
the copy."""

WARNING_S = 60.0
"""Seconds between two warnings of one kind."""


class BlockingStore(PromptPieces, Closeable, Generic[Found]):
    """Lookups, loads and saves that return when they are done. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._operations = OperationQueue()
        self._latency = {kind: Histogram() for kind in LATENCIES}
        self._lock = threading.Lock()
        self._sizes = [blob_bytes(shard) for shard in schema.shards]
        self._blob_bytes = np.array(self._sizes)
        self._counts = Counter[str]()
        self._warn_at = 0.0
        """When the next refused ticket may be logged."""
        register_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock does not exist."""
        self._lock = threading.Lock()
        self._operations.after_fork()

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

    def _timed_save(
        self,
        prompt: HashedPrompt,
        source: Source,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        gathered: Callable[[], None],
    ) -> SaveOutcome:
        began = time.monotonic()
        outcome = self._save(prompt, source, pieces, budget, gathered)
        self._took("save", time.monotonic() - began, prompt)
        return outcome

    def _took(self, kind: str, seconds: float, prompt: HashedPrompt) -> None:  # noqa: ARG002 - reported to a daemon
        """Record how long a load or a save took."""
        self._latency[kind].observe(seconds)

    @abstractmethod
    def _save(
        self,
        prompt: HashedPrompt,
        source: Source,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        gathered: Callable[[], None],
    ) -> SaveOutcome:
        """Calls `gathered` when everything is copied out of the source, if that is before the end."""

    # ---- the rest

    @abstractmethod
    def stats(self, *, budget_s: float | None = None) -> StoreStats: ...

    @abstractmethod
    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for queued writes; returns whether all were tried in time."""

    @abstractmethod
    def close(self, wait_s: float = 60.0) -> None:
        """Finish submitted operations and queued writes, and free all resources."""

    def _needed(self, hit: Found) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of shards and of chunks that a hit needs, of all groups."""
        pieces = self._pieces(hit.position, self._shard_numbers(None), hit.present)
        return pieces[:, 0], pieces[:, 1]

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

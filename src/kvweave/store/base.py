"""What every store has in common, embedded or behind a daemon: prompts, the joint hit, and loads that shorten."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.prefix import Present, Span, TokenIds, joint_hit
from kvweave.store.blob import blob_bytes
from kvweave.store.closing import ClosedAtEnd
from kvweave.store.keys import Bytes, HashedPrompt, Namespace, prompt
from kvweave.store.operations import ChunkRef, Operation
from kvweave.store.page_payloads import Sink, Source
from kvweave.store.results import GatheredSave, Saved, StoreStats
from kvweave.store.shards import Schema
from kvweave.store.submitting import Found, SubmittingStore
from kvweave.store.ticket import TicketContent, blank_ticket, read_ticket
from kvweave.store.tier_executor import TierExecutorStats
from kvweave.store.tier_stack import Budget

log = logging.getLogger("kvweave.store")
GATHER_BYTES = 256 << 20
"""What one save gathers at most: so much that asking takes no time beside copying."""


class AnyStore(SubmittingStore[Found], ClosedAtEnd):
    """KV of one model's chunks, wherever it is kept. May be used by many threads."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._sizes = [blob_bytes(shard) for shard in schema.shards]
        self._counts = Counter[str]()

    def prompt(self, tokens: TokenIds, namespace: Namespace, spans: Sequence[Span] = ()) -> HashedPrompt:
        """Hash a prompt once, for any number of calls; `HashedPrompt.extend` hashes what it grew by."""
        return prompt(tokens, namespace, self.schema.chunk_tokens, spans)

    # ---- reading

    @abstractmethod
    def lookup(self, prompt: HashedPrompt, *, budget_s: float | None = None) -> Found:
        """The longest prefix from which every group can go on, at least one token being left. Loads nothing."""

    def load(
        self,
        hit: Found,
        sink: Sink,
        *,
        start: int = 0,
        shards: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> int:
        """Give `sink` what the groups need at the hit, and return the position that was reached.

        Less than the hit's where something turned out lost, damaged or late: then the longest that the rest allows, for
        which everything was given. `start`: the caller can go on from there already, so chunks that end before it are
        not fetched, and the position is not less. `shards` are those that this rank reads (`PagePayloads.reads`).
        """
        return self._load(hit, sink, start, shards, Budget.of(budget_s), no_matter)

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
        present, given = hit.present.copy(), np.zeros(hit.present.shape, bool)
        present[:, : start // self.schema.chunk_tokens] = True
        while position > start:
            pieces = [piece for piece in self._needs(position, wanted, start) if not given[piece]]
            for piece, payload in self._fetch(hit, pieces, budget):
                sink(self.schema.shards[piece[0]], piece[1], payload)
                given[piece] = True
                arrived(piece)
                if budget.is_cancelled:
                    break
            lost = [piece for piece in pieces if not given[piece]]
            if not lost:
                break
            for piece in lost:
                present[piece] = False
            position = start if budget.is_spent else self._position(hit.prompt, present, position - 1)
        self._count(loads=1, shortened=position < hit.position)
        self._took("load", time.monotonic() - began, hit.prompt)
        return max(start, position)

    @abstractmethod
    def _fetch(self, hit: Found, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        """Those payloads that could be had whole, in any order."""

    def redeem(self, ticket: bytes) -> Found:
        """The hit that a ticket stands for (`hit.ticket()`), in any process whose store has the same schema; nobody is
        asked. One that is damaged, of another schema, or too old is a hit of nothing.

        It holds no lease: what the process that looked it up holds stays until that one releases it, and `load` takes
        its own for what it reads, and shortens if something is gone.
        """
        try:
            content = read_ticket(self.schema, ticket)
        except StoreError as error:
            log.warning("a ticket is refused, and is a miss: %s", error)
            self._count(refused_tickets=1)
            content = blank_ticket(self.schema)
        return self._redeemed(content)

    @abstractmethod
    def _redeemed(self, content: TicketContent) -> Found: ...

    @abstractmethod
    def prefetch(
        self, hit: Found, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Operation[int]:
        """Bring what a hit needs into the tiers that take what others give; the position that then is near. In a thread
        of its own; `poll` does not report it."""

    def release(self, hit: Found, *, budget_s: float | None = None) -> None:
        """Let go what a hit holds; may be called twice."""

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
        """Keep what the groups need to go on from `points` (positions on the grid; default: the last chunk's end).

        `source` is asked only for payloads that the store lacks. `shards` are the numbers of those that this rank
        writes (`PagePayloads.writes`). `start`: chunks that end before it were saved already, and are not asked about.
        """
        pieces = self._to_keep(prompt, points, shards, start)
        return self._timed_save(prompt, source, pieces, Budget.of(budget_s), no_matter).saved

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
        """The first half of a save: copy the payloads that the store lacks, so that their memory may be used again.

        At most so much as `GATHER_BYTES`, or as a daemon reserves for one connection; the rest is in `failed`. What a
        daemon reserved must be committed within its lease.
        """
        return self._gather(prompt, source, self._to_keep(prompt, points, shards, start), Budget.of(budget_s))

    @abstractmethod
    def _gather(
        self, prompt: HashedPrompt, source: Source, pieces: Sequence[ChunkRef], budget: Budget
    ) -> GatheredSave: ...

    # ---- the rest

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for writes that are queued."""

    @abstractmethod
    def close(self, wait_s: float = 60.0) -> None:
        """Do what was submitted, write what is queued, and give back everything."""

    # ---- what the formula says

    def _position(self, prompt: HashedPrompt, present: NDArray[np.bool_], limit: int) -> int:
        size = self.schema.chunk_tokens
        groups = [Present(reach, size, np.logical_and.reduce(present[shards])) for reach, shards in self.schema.groups]
        return joint_hit(groups, size, min(limit, prompt.num_chunks * size))

    def _needs(self, position: int, shards: Sequence[int] | range, start: int = 0) -> Iterator[ChunkRef]:
        """What going on from `position` needs, less the chunks that end before `start`."""
        first, all_shards = start // self.schema.chunk_tokens, self.schema.shards
        return ((shard, chunk) for shard in shards for chunk in all_shards[shard].needs(position) if chunk >= first)

    def _to_keep(
        self, prompt: HashedPrompt, points: Sequence[int] | None, shards: Sequence[int] | None, start: int
    ) -> list[ChunkRef]:
        """What going on from `points` needs, chunk by chunk: the first ones are worth most."""
        size = self.schema.chunk_tokens
        ends = [prompt.num_chunks * size] if points is None else [point // size * size for point in points]
        wanted = self._shard_numbers(shards)
        found = {(chunk, shard) for end in ends for shard, chunk in self._needs(end, wanted, start)}
        return [(shard, chunk) for chunk, shard in sorted(found)]

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _stats(self, tiers: tuple[TierExecutorStats, ...]) -> StoreStats:
        names = ("lookups", "tokens_asked", "tokens_found", "loads", "shortened", "unanswered", "refused_tickets")
        with self._lock:
            numbers = {name: self._counts[name] for name in names}
        latency = {kind: histogram.stats() for kind, histogram in self._latency.items()}
        return StoreStats(**numbers, tiers=tiers, latency=latency, operations=len(self._operations.completions))


def no_matter(*_: object) -> None:
    """Whoever waits for the end need not know how far it is."""

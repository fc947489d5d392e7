"""What embedded and remote stores have in common: prompts, the joint hit, and loads that fall back to a shorter hit."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvweave.prefix import Span, joint_hit
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes, HashedPrompt, Namespace, prompt
from kvweave.store.page_payloads import PagedSource, Sink, Source
from kvweave.store.shards import Schema, Shard
from kvweave.store.tier_executor import TierExecutorStats
from kvweave.store.tier_stack import Budget

ChunkRef = tuple[int, int]
"""The number of a shard in the schema, and of a chunk."""


def discard(shard: Shard, chunk: int, payload: Bytes) -> None:
    """A sink that drops what it is given: for payloads that only pass through the tiers, or are in place already."""


class AnyHit(Protocol):
    """The tokens before `position` can be loaded; 0: nothing was found."""

    @property
    def prompt(self) -> HashedPrompt: ...

    @property
    def position(self) -> int: ...

    @property
    def present(self) -> NDArray[np.bool_]:
        """`[shards, chunks]`"""
        ...


Found = TypeVar("Found", bound=AnyHit)


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save: blobs that were stored (or queued), that were present already, and that were dropped."""

    stored: int = 0
    present: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Requests and tokens since the store was opened, and the statistics of every tier."""

    lookups: int
    tokens_asked: int
    tokens_found: int
    loads: int
    shortened: int
    """Loads that ended before the position of their hit, because a blob was lost, damaged or late."""
    unanswered: int
    """Requests that the store, or one of its tiers, did not answer in time: what was not found may be stored all the
    same."""
    tiers: tuple[TierExecutorStats, ...]


T = TypeVar("T")


def in_thread(name: str, work: Callable[..., T], *args: object) -> Future[T]:
    """Run in a thread of its own. The future is already running, so that `cancel()` returns False."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # re-raised by `result()`
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class AnyStore(ABC, Generic[Found]):
    """The KV of one model's chunks. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._sizes = [blob_bytes(shard) for shard in schema.shards]
        self._counts, self._lock = Counter[str](), threading.Lock()

    def prompt(self, tokens: object, namespace: Namespace, spans: Sequence[Span] = ()) -> HashedPrompt:
        """Hash a prompt; the result can be used for any number of calls."""
        return prompt(tokens, namespace, self.schema.chunk_tokens, spans)

    @abstractmethod
    def lookup(self, prompt: HashedPrompt, *, budget_s: float | None = None) -> Found:
        """The longest prefix at which every group can resume, with at least one token left to compute. Loads
        nothing."""

    def load(
        self, hit: Found, sink: Sink, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> int:
        """Pass to `sink` what the groups need at the hit; returns the position that was reached.

        If blobs turn out to be lost, damaged or late, that is the longest position that the others allow; all that it
        needs was passed to `sink`. `shards` are the numbers of those that this rank reads (`PagePayloads.reads`).
        """
        budget, position = Budget.of(budget_s), hit.position
        wanted = range(len(self.schema.shards)) if shards is None else shards
        present, given = hit.present.copy(), np.zeros(hit.present.shape, bool)
        while position:
            pieces = [piece for piece in self._needs(position, wanted, present) if not given[piece]]
            for piece, payload in self._fetch(hit, pieces, budget):
                sink(self.schema.shards[piece[0]], piece[1], payload)
                given[piece] = True
            lost = [piece for piece in pieces if not given[piece]]
            if not lost:
                break
            for piece in lost:
                present[piece] = False
            position = 0 if budget.is_spent else self._position(hit.prompt, present, position)
        self._count(loads=1, shortened=position < hit.position)
        return position

    @abstractmethod
    def _fetch(self, hit: Found, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        """The payloads that could be read and verified, in any order."""

    @abstractmethod
    def prefetch(
        self, hit: Found, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Future[int]:
        """Load what a hit needs into the tiers with `promote`; the future's result is the position that can then be
        loaded from them."""

    @abstractmethod
    def save(
        self,
        prompt: HashedPrompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> Saved:
        """Store what the groups need to resume at `points` (multiples of the chunk size; default: the end of the last
        chunk).

        `source` is asked only for payloads that the store lacks. `shards` are the numbers of those that this rank
        writes (`PagePayloads.writes`).
        """

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for queued writes; returns whether all were tried in time."""

    @abstractmethod
    def close(self, wait_s: float = 60.0) -> None:
        """Finish queued writes, and free all resources."""

    # ---- what the formula says

    def _position(self, prompt: HashedPrompt, present: NDArray[np.bool_], limit: int) -> int:
        size = self.schema.chunk_tokens
        groups = [group.presence(present) for group in self.schema.groups]
        return joint_hit(groups, size, min(limit, prompt.num_chunks * size))

    def _needs(self, position: int, shards: Sequence[int] | range, present: NDArray[np.bool_]) -> Iterator[ChunkRef]:
        """What going on from `position` needs of `shards`; tails where they are `present`, and whole chunks are not."""
        wanted = frozenset(shards)
        pieces = (piece for group in self.schema.groups for piece in group.needs(position, present).tolist())
        return ((shard, chunk) for shard, chunk in pieces if shard in wanted)

    def _to_keep(
        self, prompt: HashedPrompt, source: Source, points: Sequence[int] | None, shards: Sequence[int] | None
    ) -> list[ChunkRef]:
        """What resuming at `points` needs, chunk by chunk: earlier chunks are worth more. A tail where the source does
        not have the complete chunk."""
        size = self.schema.chunk_tokens
        ends = [prompt.num_chunks * size] if points is None else [point // size * size for point in points]
        wanted = frozenset(range(len(self.schema.shards)) if shards is None else shards)

        def takes_tail(shard: int, chunk: int) -> bool:
            return isinstance(source, PagedSource) and not source.holds(self.schema.shards[shard], chunk)

        needs = (group.pieces(end, takes_tail).tolist() for end in ends for group in self.schema.groups)
        found = {(chunk, shard) for pieces in needs for shard, chunk in pieces if shard in wanted}
        return [(shard, chunk) for chunk, shard in sorted(found)]

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _stats(self, tiers: tuple[TierExecutorStats, ...]) -> StoreStats:
        names = ("lookups", "tokens_asked", "tokens_found", "loads", "shortened", "unanswered")
        with self._lock:
            numbers = {name: self._counts[name] for name in names}
        return StoreStats(**numbers, tiers=tiers)

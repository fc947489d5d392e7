"""What every store has in common, embedded or behind a daemon: prompts, the joint hit, and loads that shorten."""

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

from kvweave.prefix import Present, Span, TokenIds, joint_hit
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes, HashedPrompt, Namespace, prompt
from kvweave.store.page_payloads import Sink, Source
from kvweave.store.shards import Schema
from kvweave.store.tier_executor import TierExecutorStats
from kvweave.store.tier_stack import Budget

ChunkRef = tuple[int, int]
"""A row's number in the schema, and a chunk's."""


class AnyHit(Protocol):
    """From `position` on there is work to do; what lies before can be loaded. 0: nothing was found."""

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
    """What became of a save: blobs that are stored (or queued), that were there already, and that had no place."""

    stored: int = 0
    present: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Requests and tokens since the store was opened, and every tier's own."""

    lookups: int
    tokens_asked: int
    tokens_found: int
    loads: int
    shortened: int
    """Loads that ended before their hit: something was lost, damaged or late in between."""
    unanswered: int
    """Questions that were not answered in time, in whole or by some tier: what they did not find may be there."""
    tiers: tuple[TierExecutorStats, ...]


T = TypeVar("T")


def in_thread(name: str, work: Callable[..., T], *args: object) -> Future[T]:
    """Run in a thread of its own. It has begun, so that `cancel()` is False, and means it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # it belongs to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class AnyStore(ABC, Generic[Found]):
    """KV of one model's chunks, wherever it is kept. May be used by many threads."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._sizes = [blob_bytes(shard) for shard in schema.shards]
        self._counts, self._lock = Counter[str](), threading.Lock()

    def prompt(self, tokens: TokenIds, namespace: Namespace, spans: Sequence[Span] = ()) -> HashedPrompt:
        """Hash a prompt once, for any number of calls."""
        return prompt(tokens, namespace, self.schema.chunk_tokens, spans)

    @abstractmethod
    def lookup(self, prompt: HashedPrompt, *, budget_s: float | None = None) -> Found:
        """The longest prefix from which every group can go on, at least one token being left. Loads nothing."""

    def load(
        self, hit: Found, sink: Sink, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> int:
        """Give `sink` what the groups need at the hit, and return the position that was reached.

        Less than the hit's where something turned out lost, damaged or late: then the longest that the rest allows, for
        which everything was given. `shards` are those that this rank reads (`PagePayloads.reads`).
        """
        budget, position = Budget.of(budget_s), hit.position
        wanted = range(len(self.schema.shards)) if shards is None else shards
        present, given = hit.present.copy(), np.zeros(hit.present.shape, bool)
        while position:
            pieces = [piece for piece in self._needs(position, wanted) if not given[piece]]
            for piece, payload in self._fetch(hit, pieces, budget):
                sink(self.schema.shards[piece[0]], piece[1], payload)
                given[piece] = True
            lost = [piece for piece in pieces if not given[piece]]
            if not lost:
                break
            for piece in lost:
                present[piece] = False
            position = 0 if budget.is_spent else self._position(hit.prompt, present, position - 1)
        self._count(loads=1, shortened=position < hit.position)
        return position

    @abstractmethod
    def _fetch(self, hit: Found, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        """Those payloads that could be had whole, in any order."""

    @abstractmethod
    def prefetch(
        self, hit: Found, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Future[int]:
        """Bring what a hit needs into the tiers that take what others give; the position that then is near."""

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
        """Keep what the groups need to go on from `points` (positions on the grid; default: the last chunk's end).

        `source` is asked only for payloads that the store lacks. `shards` are the numbers of those that this rank
        writes (`PagePayloads.writes`).
        """

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for writes that are queued."""

    @abstractmethod
    def close(self, wait_s: float = 60.0) -> None:
        """Write what is queued, and give back everything."""

    # ---- what the formula says

    def _position(self, prompt: HashedPrompt, present: NDArray[np.bool_], limit: int) -> int:
        size = self.schema.chunk_tokens
        groups = [Present(reach, size, np.logical_and.reduce(present[shards])) for reach, shards in self.schema.groups]
        return joint_hit(groups, size, min(limit, prompt.num_chunks * size))

    def _needs(self, position: int, shards: Sequence[int] | range) -> Iterator[ChunkRef]:
        return ((shard, chunk) for shard in shards for chunk in self.schema.shards[shard].needs(position))

    def _to_keep(
        self, prompt: HashedPrompt, points: Sequence[int] | None, shards: Sequence[int] | None
    ) -> list[ChunkRef]:
        """What going on from `points` needs, chunk by chunk: the first ones are worth most."""
        size = self.schema.chunk_tokens
        ends = [prompt.num_chunks * size] if points is None else [point // size * size for point in points]
        wanted = range(len(self.schema.shards)) if shards is None else shards
        found = {(chunk, shard) for end in ends for shard, chunk in self._needs(end, wanted)}
        return [(shard, chunk) for chunk, shard in sorted(found)]

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _stats(self, tiers: tuple[TierExecutorStats, ...]) -> StoreStats:
        names = ("lookups", "tokens_asked", "tokens_found", "loads", "shortened", "unanswered")
        with self._lock:
            numbers = {name: self._counts[name] for name in names}
        return StoreStats(**numbers, tiers=tiers)

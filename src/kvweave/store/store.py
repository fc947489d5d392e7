"""The store: keys, blobs and a cascade, as one. What is a hit the joint formula decides, over what the tiers hold."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvweave.prefix import Present, Span, joint_hit
from kvweave.store.blob import Check, blob_bytes, header_bytes, seal
from kvweave.store.cascade import BATCH_BYTES, NOWHERE, Budget, Cascade, Want
from kvweave.store.keys import Namespace, Prompt, prompt
from kvweave.store.lane import LaneStats
from kvweave.store.pages import Sink, Source
from kvweave.store.rows import Row, Schema


@dataclass(frozen=True)
class Hit:
    """From `position` on there is work to do; what lies before can be loaded. 0: nothing was found."""

    prompt: Prompt
    position: int
    tiers: NDArray[np.int8]
    """`[rows, chunks]`: the nearest tier of each, -1 for none."""
    keys: list[bytes]
    """Chunk by chunk, row by row."""


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
    tiers: tuple[LaneStats, ...]


class Store:
    """KV of one model's chunks in a cascade of tiers. May be used by many threads."""

    def __init__(self, schema: Schema, cascade: Cascade) -> None:
        self.schema, self.cascade = schema, cascade
        self._sizes = [blob_bytes(row) for row in schema.rows]
        self._counts, self._lock = Counter[str](), threading.Lock()

    def prompt(self, tokens: object, namespace: Namespace, spans: Sequence[Span] = ()) -> Prompt:
        """Hash a prompt once, for any number of calls."""
        return prompt(tokens, namespace, self.schema.chunk_tokens, spans)

    # ---- reading

    def lookup(self, prompt: Prompt, *, budget_s: float | None = None) -> Hit:
        """The longest prefix from which every group can go on, at least one token being left. Loads nothing."""
        keys = prompt.keys(self.schema.ids)
        tiers = self.cascade.where(keys, Budget.of(budget_s)).reshape(prompt.num_chunks, len(self.schema.rows)).T
        position = self._position(prompt, tiers != NOWHERE, prompt.num_tokens - 1)
        self._count(lookups=1, tokens_asked=prompt.num_tokens, tokens_found=position)
        return Hit(prompt, position, tiers, keys)

    def _position(self, prompt: Prompt, present: NDArray[np.bool_], limit: int) -> int:
        size = self.schema.chunk_tokens
        groups = [Present(reach, size, np.logical_and.reduce(present[rows])) for reach, rows in self.schema.groups]
        return joint_hit(groups, size, min(limit, prompt.num_chunks * size))

    def load(self, hit: Hit, sink: Sink, *, rows: Sequence[int] | None = None, budget_s: float | None = None) -> int:
        """Give `sink` what the groups need at the hit, and return the position that was reached.

        Less than the hit's where something turned out lost, damaged or late: then the longest that the rest allows, for
        which everything was given. `rows` are those that this rank reads (`Pages.reads`).
        """
        budget, position = Budget.of(budget_s), hit.position
        wanted = range(len(self.schema.rows)) if rows is None else rows
        present, given = hit.tiers != NOWHERE, np.zeros(hit.tiers.shape, bool)
        while position:
            pieces = [piece for piece in self._needs(position, wanted) if not given[piece]]
            for piece, payload in self._fetch(hit, pieces, budget):
                sink(self.schema.rows[piece[0]], piece[1], payload)
                given[piece] = True
            lost = [piece for piece in pieces if not given[piece]]
            if not lost:
                break
            for piece in lost:
                present[piece] = False
            position = 0 if budget.is_spent else self._position(hit.prompt, present, position - 1)
        self._count(loads=1, shortened=position < hit.position)
        return position

    def _needs(self, position: int, rows: Sequence[int] | range) -> Iterator[tuple[int, int]]:
        return ((row, chunk) for row in rows for chunk in self.schema.rows[row].needs(position))

    def _fetch(
        self, hit: Hit, pieces: Sequence[tuple[int, int]], budget: Budget
    ) -> Iterator[tuple[tuple[int, int], NDArray[np.uint8]]]:
        wants = [self._want(hit, *piece) for piece in pieces]
        for number, blob in self.cascade.fetch(wants, budget):
            piece = pieces[number]
            yield piece, blob[header_bytes(self.schema.rows[piece[0]]) :]

    def _want(self, hit: Hit, number: int, chunk: int) -> Want:
        row, key = self.schema.rows[number], hit.keys[chunk * len(self.schema.rows) + number]
        tier = max(0, int(hit.tiers[number, chunk]))
        return Want(key, self._sizes[number], tier, partial(Check, row, chunk, key))

    def prefetch(self, hit: Hit, *, rows: Sequence[int] | None = None, budget_s: float | None = None) -> Future[int]:
        """Bring what a hit needs into the tiers that take what others give, in a thread of its own."""
        future: Future[int] = Future()

        def work() -> None:
            future.set_result(self.load(hit, _ignore, rows=rows, budget_s=budget_s))

        threading.Thread(target=work, name="kvweave-prefetch", daemon=True).start()
        return future

    # ---- writing

    def save(
        self,
        prompt: Prompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> Saved:
        """Keep what the groups need to go on from `points` (positions on the grid; default: the last chunk's end).

        Only what is not there yet is asked of `source`. `rows` are those that this rank writes (`Pages.writes`).
        """
        budget, size = Budget.of(budget_s), self.schema.chunk_tokens
        ends = [prompt.num_chunks * size] if points is None else [point // size * size for point in points]
        wanted = range(len(self.schema.rows)) if rows is None else rows
        pieces = sorted({(chunk, row) for end in ends for row, chunk in self._needs(end, wanted)})
        every = prompt.keys(self.schema.ids)
        keys = [every[chunk * len(self.schema.rows) + row] for chunk, row in pieces]
        lacking = self.cascade.missing(keys, budget)
        todo = [(*pieces[i], keys[i]) for i in np.flatnonzero(lacking).tolist()]
        kept = sum(self._put(batch, source, budget) for batch in self._batches(todo))
        self.cascade.touch(keys)
        return Saved(kept, len(keys) - len(todo), len(todo) - kept)

    def _put(self, batch: Sequence[tuple[int, int, bytes]], source: Source, budget: Budget) -> int:
        rows = self.schema.rows
        blobs = [seal(rows[row], chunk, key, source(rows[row], chunk)) for chunk, row, key in batch]
        return int(self.cascade.put([key for _, _, key in batch], blobs, budget).sum())

    def _batches(self, todo: Sequence[tuple[int, int, bytes]]) -> Iterator[list[tuple[int, int, bytes]]]:
        ends = np.cumsum([self._sizes[row] for _, row, _ in todo]) // BATCH_BYTES
        for number in np.unique(ends):
            yield [todo[i] for i in np.flatnonzero(ends == number).tolist()]

    # ---- the rest

    def stats(self) -> StoreStats:
        names = ("lookups", "tokens_asked", "tokens_found", "loads", "shortened")
        with self._lock:
            numbers = {name: self._counts[name] for name in names}
        return StoreStats(**numbers, tiers=self.cascade.stats())

    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait for writes that are queued."""
        return self.cascade.flush(wait_s)

    def close(self, wait_s: float = 60.0) -> None:
        """Write what is queued, and close every tier."""
        self.cascade.close(wait_s)

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)


def _ignore(row: Row, chunk: int, payload: NDArray[np.uint8]) -> None:
    """A sink for what shall only pass through the tiers."""

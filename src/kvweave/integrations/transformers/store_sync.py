"""Keeping: prefixes come from a store, and are left to it, so that they survive the process and are shared.

    open      what memory lacks of a prompt and the store has is loaded
    capture   a row has come to the end of a chunk: what windows and states hold there, they will soon have left
    save      what the store lacks of the points that were captured; rows of full attention are in the pages still

A store that is slow, broken or full costs a request its deadline at most, and never an answer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvweave.cache import Cache, Sequence
from kvweave.errors import NeverFits, OutOfPages, StoreError
from kvweave.integrations.transformers.host_staging import HostStaging
from kvweave.integrations.transformers.identity import Identity
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.integrations.transformers.request_record import StoreUsage
from kvweave.pool import NULL, Ids
from kvweave.prefix import Spacing
from kvweave.store import AnyStore, HashedPrompt, Namespace, Schema, Shard, Source
from kvweave.store.keys import Bytes
from kvweave.tensor import Arena, carry_out

log = logging.getLogger(__name__)

TRIES = 3
"""How often a prompt is loaded that turned out damaged, each time a shorter one."""
WORTH = 8
"""A load brings all that a position needs, also what is here: for less than a share of 1 in so many it is not made."""
WAITING_BYTES = 256 << 20
"""What is captured and not saved yet, before it is saved in the midst of a prompt."""
REMEMBERED = 1 << 16
"""Points of which we know that the store has them."""

Captured = dict[tuple[str, bytes], torch.Tensor]
"""Pages of chunks on the host, by group and by the digest of all tokens up to the chunk's end."""


class StoreSync:
    """A store, beside the core and the arena of one model. Used by one thread at a time."""

    def __init__(
        self,
        store: AnyStore[Any],
        core: Cache,
        arena: Arena,
        identity: Identity,
        *,
        wait_s: float,
        close: Callable[[], None],
    ) -> None:
        self.store, self.core, self.arena, self.identity, self.wait_s = store, core, arena, identity, wait_s
        self.chunk = store.schema.chunk_tokens
        self.staging = HostStaging(arena, store.schema)
        self.rows_of = Counter(shard.tag for shard in store.schema.shards)
        self.trailing = [shard for shard in _by_tag(store.schema) if shard.reach.span is not None]
        apart, widens = core.spacing.tokens, core.spacing.widens
        self.spacing = Spacing(-(-apart // self.chunk) * self.chunk, widens)
        self.counts: Counter[str] = Counter()
        self.load_seconds = self.save_seconds = 0.0
        self._close = close
        self._saved: OrderedDict[bytes, None] = OrderedDict()

    def store_batch(self) -> StoreBatch:
        self.identity.look()
        return StoreBatch(self)

    def namespace(self, prompt: Prompt) -> Namespace:
        return self.identity.namespace(prompt)

    def hashed(self, sequence: Sequence) -> HashedPrompt:
        """The tokens that a sequence has committed, as the store sees them."""
        assert isinstance(sequence.namespace, Namespace), "a sequence that no visit opened"
        return self.store.prompt(sequence.tokens[: sequence.committed], sequence.namespace)

    def pages(self, sequence: Sequence, shard: Shard, chunk: int) -> Ids:
        """The pages of a chunk of a sequence, in order; the live one of a state."""
        table: Ids = self.core.table(shard.tag)[sequence.row]
        count = self.chunk // self.core.plan.group(shard.tag).block_tokens
        return table[chunk * count : (chunk + 1) * count] if shard.reach.per_token else table[:1]

    # ---- what is worth it

    def is_worth_loading(self, sequence: Sequence, position: int) -> bool:
        """Whether loading up to a position spares enough."""
        return position - sequence.length >= max(1, sequence.length // WORTH)

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether all that a sequence says it has is there."""
        return sequence.committed == sequence.length

    def spaced(self, start: int, last: int) -> Iterator[int]:
        """The ends of chunks after `start` and before `last` where points are welcome."""
        point = self.spacing.after(start)
        while point < last:
            yield point
            point = self.spacing.after(point)

    # ---- points that the store has, as far as we know

    def is_saved(self, point: bytes) -> bool:
        return point in self._saved

    def remember(self, point: bytes) -> None:
        self._saved[point] = None
        if len(self._saved) > REMEMBERED:
            self._saved.popitem(last=False)

    def forget(self, points: Iterable[bytes]) -> None:
        for point in points:
            self._saved.pop(point, None)

    # ---- trouble, time, and the end

    @contextmanager
    def tolerating_failures(self) -> Iterator[None]:
        """A store that fails is counted, and nothing more."""
        try:
            yield
        except StoreError as error:
            self.counts["late" if isinstance(error, SaveTimeout) else "failed"] += 1
            log.warning("the store failed: %s", error)

    def usage(self) -> StoreUsage:
        return StoreUsage(**self.counts, load_seconds=self.load_seconds, save_seconds=self.save_seconds)

    def close(self) -> None:
        self.staging.close()
        self._close()


class StoreBatch:
    """One batch of prompts: what it got from the store, what it has for it, and how long it waited for that."""

    def __init__(self, store_sync: StoreSync) -> None:
        self.store_sync = store_sync
        self.num_loaded = 0
        self.load_seconds = self.save_seconds = 0.0
        self._captured: dict[bytes, Captured] = {}
        self._answers: deque[bytes] = deque()

    # ---- loading

    def open(self, prompt: Prompt) -> tuple[Sequence, list[int]]:
        """A sequence with the longest prefix that memory or the store has, and the points at which to capture it."""
        store_sync, core, namespace = self.store_sync, self.store_sync.core, self.store_sync.namespace(prompt)
        hashed = store_sync.store.prompt(prompt.tokens, namespace)
        branch = 0
        for tries_left in reversed(range(TRIES)):
            sequence = core.open(prompt.tokens, namespace=namespace)
            branch = max(branch, sequence.branch)
            try:
                if tries_left:
                    branch = max(branch, self._ask(sequence, hashed))
            except BaseException:
                core.close(sequence, keep=False)
                raise
            if store_sync.is_complete(sequence):
                break
            core.close(sequence, keep=False)
        self.num_loaded += sequence.length - sequence.num_cached
        return sequence, self._wanted(sequence, hashed, branch)

    def _ask(self, sequence: Sequence, hashed: HashedPrompt) -> int:
        """Load what the store has, if that is worth it; returns how far the store knows the prompt's tokens."""
        store_sync, chunk, left_s = self.store_sync, self.store_sync.chunk, self.store_sync.wait_s - self.load_seconds
        if left_s <= 0 or not store_sync.is_worth_loading(sequence, (hashed.num_tokens - 1) // chunk * chunk):
            return 0
        with store_sync.tolerating_failures(), self._loading():
            until = time.monotonic() + left_s
            hit = store_sync.store.lookup(hashed, budget_s=left_s)
            store_sync.counts["lookups"] += 1
            points = [point.tobytes() for point in hashed.prefixes]
            store_sync.forget(points[hit.position // chunk :])
            if hit.position:
                store_sync.remember(points[hit.position // chunk - 1])
            self._load(sequence, hit, until)
            known = np.flatnonzero(hit.present.any(axis=0))
            return chunk * (int(known[-1]) + 1) if len(known) else 0
        return 0

    @contextmanager
    def _loading(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.load_seconds += (spent := time.perf_counter() - start)
            self.store_sync.load_seconds += spent

    def _load(self, sequence: Sequence, hit: Any, until: float) -> None:
        """All of the hit, committed; or the sequence is not true, and to be closed; or it is as it was."""
        store_sync, start = self.store_sync, sequence.length
        try:
            if not store_sync.is_worth_loading(sequence, hit.position):
                return _release_hit(store_sync.store, hit)
            store_sync.core.load_to(sequence, hit.position)
        except (OutOfPages, NeverFits):
            store_sync.counts["no_room"] += 1
            return _release_hit(store_sync.store, hit)
        take = PageLoader(store_sync, sequence).take
        if store_sync.store.load(hit, take, budget_s=max(0.0, until - time.monotonic())) < hit.position:
            store_sync.counts["shortened"] += 1
            return None
        store_sync.counts["loads"] += 1
        store_sync.counts["loaded_tokens"] += hit.position - start
        return carry_out(store_sync.arena, store_sync.core.commit(sequence))

    # ---- capturing

    def _wanted(self, sequence: Sequence, hashed: HashedPrompt, branch: int) -> list[int]:
        """Where to capture what windows and states hold: the prompt's last chunk, where it leaves a path that was
        taken before, and as far apart as points are kept in memory; but for what the store has."""
        store_sync, chunk, start = self.store_sync, self.store_sync.chunk, sequence.length
        last = (hashed.num_tokens - 1) // chunk * chunk
        points = {last, branch // chunk * chunk, *store_sync.spaced(start, last)} if store_sync.trailing else ()
        new = (point for point in points if start < point <= last)
        return sorted(point for point in new if not store_sync.is_saved(hashed.prefixes[point // chunk - 1].tobytes()))

    def capture(self, sequence: Sequence) -> bytes | None:
        """Copy to the host what windows and states of a sequence hold at its length, which is the end of a chunk.

        None if the store has it, as far as we know, or if some of a chunk is gone (NULL): one that is not whole would
        pass for whole. Chunks that several points need are copied once.
        """
        store_sync = self.store_sync
        hashed = store_sync.hashed(sequence)
        point: bytes = hashed.prefixes[-1].tobytes()
        if store_sync.is_saved(point) or point in self._captured:
            return None
        known = {key: copied for each in self._captured.values() for key, copied in each.items()}
        captured: Captured = {}
        for shard in store_sync.trailing:
            for chunk in shard.needs(sequence.length):
                key, pages = (shard.tag, hashed.prefixes[chunk].tobytes()), store_sync.pages(sequence, shard, chunk)
                if key not in known:
                    if not pages.all():
                        return None
                    store_sync.staging.hold(shard.tag, pages)
                    known[key] = store_sync.staging.copy(shard.tag)
                captured[key] = known[key]
        self._captured[point] = captured
        if sum(copied.nbytes for copied in known.values()) > WAITING_BYTES:
            self.save([sequence])
        return point

    def due(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """Those that stand at the end of a chunk, and will soon have left what they hold there."""
        return (
            [each for each in sequences if each.length % self.store_sync.chunk == 0] if self.store_sync.trailing else []
        )

    def capture_answers(self, due: SequenceOf[Sequence], num_rows: int) -> None:
        """Rows came to the end of a chunk while they generate: the last one of each is kept."""
        self._answers.extend(point for sequence in due if (point := self.capture(sequence)))
        while len(self._answers) > num_rows:
            self._captured.pop(self._answers.popleft(), None)

    # ---- saving

    def save(self, sequences: Iterable[Sequence]) -> None:
        """Give the store what it lacks of all that was computed, or found in memory, so far."""
        for sequence in sequences:
            start = time.perf_counter()
            with self.store_sync.tolerating_failures():
                self._save(sequence)
            self.save_seconds += (spent := time.perf_counter() - start)
            self.store_sync.save_seconds += spent

    def _save(self, sequence: Sequence) -> None:
        store_sync, chunk, left_s = (
            self.store_sync,
            self.store_sync.chunk,
            max(0.0, self.store_sync.wait_s - self.save_seconds),
        )
        hashed = store_sync.hashed(sequence)
        ends = [point.tobytes() for point in hashed.prefixes]
        mine = [end for end in ends if end in self._captured] if store_sync.trailing else ends[-1:]
        new = [end for end in mine if not store_sync.is_saved(end)]
        if not new:
            return
        points = [chunk * (ends.index(end) + 1) for end in new]
        source = self._source(sequence, ends, time.monotonic() + left_s)
        saved = store_sync.store.save(hashed, source, points=points, budget_s=left_s)
        store_sync.counts.update(saves=1, stored=saved.stored, dropped=saved.dropped)
        for end in new:
            self._captured.pop(end, None)
            if not saved.dropped:
                store_sync.remember(end)

    def _source(self, sequence: Sequence, ends: list[bytes], until: float) -> Source:
        """Payloads of captured pages, and of the sequence's own where the reach is all that was ever said."""
        staging, held = self.store_sync.staging, ("", -1)
        captured = {key: pages for each in self._captured.values() for key, pages in each.items()}

        def payload(shard: Shard, chunk: int) -> Bytes:
            nonlocal held
            if time.monotonic() > until:
                raise SaveTimeout(f"what is to be saved could not be copied within {self.store_sync.wait_s} s")
            if held != (shard.tag, chunk):
                pages = captured.get((shard.tag, ends[chunk]))
                if pages is not None:
                    staging.put(shard.tag, pages)
                else:
                    staging.hold(shard.tag, self.store_sync.pages(sequence, shard, chunk))
                held = shard.tag, chunk
            return staging.payload(shard)

        return payload


class PageLoader:
    """Takes what is loaded for a sequence, and fills those of its pages that nobody else has."""

    def __init__(self, store_sync: StoreSync, sequence: Sequence) -> None:
        self._store_sync, self._sequence = store_sync, sequence
        self._waiting: dict[tuple[str, int], torch.Tensor] = {}
        self._shards: Counter[tuple[str, int]] = Counter()

    def take(self, shard: Shard, chunk: int, payload: Bytes) -> None:
        """A group's rows come one by one; when all of a chunk are there, its pages are filled."""
        staging, key = self._store_sync.staging, (shard.tag, chunk)
        if key in self._waiting:
            staging.put(shard.tag, self._waiting.pop(key))
        staging.take(shard, payload)
        self._shards[key] += 1
        if self._shards[key] < self._store_sync.rows_of[shard.tag]:
            self._waiting[key] = staging.copy(shard.tag)
        else:
            staging.give(shard.tag, self._own(shard, chunk))

    def _own(self, shard: Shard, chunk: int) -> Ids:
        """The pages of a chunk; NULL for those that were found in memory: they are everybody's."""
        pages = self._store_sync.pages(self._sequence, shard, chunk).copy()
        if shard.reach.per_token:
            first = chunk * self._store_sync.chunk
            starts = first + np.arange(len(pages)) * (self._store_sync.chunk // len(pages))
            pages[starts < self._sequence.num_cached] = NULL
        return pages


class SaveTimeout(StoreError):
    """There was no more time to copy what is to be saved."""


def _by_tag(schema: Schema) -> Iterator[Shard]:
    """One row a group: what is asked of it the others would answer too."""
    return (schema.shards[group.first] for group in schema.groups)


def _release_hit(store: AnyStore[Any], hit: Any) -> None:
    """A daemon holds what a hit needs until it is loaded: this one will not be."""
    release = getattr(store, "release", None)
    if release:
        release(hit)

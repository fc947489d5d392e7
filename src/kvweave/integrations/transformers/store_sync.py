"""Synchronisation with a store: prefixes are loaded from it and saved to it, so that they outlive the process and are
shared.

    open      load what the store has of a prompt and memory lacks
    capture   at the end of a chunk, copy windows and states, before the next step changes them
    save      give the store what it lacks of the captured points; full attention is read from the pages then

A store that is slow, broken or full delays a request by its deadline at most, and never fails it.
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

from kvweave.cache import Cache, Sequence
from kvweave.errors import NeverFits, OutOfPages, StoreError
from kvweave.integrations.transformers.arena_payloads import ArenaPayloads
from kvweave.integrations.transformers.identity import Identity
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.integrations.transformers.request_record import StoreUsage
from kvweave.prefix import Spacing
from kvweave.store import BaseStore, HashedPrompt, Namespace, Shard, Source
from kvweave.store.keys import Bytes
from kvweave.tensor import Arena, carry_out

log = logging.getLogger(__name__)

TRIES = 3
"""How often a load is tried for one prompt; after damage, the next try has a shorter hit."""
WORTH = 8
"""A load transfers all that a position needs, also what is in memory. It must save at least 1 token in this many of
those in memory."""
WAITING_BYTES = 256 << 20
"""Captured bytes beyond which they are saved before the prompt is finished."""
REMEMBERED = 1 << 16
"""Number of points known to be in the store."""

Captured = dict[tuple[bytes, bytes], Bytes]
"""Payloads of chunks, by shard and by the digest of all tokens up to the chunk's end."""


class StoreSync:
    """A store, connected to the core and the arena of one model. Used by one thread at a time."""

    def __init__(
        self,
        store: BaseStore[Any],
        core: Cache,
        arena: Arena,
        identity: Identity,
        *,
        wait_s: float,
        close: Callable[[], None],
    ) -> None:
        self.store, self.core, self.arena, self.identity, self.wait_s = store, core, arena, identity, wait_s
        self.chunk = store.schema.chunk_tokens
        self.payloads = ArenaPayloads(core, arena, store.schema)
        self.trailing = [shard for shard in store.schema.shards if shard.reach.span is not None]
        self.has_evicted = False
        """Whether all tiers of the store had to evict something: then points on the way are far apart, as in full
        memory. Full memory is no reason: a store with room serves first siblings, after a restart too."""
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
        """The committed tokens of a sequence, hashed."""
        assert isinstance(sequence.namespace, Namespace), "a sequence that no batch opened"
        return self.store.prompt(sequence.tokens[: sequence.committed], sequence.namespace)

    # ---- what is worth it

    def is_worth_loading(self, sequence: Sequence, position: int) -> bool:
        """Whether loading up to a position saves enough tokens."""
        return position - sequence.length >= max(1, sequence.length // WORTH)

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether a sequence has no pages that were allocated and not filled."""
        return sequence.committed == sequence.length

    def spaced(self, start: int, last: int) -> list[int]:
        """The ends of chunks between `start` and `last` at which resume points are kept, by the spacing of the core."""
        spacing = self.core.sparse_spacing if self.has_evicted else self.core.spacing
        return Spacing(-(-spacing.tokens // self.chunk) * self.chunk, spacing.widens).between(start, last)

    def look_for_evictions(self, budget_s: float) -> None:
        """Ask the store whether it had to evict something, until it had. Tiers on other servers do not tell."""
        if self.trailing and not self.has_evicted:
            tiers = self.store.stats(budget_s=budget_s).tiers
            self.has_evicted = bool(tiers) and all(each.tier.evicted for each in tiers)

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
        """Count and log errors of the store, and go on."""
        try:
            yield
        except StoreError as error:
            self.counts["late" if isinstance(error, SaveTimeout) else "failed"] += 1
            log.warning("the store failed: %s", error)

    def usage(self) -> StoreUsage:
        return StoreUsage(self.chunk, **self.counts, load_seconds=self.load_seconds, save_seconds=self.save_seconds)

    def close(self) -> None:
        del self.payloads  # and its references to the arena's memory
        self._close()


class StoreBatch:
    """One batch of prompts: what is loaded for it, what is captured of it for the store, and the time spent waiting."""

    def __init__(self, store_sync: StoreSync) -> None:
        self.store_sync = store_sync
        self.num_loaded = 0
        self.load_seconds = self.save_seconds = 0.0
        self._captured: dict[bytes, Captured] = {}
        self._answers: deque[bytes] = deque()

    # ---- loading

    def open(self, prompt: Prompt) -> tuple[Sequence, list[int]]:
        """Open a sequence with the longest prefix in memory or in the store; returns it with the lengths at which to
        capture."""
        store_sync, core, namespace = self.store_sync, self.store_sync.core, self.store_sync.namespace(prompt)
        hashed = store_sync.store.prompt(prompt.tokens, namespace)
        branch = 0
        for tries_left in reversed(range(TRIES)):
            sequence = core.open(prompt.tokens, namespace=namespace, branches=prompt.branches)
            branch = max(branch, sequence.branch)
            try:
                if tries_left:  # the last try asks no store, so its sequence is complete
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
        """Load from the store if that is worth it; returns up to which length the store has chunks of the prompt."""
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
        """Load and commit the whole hit, or return without a change. If a load stops early, `is_complete` is False
        for the sequence, which must then be closed."""
        store_sync, start = self.store_sync, sequence.length
        try:
            if not store_sync.is_worth_loading(sequence, hit.position):
                return store_sync.store.release(hit)
            store_sync.core.load_to(sequence, hit.position)
        except (OutOfPages, NeverFits):
            store_sync.counts["no_room"] += 1
            return store_sync.store.release(hit)
        sink, left_s = store_sync.payloads.sink(sequence), max(0.0, until - time.monotonic())
        if store_sync.store.load(hit, sink, budget_s=left_s) < hit.position:
            store_sync.counts["shortened"] += 1
            return None
        store_sync.counts["loads"] += 1
        store_sync.counts["loaded_tokens"] += hit.position - start
        return carry_out(store_sync.arena, store_sync.core.commit(sequence))

    # ---- capturing

    def _wanted(self, sequence: Sequence, hashed: HashedPrompt, branch: int) -> list[int]:
        """The lengths at which to capture windows and states: the prompt's last chunk, the branch from an earlier
        prompt, and points at the spacing of the core; except those that the store has."""
        store_sync, chunk, start = self.store_sync, self.store_sync.chunk, sequence.length
        last = (hashed.num_tokens - 1) // chunk * chunk
        points = {last, branch // chunk * chunk, *store_sync.spaced(start, last)} if store_sync.trailing else ()
        new = (point for point in points if start < point <= last)
        return sorted(point for point in new if not store_sync.is_saved(hashed.prefixes[point // chunk - 1].tobytes()))

    def capture(self, sequence: Sequence) -> bytes | None:
        """Copy the windows and states of a sequence, at its length, which is the end of a chunk.

        Returns None if the store has this point already, or if pages of a chunk are gone (NULL): an incomplete chunk
        would be taken for complete. Chunks that several points need are copied once.
        """
        store_sync = self.store_sync
        hashed = store_sync.hashed(sequence)
        point: bytes = hashed.prefixes[-1].tobytes()
        if store_sync.is_saved(point) or point in self._captured:
            return None
        known = {key: copied for each in self._captured.values() for key, copied in each.items()}
        captured, source = Captured(), store_sync.payloads.source(sequence)
        for shard in store_sync.trailing:
            for chunk in shard.needs(sequence.length):
                key = shard.id, hashed.prefixes[chunk].tobytes()
                if key not in known:
                    if not source.holds(shard, chunk):
                        return None
                    known[key] = source(shard, chunk)
                captured[key] = known[key]
        self._captured[point] = captured
        if sum(copied.nbytes for copied in known.values()) > WAITING_BYTES:
            self.save([sequence])
        return point

    def due(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """The sequences at the end of a chunk, whose windows and states must be captured before the next step."""
        return (
            [each for each in sequences if each.length % self.store_sync.chunk == 0] if self.store_sync.trailing else []
        )

    def capture_answers(self, due: SequenceOf[Sequence], num_rows: int) -> None:
        """Capture rows that reached the end of a chunk while generating; of each row only the last such point is
        kept."""
        self._answers.extend(point for sequence in due if (point := self.capture(sequence)))
        while len(self._answers) > num_rows:
            self._captured.pop(self._answers.popleft(), None)

    # ---- saving

    def save(self, sequences: Iterable[Sequence]) -> None:
        """Save what the store lacks of what was computed, or found in memory, so far."""
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
        until = time.monotonic() + left_s
        source = self._source(sequence, ends, until)
        saved = store_sync.store.save(hashed, source, points=points, budget_s=left_s)
        store_sync.counts.update(saves=1, stored=saved.stored, dropped=saved.dropped)
        store_sync.look_for_evictions(max(0.0, until - time.monotonic()))
        for end in new:
            self._captured.pop(end, None)
            if not saved.dropped:
                store_sync.remember(end)

    def _source(self, sequence: Sequence, ends: list[bytes], until: float) -> Source:
        """A source of captured payloads; those of full attention come from the sequence's own pages."""
        pages = self.store_sync.payloads.source(sequence)
        captured = {key: copied for each in self._captured.values() for key, copied in each.items()}

        def payload(shard: Shard, chunk: int) -> Bytes:
            if time.monotonic() > until:
                raise SaveTimeout(f"what is to be saved could not be copied within {self.store_sync.wait_s} s")
            copied = captured.get((shard.id, ends[chunk]))
            return pages(shard, chunk) if copied is None else copied

        return payload


class SaveTimeout(StoreError):
    """The time for copying what is to be saved is over."""

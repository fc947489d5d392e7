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
from kvweave.integrations.transformers.identity import Identity
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.integrations.transformers.record import StoreUse
from kvweave.integrations.transformers.stage import Stage
from kvweave.pool import NULL, Ids
from kvweave.prefix import Spacing
from kvweave.store import AnyStore, Namespace, Row, Schema, Source
from kvweave.store import Prompt as Hashed
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


class Keeper:
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
        self.stage = Stage(arena, store.schema)
        self.rows_of = Counter(row.tag for row in store.schema.rows)
        self.trailing = [row for row in _by_tag(store.schema) if row.reach.span is not None]
        apart, widens = core.spacing.tokens, core.spacing.widens
        self.spacing = Spacing(-(-apart // self.chunk) * self.chunk, widens)
        self.counts: Counter[str] = Counter()
        self.load_seconds = self.save_seconds = 0.0
        self._close = close
        self._saved: OrderedDict[bytes, None] = OrderedDict()

    def visit(self) -> Visit:
        self.identity.look()
        return Visit(self)

    def namespace(self, prompt: Prompt) -> Namespace:
        return self.identity.namespace(prompt)

    def hashed(self, sequence: Sequence) -> Hashed:
        """The tokens that a sequence has committed, as the store sees them."""
        assert isinstance(sequence.namespace, Namespace), "a sequence that no visit opened"
        return self.store.prompt(sequence.tokens[: sequence.committed], sequence.namespace)

    def pages(self, sequence: Sequence, row: Row, chunk: int) -> Ids:
        """The pages of a chunk of a sequence, in order; the live one of a state."""
        table: Ids = self.core.table(row.tag)[sequence.row]
        count = self.chunk // self.core.plan.group(row.tag).block_tokens
        return table[chunk * count : (chunk + 1) * count] if row.reach.per_token else table[:1]

    # ---- what is worth it

    def is_worth(self, sequence: Sequence, position: int) -> bool:
        """Whether loading up to a position spares enough."""
        return position - sequence.length >= max(1, sequence.length // WORTH)

    def is_true(self, sequence: Sequence) -> bool:
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
    def or_not(self) -> Iterator[None]:
        """A store that fails is counted, and nothing more."""
        try:
            yield
        except StoreError as error:
            self.counts["late" if isinstance(error, Late) else "failed"] += 1
            log.warning("the store failed: %s", error)

    def use(self) -> StoreUse:
        return StoreUse(**self.counts, load_seconds=self.load_seconds, save_seconds=self.save_seconds)

    def close(self) -> None:
        self.stage.close()
        self._close()


class Visit:
    """One batch of prompts: what it got from the store, what it has for it, and how long it waited for that."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.num_loaded = 0
        self.load_seconds = self.save_seconds = 0.0
        self._captured: dict[bytes, Captured] = {}
        self._answers: deque[bytes] = deque()

    # ---- loading

    def open(self, prompt: Prompt) -> tuple[Sequence, list[int]]:
        """A sequence with the longest prefix that memory or the store has, and the points at which to capture it."""
        keeper, core, namespace = self.keeper, self.keeper.core, self.keeper.namespace(prompt)
        hashed = keeper.store.prompt(prompt.tokens, namespace)
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
            if keeper.is_true(sequence):
                break
            core.close(sequence, keep=False)
        self.num_loaded += sequence.length - sequence.num_cached
        return sequence, self._wanted(sequence, hashed, branch)

    def _ask(self, sequence: Sequence, hashed: Hashed) -> int:
        """Load what the store has, if that is worth it; returns how far the store knows the prompt's tokens."""
        keeper, chunk, left_s = self.keeper, self.keeper.chunk, self.keeper.wait_s - self.load_seconds
        if left_s <= 0 or not keeper.is_worth(sequence, (hashed.num_tokens - 1) // chunk * chunk):
            return 0
        with keeper.or_not(), self._loading():
            until = time.monotonic() + left_s
            hit = keeper.store.lookup(hashed, budget_s=left_s)
            keeper.counts["lookups"] += 1
            points = [point.tobytes() for point in hashed.prefixes]
            keeper.forget(points[hit.position // chunk :])
            if hit.position:
                keeper.remember(points[hit.position // chunk - 1])
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
            self.keeper.load_seconds += spent

    def _load(self, sequence: Sequence, hit: Any, until: float) -> None:
        """All of the hit, committed; or the sequence is not true, and to be closed; or it is as it was."""
        keeper, start = self.keeper, sequence.length
        try:
            if not keeper.is_worth(sequence, hit.position):
                return _let_go(keeper.store, hit)
            keeper.core.load_to(sequence, hit.position)
        except (OutOfPages, NeverFits):
            keeper.counts["no_room"] += 1
            return _let_go(keeper.store, hit)
        take = Arrival(keeper, sequence).take
        if keeper.store.load(hit, take, budget_s=max(0.0, until - time.monotonic())) < hit.position:
            keeper.counts["shortened"] += 1
            return None
        keeper.counts["loads"] += 1
        keeper.counts["loaded_tokens"] += hit.position - start
        return carry_out(keeper.arena, keeper.core.commit(sequence))

    # ---- capturing

    def _wanted(self, sequence: Sequence, hashed: Hashed, branch: int) -> list[int]:
        """Where to capture what windows and states hold: the prompt's last chunk, where it leaves a path that was
        taken before, and as far apart as points are kept in memory; but for what the store has."""
        keeper, chunk, start = self.keeper, self.keeper.chunk, sequence.length
        last = (hashed.num_tokens - 1) // chunk * chunk
        points = {last, branch // chunk * chunk, *keeper.spaced(start, last)} if keeper.trailing else ()
        new = (point for point in points if start < point <= last)
        return sorted(point for point in new if not keeper.is_saved(hashed.prefixes[point // chunk - 1].tobytes()))

    def capture(self, sequence: Sequence) -> bytes | None:
        """Copy to the host what windows and states of a sequence hold at its length, which is the end of a chunk.

        None if the store has it, as far as we know, or if some of a chunk is gone (NULL): one that is not whole would
        pass for whole. Chunks that several points need are copied once.
        """
        keeper = self.keeper
        hashed = keeper.hashed(sequence)
        point: bytes = hashed.prefixes[-1].tobytes()
        if keeper.is_saved(point) or point in self._captured:
            return None
        known = {key: copied for each in self._captured.values() for key, copied in each.items()}
        captured: Captured = {}
        for row in keeper.trailing:
            for chunk in row.needs(sequence.length):
                key, pages = (row.tag, hashed.prefixes[chunk].tobytes()), keeper.pages(sequence, row, chunk)
                if key not in known:
                    if not pages.all():
                        return None
                    keeper.stage.hold(row.tag, pages)
                    known[key] = keeper.stage.copy(row.tag)
                captured[key] = known[key]
        self._captured[point] = captured
        if sum(copied.nbytes for copied in known.values()) > WAITING_BYTES:
            self.save([sequence])
        return point

    def due(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """Those that stand at the end of a chunk, and will soon have left what they hold there."""
        return [each for each in sequences if each.length % self.keeper.chunk == 0] if self.keeper.trailing else []

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
            with self.keeper.or_not():
                self._save(sequence)
            self.save_seconds += (spent := time.perf_counter() - start)
            self.keeper.save_seconds += spent

    def _save(self, sequence: Sequence) -> None:
        keeper, chunk, left_s = self.keeper, self.keeper.chunk, max(0.0, self.keeper.wait_s - self.save_seconds)
        hashed = keeper.hashed(sequence)
        ends = [point.tobytes() for point in hashed.prefixes]
        mine = [end for end in ends if end in self._captured] if keeper.trailing else ends[-1:]
        new = [end for end in mine if not keeper.is_saved(end)]
        if not new:
            return
        points = [chunk * (ends.index(end) + 1) for end in new]
        source = self._source(sequence, ends, time.monotonic() + left_s)
        saved = keeper.store.save(hashed, source, points=points, budget_s=left_s)
        keeper.counts.update(saves=1, stored=saved.stored, dropped=saved.dropped)
        for end in new:
            self._captured.pop(end, None)
            if not saved.dropped:
                keeper.remember(end)

    def _source(self, sequence: Sequence, ends: list[bytes], until: float) -> Source:
        """Payloads of captured pages, and of the sequence's own where the reach is all that was ever said."""
        stage, held = self.keeper.stage, ("", -1)
        captured = {key: pages for each in self._captured.values() for key, pages in each.items()}

        def payload(row: Row, chunk: int) -> Bytes:
            nonlocal held
            if time.monotonic() > until:
                raise Late(f"what is to be saved could not be copied within {self.keeper.wait_s} s")
            if held != (row.tag, chunk):
                pages = captured.get((row.tag, ends[chunk]))
                if pages is not None:
                    stage.put(row.tag, pages)
                else:
                    stage.hold(row.tag, self.keeper.pages(sequence, row, chunk))
                held = row.tag, chunk
            return stage.payload(row)

        return payload


class Arrival:
    """Takes what is loaded for a sequence, and fills those of its pages that nobody else has."""

    def __init__(self, keeper: Keeper, sequence: Sequence) -> None:
        self._keeper, self._sequence = keeper, sequence
        self._waiting: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: Counter[tuple[str, int]] = Counter()

    def take(self, row: Row, chunk: int, payload: Bytes) -> None:
        """A group's rows come one by one; when all of a chunk are there, its pages are filled."""
        stage, key = self._keeper.stage, (row.tag, chunk)
        if key in self._waiting:
            stage.put(row.tag, self._waiting.pop(key))
        stage.take(row, payload)
        self._rows[key] += 1
        if self._rows[key] < self._keeper.rows_of[row.tag]:
            self._waiting[key] = stage.copy(row.tag)
        else:
            stage.give(row.tag, self._own(row, chunk))

    def _own(self, row: Row, chunk: int) -> Ids:
        """The pages of a chunk; NULL for those that were found in memory: they are everybody's."""
        pages = self._keeper.pages(self._sequence, row, chunk).copy()
        if row.reach.per_token:
            first = chunk * self._keeper.chunk
            starts = first + np.arange(len(pages)) * (self._keeper.chunk // len(pages))
            pages[starts < self._sequence.num_cached] = NULL
        return pages


class Late(StoreError):
    """There was no more time to copy what is to be saved."""


def _by_tag(schema: Schema) -> Iterator[Row]:
    """One row a group: what is asked of it the others would answer too."""
    return (row for _, rows in schema.groups for row in schema.rows[rows.start : rows.start + 1])


def _let_go(store: AnyStore[Any], hit: Any) -> None:
    """A daemon holds what a hit needs until it is loaded: this one will not be."""
    release = getattr(store, "release", None)
    if release:
        release(hit)

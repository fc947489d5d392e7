"""Saving to a daemon: reserve places in the arena, write, commit; in batches, as far as room and time allow. While one
batch is copied, the next one gets its places, and the one before it becomes visible.

A GPU begins to copy before the daemon is asked: with each reservation a connection gets some of the arena in advance,
for the first pieces of its next save.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from kvweave.errors import LeaseExpired, OverLimit, ServerError
from kvweave.server import protocol
from kvweave.server.arena_copier import ArenaCopier, Begun, begin_gather
from kvweave.server.arena_writer import ArenaBlob
from kvweave.server.client import Advance, Client, nothing
from kvweave.server.prompt_session import PromptSession, daemon_budget, key_of, reply_timeout
from kvweave.server.protocol import ADVANCE_MARGIN_S, ADVANCE_PARTS, ADVANCE_S, MOST_PIECES, NO_ROOM, numbers, packed
from kvweave.server.shared_arena import starts_in_a_row
from kvweave.store import GatheredSave, HashedPrompt, Saved, Schema, Shard, Source
from kvweave.store.base_store import GATHER_BYTES
from kvweave.store.batches import batches
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes
from kvweave.store.operations import ChunkRef
from kvweave.store.page_payloads import StagedGather, StagedScatter
from kvweave.store.results import SaveOutcome
from kvweave.store.tier_stack import Budget

BATCH_BYTES = 1 << 30
"""What one request is for, at most: between two fetches nothing is copied, for as long as 50 MiB take."""
FIRST_BYTES, NEXT_BYTES = 76 << 20, 152 << 20
"""What the first request of a save is for, so that copies begin soon; and the next one, which is made while the first
are copied. Each later one is for twice as much as the one before, and is made while that is copied. A little more than
two calls of a GPU's copier take, and than four do: the first is copied before a reply comes."""
ADVANCE_BYTES = 112 << 20
"""Of an advance: as much as a GPU copies in 2 ms, until a reply has come and the next call is made."""
BATCHES_IN_FLIGHT = 4
"""Batches that a connection's share has room for."""
FIRST_CALL_BYTES, LAST_BYTES = 18 << 20, 20 << 20
"""From a GPU: what its first call copies, so that it begins soon, and the last batch of a save, so that it is soon
visible."""


class ArenaLayout:
    """The blobs of a schema in a daemon's arena."""

    def __init__(self, schema: Schema) -> None:
        self._shards, self._sizes = schema.shards, [blob_bytes(shard) for shard in schema.shards]
        self._rounded = [starts_in_a_row([size])[-1] for size in self._sizes]
        self._payload_bytes = np.array([shard.payload_bytes for shard in schema.shards])

    def shard(self, piece: ChunkRef) -> Shard:
        return self._shards[piece[0]]

    def job(self, arena: Bytes, prompt: HashedPrompt, number: int, chunk: int, start: int) -> ArenaBlob:
        shard = self._shards[number]
        return ArenaBlob(arena[start : start + self._sizes[number]], shard, chunk, key_of(prompt, shard, chunk))

    def in_a_row(
        self, memory: Bytes, prompt: HashedPrompt, pieces: Sequence[ChunkRef], start: int, most_bytes: float = inf
    ) -> list[ArenaBlob]:
        """The blobs of these pieces in an inbox, or in an advance, one after the other, as far as there is room."""
        starts = starts_in_a_row([self._sizes[number] for number, _ in pieces])
        ends = takewhile(lambda end: end <= most_bytes, starts[1:])
        return [
            self.job(memory, prompt, *piece, start + at) for piece, at, _ in zip(pieces, starts, ends, strict=False)
        ]

    def num_bytes(self, pieces: Sequence[ChunkRef]) -> int:
        """What the blobs of these pieces take in an inbox."""
        return sum(self._rounded[number] for number, _ in pieces)

    def batches(
        self,
        client: Client,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        *,
        most_bytes: int = BATCH_BYTES,
        through_inbox: bool = False,
    ) -> Iterator[list[ChunkRef]]:
        """Pieces for one request each, as far as they fit into the inbox, if there is one; a larger one is alone."""
        with suppress(ServerError):  # the request that follows fails the same way
            client.refresh(reply_timeout(budget))
        inbox_bytes = client.welcome.inbox_bytes if through_inbox else 0
        most = min(most_bytes, client.welcome.reserve_bytes, inbox_bytes or most_bytes)
        least = -(-most // MOST_PIECES)  # so that a batch has at most MOST_PIECES
        return batches(pieces, lambda piece: max(least, self._rounded[piece[0]]), most)

    def side_by_side(self, pieces: Collection[ChunkRef], copied: object) -> list[ChunkRef]:
        """For a staged source or sink, pieces in such an order that what it copies in one call, of one shard, follows
        each other, and earlier chunks come before later ones otherwise; as they are for others."""
        listed = [*pieces]
        if not isinstance(copied, StagedGather | StagedScatter):
            return listed
        shards, chunks = np.array(listed, np.int64).reshape(-1, 2).T
        calls = chunks * self._payload_bytes[shards] // copied.together_bytes
        return [listed[i] for i in np.lexsort((chunks, shards, calls)).tolist()]

    def allowed(self, client: Client, pieces: Sequence[ChunkRef], budget: Budget) -> AbstractContextManager[None]:
        """A context in which these pieces are fetched over the connection, within its limit."""
        welcome = client.welcome
        return client.fetching.holding(self.num_bytes(pieces), welcome.reserve_bytes, welcome.lease_s, budget)


class BatchSizes(NamedTuple):
    """Bytes of a save's batches, at most: of the first, or of the first if it begins in an advance; of the one that
    follows, after which each may be twice as large (0: none follows); and of the last one of a GPU's pages (0: as the
    others)."""

    first: int
    in_advance: int
    following: int = 0
    last: int = 0


@dataclass(slots=True)
class ReservedBatch:
    """Places of a prompt's pieces: their number, their end, the generation of their connection, the pieces that have
    some, those without room, and the bytes of all. `is_in_inbox`: they are written to the inbox, and copied from
    there. In an advance, pieces are written before the daemon has said which of them it has."""

    prompt: HashedPrompt
    number: int
    until: float
    generation: int
    pieces: list[ChunkRef]
    without_room: list[ChunkRef]
    num_bytes: int
    is_in_inbox: bool


class SaveOperation:
    """One save: pieces that were stored, pieces that were present already, and the `boot` ids of the daemons that
    have them.

    Every step may raise `ServerError`; what was counted up to then stays valid.
    """

    def __init__(self, session: PromptSession, layout: ArenaLayout, copier: ArenaCopier, source: Source) -> None:
        self._session, self._arena, self._copier, self._source = session, layout, copier, source
        self._client, self._begin = session.client, copier.starter(source)
        self._is_staged = isinstance(source, StagedGather)
        self._in_flight: deque[ReservedBatch] = deque()
        """Batches that are being written: their bytes are held, and the inbox, if they are in there."""
        self.stored: set[ChunkRef] = set()
        self.present: set[ChunkRef] = set()
        self.daemons: set[bytes] = set()

    def outcome(self, wanted: Sequence[ChunkRef]) -> SaveOutcome:
        done = self.stored | self.present
        failed = [piece for piece in wanted if piece not in done] if len(done) < len(wanted) else []
        return SaveOutcome(Saved(len(self.stored), len(self.present), len(failed)), failed)

    def save(
        self, prompt: HashedPrompt, wanted: Sequence[ChunkRef], budget: Budget, gathered: Callable[[], None]
    ) -> None:
        """Save batch by batch, as far as there is room and time. Calls `gathered` when everything is copied."""
        pieces, sizes = deque(wanted), BatchSizes(FIRST_BYTES, FIRST_BYTES + NEXT_BYTES, NEXT_BYTES, LAST_BYTES)
        while pieces and not budget.is_spent:
            with closing(self._written(self._begun(prompt, pieces, budget, sizes))) as written:
                for reserved, is_written in written:
                    if not pieces and not reserved.without_room and len(self._in_flight) == 1:
                        gathered()
                    if is_written and self.commit(reserved, budget):  # visible blobs may be evicted, which makes room
                        pieces.extendleft(reversed(reserved.without_room))

    def gather(self, prompt: HashedPrompt, wanted: Sequence[ChunkRef], budget: Budget) -> ReservedBatch | None:
        """Copy the first batch into places that are not visible yet; None if nothing could be copied."""
        begun = self._begun(prompt, deque(wanted), budget, BatchSizes(GATHER_BYTES, GATHER_BYTES))
        written = [reserved for reserved, is_written in self._written(begun) if is_written]
        return written[0] if written else None

    def _written(self, begun: Iterator[Begun[ReservedBatch]]) -> Generator[tuple[ReservedBatch, bool]]:
        """Batches, and whether all of each was written; if not, its places are freed. A batch is in flight until the
        next one is asked for."""
        try:
            with closing(self._copier.writes(begun, self._source)) as written:
                for reserved, is_written in written:
                    fine = is_written and (not reserved.is_in_inbox or self._copied_in(reserved))
                    if not fine:
                        self.abandon(reserved)
                    yield reserved, fine
                    self._end_batch()
        finally:
            while self._in_flight:
                self.abandon(self._in_flight[0])
                self._end_batch()

    def _end_batch(self) -> None:
        reserved = self._in_flight.popleft()
        self._client.reserving.give_back(reserved.num_bytes)
        if reserved.is_in_inbox:
            self._client.inbox_lock.release()

    def _begun(
        self, prompt: HashedPrompt, pieces: deque[ChunkRef], budget: Budget, sizes: BatchSizes
    ) -> Iterator[Begun[ReservedBatch]]:
        """Copies of batches of these sizes, of `pieces`, which are taken off that list. Ends when no more can be
        reserved until those in flight are visible: then blobs may be evicted, the inbox is free, and a refusal is
        final."""
        if not pieces:
            return
        most_bytes, advance = sizes.first, self._take_advance(pieces[0])
        if advance:
            reserved = yield from self._begun_in_advance(advance, prompt, pieces, budget, sizes)
            if reserved.without_room:
                return
            most_bytes = sizes.following
        else:
            self._order(pieces)
        while most_bytes and pieces and not budget.is_spent:
            is_alone = not self._in_flight
            batch = self._next_batch(pieces, budget, sizes.first if is_alone else most_bytes, sizes.last)
            most_bytes = max(2 * most_bytes, sizes.following) if sizes.following else 0
            try:
                found = self._try_reserve(prompt, batch, budget, is_alone=is_alone)
            except ServerError:
                if is_alone:
                    raise
                return
            if found is None:
                return
            reserved, jobs = found
            for _ in batch:
                pieces.popleft()
            if jobs:
                yield from self._begin(jobs, reserved)
                yield Begun(reserved)
            if reserved.without_room or reserved.is_in_inbox:
                return

    # ---- in an advance

    def _take_advance(self, first: ChunkRef) -> Advance | None:
        """The connection's advance, if it is still valid when the caller's stream is done, and large enough."""
        if not (self._client.advances and isinstance(self._source, StagedGather)):
            return None
        self._source.wait_for_caller()  # which may take longer than the advance is valid
        try:
            advance = self._client.advances.popleft()
        except IndexError:  # another thread has it
            return None
        is_valid = advance.generation == self._client.generation and time.monotonic() < advance.until
        return advance if is_valid and self._arena.num_bytes([first]) <= advance.num_bytes else None

    def _begun_in_advance(
        self, advance: Advance, prompt: HashedPrompt, pieces: deque[ChunkRef], budget: Budget, sizes: BatchSizes
    ) -> Generator[Begun[ReservedBatch], None, ReservedBatch]:
        """Copies of the first batch, of which the first go to an advance: one of them begins at once, the others while
        the daemon is asked for the batch."""
        arena, number, source = self._session.arena(advance.generation), self._client.number(), self._source
        assert isinstance(source, StagedGather), "an advance is for memory that is reached through a copier's own"
        first = self._first_call(pieces, advance.num_bytes)
        reserved = ReservedBatch(prompt, number, advance.until, advance.generation, [], [], 0, is_in_inbox=False)
        self._in_flight.append(reserved)
        jobs = self._arena.in_a_row(arena, prompt, first, advance.start)
        yield Begun(reserved, begin_gather(jobs, source, reserved))
        batch = self._batch_with(first, pieces, budget, sizes)
        reserved.num_bytes = self._arena.num_bytes(batch)
        jobs = self._arena.in_a_row(arena, prompt, batch, advance.start, advance.num_bytes)
        begun, failures = list[Begun[ReservedBatch]](), list[Exception]()

        def begin() -> None:
            try:
                for each in self._begin(jobs[len(first) :], reserved):
                    begun.append(each)
            except Exception as error:  # raised when no request is in flight
                failures.append(error)

        others = list[ArenaBlob]()
        try:
            others = self._reserve(reserved, batch, budget, in_advance=len(jobs), meanwhile=begin)
        except LeaseExpired:  # as after a reconnect
            pieces.extendleft(reversed(batch))
        except ServerError as error:
            failures.append(error)
        yield from begun
        if failures:
            raise failures[0]
        yield from self._begin(others, reserved)
        yield Begun(reserved)
        return reserved

    def _first_call(self, pieces: Sequence[ChunkRef], most_bytes: int) -> list[ChunkRef]:
        """What the first call of a GPU's copier copies: of the first piece's shard, little."""
        shard, size = self._arena.shard(pieces[0]), self._arena.num_bytes([pieces[0]])
        most = 1 if shard.payload_bytes % 8 else max(1, min(FIRST_CALL_BYTES, most_bytes) // size)
        return [*islice((piece for piece in pieces if piece[0] == pieces[0][0]), most)]

    def _batch_with(
        self, first: list[ChunkRef], pieces: deque[ChunkRef], budget: Budget, sizes: BatchSizes
    ) -> list[ChunkRef]:
        """A batch that begins with these pieces, whose bytes are held; it is taken off `pieces`, which are ordered."""
        taken, limiter, welcome = {*first}, self._client.reserving, self._client.welcome
        rest = self._arena.side_by_side([piece for piece in pieces if piece not in taken], self._source)
        more_bytes = sizes.in_advance - self._arena.num_bytes(first)
        more = self._next_batch(rest, budget, more_bytes, sizes.last) if rest and more_bytes > 0 else []
        batch = [*first, *more][:MOST_PIECES]
        if not limiter.hold_now(self._arena.num_bytes(batch), welcome.reserve_bytes):
            batch = first
            limiter.hold(self._arena.num_bytes(batch), welcome.reserve_bytes, welcome.lease_s, budget)
        pieces.clear()
        pieces.extend(rest[len(batch) - len(first) :])
        return batch

    # ---- places

    def _order(self, pieces: deque[ChunkRef]) -> None:
        ordered = self._arena.side_by_side(pieces, self._source)
        pieces.clear()
        pieces.extend(ordered)

    def _try_reserve(
        self, prompt: HashedPrompt, batch: list[ChunkRef], budget: Budget, *, is_alone: bool
    ) -> tuple[ReservedBatch, list[ArenaBlob]] | None:
        """A batch, which is in flight if it has places, and its blobs; None if it gets some only when no other is in
        flight."""
        num_bytes, welcome, limiter = self._arena.num_bytes(batch), self._client.welcome, self._client.reserving
        if is_alone:
            limiter.hold(num_bytes, welcome.reserve_bytes, welcome.lease_s, budget)
        elif not limiter.hold_now(num_bytes, welcome.reserve_bytes):
            return None
        is_in_flight = False
        reserved = ReservedBatch(prompt, self._client.number(), 0.0, 0, [], [], num_bytes, is_in_inbox=False)
        try:
            jobs = self._reserve(reserved, batch, budget, waits=is_alone)
            if is_in_flight := bool(jobs):
                self._in_flight.append(reserved)
        finally:
            if not is_in_flight:
                limiter.give_back(num_bytes)
        is_refused = reserved.without_room and not jobs
        return None if is_refused and not is_alone else (reserved, jobs)

    def _next_batch(
        self, pieces: Sequence[ChunkRef], budget: Budget, most_bytes: int, last_bytes: int
    ) -> list[ChunkRef]:
        """What is saved at once: no more than the inbox holds, where there is one, and what one call copies is not cut.
        From a GPU the last batch has `last_bytes`. Raises `OverLimit`."""
        most_bytes = min(most_bytes, max(FIRST_BYTES, self._client.welcome.reserve_bytes // BATCHES_IN_FLIGHT))
        batch = next(self._arena.batches(self._client, pieces, budget, most_bytes=most_bytes, through_inbox=True))
        inbox_bytes = self._client.welcome.inbox_bytes
        if inbox_bytes and (size := self._arena.num_bytes(batch)) > inbox_bytes:
            raise OverLimit(f"a blob of {size} bytes, an inbox of {inbox_bytes}: take a larger --inbox")
        if not self._is_staged:
            return batch
        if len(batch) == len(pieces):
            reversed_batch = batch[::-1] if last_bytes else []
            last = next(self._arena.batches(self._client, reversed_batch, budget, most_bytes=last_bytes), [])
            return batch[: len(batch) - len(last)] or batch
        following = pieces[len(batch)][0]
        whole = [*dropwhile(lambda piece: piece[0] == following, reversed(batch))][::-1]
        return whole or batch

    def _reserve(
        self,
        reserved: ReservedBatch,
        batch: Sequence[ChunkRef],
        budget: Budget,
        *,
        waits: bool = True,
        in_advance: int = 0,
        meanwhile: Callable[[], None] = nothing,
    ) -> list[ArenaBlob]:
        """Reserve places for a batch; returns the blobs to write there, but for those in an advance."""
        asked_at, welcome, advance_bytes = time.monotonic(), self._client.welcome, self._wanted_advance(batch)
        pieces = packed(batch, "<i4")

        def request(sequence: int) -> protocol.Message:
            limits = daemon_budget(budget), waits, in_advance, advance_bytes
            return protocol.Reserve(sequence, reserved.number, pieces, *limits)

        reply, generation = self._session.ask(reserved.prompt, request, budget, meanwhile=meanwhile)
        found = self._client.check(reply, protocol.Places)
        if found.advance_bytes:
            until = asked_at + ADVANCE_S - ADVANCE_MARGIN_S
            self._client.advances.append(Advance(found.advance_start, found.advance_bytes, until, generation))
        until, places = asked_at + welcome.lease_s, [*zip(batch, numbers(found.starts).tolist(), strict=True)]
        reserved.until, reserved.generation = until if budget.until is None else min(until, budget.until), generation
        reserved.pieces = [piece for piece, at in places if at >= 0]
        reserved.without_room = [piece for piece, at in places if at == NO_ROOM]
        self.present |= {piece for piece, at in places if at < 0 and at != NO_ROOM}
        if self._client.welcome.inbox_bytes:
            return self._in_inbox(reserved)
        arena = self._session.arena(generation)
        return [self._arena.job(arena, reserved.prompt, *piece, at) for piece, at in places[in_advance:] if at >= 0]

    def _wanted_advance(self, batch: Sequence[ChunkRef]) -> int:
        """Bytes for the next save to begin with, of a source like this one; 0: it needs none."""
        if not self._is_staged or self._client.advances:
            return 0
        num_bytes = min(ADVANCE_BYTES, self._client.welcome.reserve_bytes // ADVANCE_PARTS)
        return num_bytes if self._arena.num_bytes(batch[:1]) <= num_bytes else 0

    def _in_inbox(self, reserved: ReservedBatch) -> list[ArenaBlob]:
        """The blobs of a batch in the inbox, which is locked until they are copied; none if it is not free in time."""
        inbox = self._session.inbox(reserved.generation)
        jobs = self._arena.in_a_row(inbox, reserved.prompt, reserved.pieces, 0)
        if jobs and not self._client.inbox_lock.acquire(timeout=max(0.0, reserved.until - time.monotonic())):
            self.abandon(reserved)
            return []
        reserved.is_in_inbox = bool(jobs)
        return jobs

    def _copied_in(self, reserved: ReservedBatch) -> bool:
        """Let the daemon copy what is in the inbox; returns whether it took all of it."""
        pieces = packed(reserved.pieces, "<i4")

        def request(sequence: int) -> protocol.Message:
            return protocol.CopyIn(sequence, reserved.number, pieces)

        reply, _ = self._session.ask(reserved.prompt, request, Budget(reserved.until), reserved.generation)
        return self._client.check(reply, protocol.Done).count == len(reserved.pieces)

    def commit(self, reserved: ReservedBatch, budget: Budget) -> bool:
        """Returns whether the batch became visible: all or none."""
        if reserved.generation != self._client.generation:
            return False
        with suppress(LeaseExpired):
            commit, boot = protocol.Commit(reserved.number, budget_s=daemon_budget(budget)), self._client.welcome.boot
            self._client.ask(commit, protocol.Done, reply_timeout(budget))
            self.stored |= {*reserved.pieces}
            self.daemons.add(boot)
            return True
        return False

    def abandon(self, reserved: ReservedBatch) -> None:
        """Free the places of a batch; if that does not reach the daemon, they are freed with their lease."""
        if reserved.generation == self._client.generation:
            self._client.post(protocol.Commit(reserved.number, abandon=True))


class SaveObserver(Protocol):
    """The store that a save reports to."""

    def or_miss(self) -> AbstractContextManager[None]: ...

    def note_saved(self, saving: SaveOperation) -> None: ...


class GatheredReservation(GatheredSave):
    """Payloads that are in the arena, and not visible yet."""

    def __init__(self, saving: SaveOperation, wanted: Sequence[ChunkRef], store: SaveObserver) -> None:
        self._saving, self._wanted, self._store = saving, wanted, store
        self._reserved: ReservedBatch | None = None
        self.failed = tuple(wanted)

    def hold(self, reserved: ReservedBatch | None) -> None:
        self._reserved = reserved
        held = {*reserved.pieces} if reserved else set()
        self.failed = tuple(piece for piece in self._saving.outcome(self._wanted).failed if piece not in held)

    def commit(self, *, budget_s: float | None = None) -> Saved:
        reserved, self._reserved = self._reserved, None
        with self._store.or_miss():
            if reserved:
                self._saving.commit(reserved, Budget.of(budget_s))
        outcome = self._saving.outcome(self._wanted)
        self.failed = tuple(outcome.failed)
        self._store.note_saved(self._saving)
        return outcome.saved

    def abandon(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved:
            self._saving.abandon(reserved)

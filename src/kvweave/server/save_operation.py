"""Saving to a daemon: reserve places in the arena, write, commit; in batches, as far as room and time allow. While one
batch is copied, the next one gets its places, and the one before it becomes visible."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from itertools import chain, dropwhile, islice
from typing import NamedTuple, Protocol

import numpy as np

from kvweave.errors import LeaseExpired, OverLimit, ServerError
from kvweave.server import protocol
from kvweave.server.arena_copier import ArenaCopier
from kvweave.server.arena_writer import ArenaBlob
from kvweave.server.byte_limiter import HeldBytes
from kvweave.server.client import Client
from kvweave.server.inbox import inbox_starts
from kvweave.server.prompt_session import PromptSession, daemon_budget, key_of, reply_timeout
from kvweave.server.protocol import MOST_PIECES, NO_ROOM, PRESENT, WRITING, numbers, packed
from kvweave.store import GatheredSave, HashedPrompt, Saved, Schema, Shard, Source
from kvweave.store.batches import batches
from kvweave.store.blob import blob_bytes
from kvweave.store.blocking_store import GATHER_BYTES, discard
from kvweave.store.keys import Bytes
from kvweave.store.operations import ChunkRef
from kvweave.store.page_payloads import StagedGather, StagedScatter
from kvweave.store.results import SaveOutcome
from kvweave.store.tier_stack import Budget

BATCH_BYTES = 1 << 30
"""What one request is for, at most: between two fetches nothing is copied, for as long as 50 MiB take."""
FIRST_BYTES = 76 << 20
"""What the first request of a save is for, so that copies begin soon. Each later one is for twice as much as the one
before, and is made while that is copied. A little more than two calls of a GPU's copier take."""
BATCHES_IN_FLIGHT = 4
"""Batches that a connection's share has room for."""
LAST_BYTES = 20 << 20
"""What the last request of a save from a GPU is for, so that all is visible soon after the last copy."""
PAUSES_S = tuple(min(0.002 * 2**number, 0.05) for number in range(14))
"""Pauses after which pieces that others are writing are asked for again, half a second in all: most are there then, and
those of a client that was killed are written here."""


class ArenaLayout:
    """The blobs of a schema in a daemon's arena."""

    def __init__(self, schema: Schema) -> None:
        self._shards, self._sizes = schema.shards, [blob_bytes(shard) for shard in schema.shards]
        self._rounded = [inbox_starts([size])[-1] for size in self._sizes]
        self._payload_bytes = np.array([shard.payload_bytes for shard in schema.shards])

    def job(self, arena: Bytes, prompt: HashedPrompt, number: int, chunk: int, start: int) -> ArenaBlob:
        shard = self._shards[number]
        return ArenaBlob(arena[start : start + self._sizes[number]], shard, chunk, key_of(prompt, shard, chunk))

    def first_call(self, pieces: Sequence[ChunkRef], together_bytes: int) -> tuple[Shard, list[int]]:
        """What a staged source copies first of a batch: the chunks of its first shard that one call takes."""
        first = pieces[0][0]
        shard = self._shards[first]
        count = 1 if shard.payload_bytes % 8 else max(1, together_bytes // max(1, shard.payload_bytes))
        return shard, [*islice((chunk for number, chunk in pieces if number == first), count)]

    def in_inbox(self, inbox: Bytes, prompt: HashedPrompt, pieces: Sequence[ChunkRef]) -> list[ArenaBlob]:
        """The blobs of these pieces in an inbox."""
        starts = inbox_starts([self._sizes[number] for number, _ in pieces])
        return [self.job(inbox, prompt, *piece, at) for piece, at in zip(pieces, starts, strict=False)]

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

    def side_by_side(self, pieces: Sequence[ChunkRef], copied: object) -> list[ChunkRef]:
        """For a staged source or sink, pieces in such an order that what it copies in one call, of one shard, follows
        each other, and earlier chunks come before later ones otherwise; as they are for others. Calls of a shard are
        of about as many chunks each: a small one takes longer to say than to copy."""
        if not pieces or not isinstance(copied, StagedGather | StagedScatter):
            return [*pieces]
        shards, chunks = np.fromiter(chain.from_iterable(pieces), np.int64, 2 * len(pieces)).reshape(-1, 2).T
        first, count = chunks.min(), np.ptp(chunks) + 1
        each = np.maximum(1, copied.together_bytes // np.maximum(1, self._payload_bytes))
        calls = (chunks - first) * (-(-count // each[shards])) // count
        return [pieces[i] for i in np.lexsort((chunks, shards, calls)).tolist()]

    def allowed(self, client: Client, pieces: Sequence[ChunkRef], budget: Budget) -> AbstractContextManager[None]:
        """A context in which these pieces are fetched over the connection, within its limit."""
        welcome = client.welcome
        return client.fetching.holding(self.num_bytes(pieces), welcome.reserve_bytes, welcome.lease_s, budget)


class ReservedBatch(NamedTuple):
    """Reserved places of a prompt's pieces: their number, their end, the generation of their connection, the pieces
    with and without room, and what is held for all. `is_in_inbox`: they are written to the inbox, and copied from
    there."""

    prompt: HashedPrompt
    number: int
    until: float
    generation: int
    pieces: list[ChunkRef]
    jobs: list[ArenaBlob]
    without_room: list[ChunkRef]
    held: HeldBytes
    is_in_inbox: bool


class SaveOperation:
    """One save: pieces that were stored, pieces that were present already, and the `boot` ids of the daemons that
    have them.

    Every step may raise `ServerError`; what was counted up to then stays valid.
    """

    def __init__(self, session: PromptSession, layout: ArenaLayout, copier: ArenaCopier, source: Source) -> None:
        self._session, self._arena, self._copier, self._source = session, layout, copier, source
        self._client = session.client
        self._in_flight: deque[ReservedBatch] = deque()
        """Batches that are being written: their bytes are held, and the inbox, if they are in there."""
        self._written_elsewhere: set[ChunkRef] = set()
        """What others were writing when it was asked for: nobody knows yet whether it will be there."""
        self._is_first = True
        """Whether no places were asked for yet."""
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
        pieces, pauses = deque(self._arena.side_by_side(wanted, self._source)), iter(PAUSES_S)
        while pieces and not budget.is_spent:
            self._save_all(prompt, pieces, budget, gathered)
            if self._written_elsewhere and (pause_s := next(pauses, None)) is not None:
                time.sleep(budget.within(pause_s))
                pieces.extend(self._arena.side_by_side(sorted(self._written_elsewhere), self._source))

    def _save_all(
        self, prompt: HashedPrompt, pieces: deque[ChunkRef], budget: Budget, gathered: Callable[[], None]
    ) -> None:
        """Save `pieces`, until none is left, except what is written elsewhere."""
        while pieces and not budget.is_spent:
            reserving = self._reserved(prompt, pieces, budget, FIRST_BYTES, LAST_BYTES)
            with closing(self._written(reserving)) as written:
                for reserved, is_written in written:
                    left = pieces or reserved.without_room or self._written_elsewhere
                    if not left and len(self._in_flight) == 1:
                        gathered()
                    if is_written and self.commit(reserved, budget):  # visible blobs may be evicted, which makes room
                        pieces.extendleft(reversed(reserved.without_room))

    def gather(self, prompt: HashedPrompt, wanted: Sequence[ChunkRef], budget: Budget) -> ReservedBatch | None:
        """Copy the first batch into places that are not visible yet; None if nothing could be copied."""
        pieces = deque(self._arena.side_by_side(wanted, self._source))
        first = islice(self._reserved(prompt, pieces, budget, GATHER_BYTES, 0), 1)
        written = [reserved for reserved, is_written in self._written(first) if is_written]
        return written[0] if written else None

    def _written(self, batches: Iterator[ReservedBatch]) -> Generator[tuple[ReservedBatch, bool]]:
        """Batches, and whether all of each was written; if not, its places are freed. A batch is in flight until the
        next one is asked for."""
        try:
            with closing(self._copier.writes(batches, self._source)) as written:
                for reserved, is_written in written:
                    fine = is_written and (not reserved.is_in_inbox or self._copied_in(reserved))
                    if not fine:
                        self.abandon(reserved)
                    yield reserved, fine
                    self._end_batch()
        finally:
            if isinstance(self._source, StagedGather):  # what it was gathered for is present, or has no room
                self._source.drop_ahead()
            while self._in_flight:
                self.abandon(self._in_flight[0])
                self._end_batch()

    def _end_batch(self) -> None:
        held = self._in_flight[0].held
        self._client.reserving.give_back(held)
        self._client.inbox_turn.give_back(held)
        self._in_flight.popleft()

    def _reserved(
        self, prompt: HashedPrompt, pieces: deque[ChunkRef], budget: Budget, first_bytes: int, last_bytes: int
    ) -> Iterator[ReservedBatch]:
        """Batches with places, of `pieces`, which are taken off that list. Ends when no more can be reserved until
        those in flight are visible: then blobs may be evicted, the inbox is free, and a refusal is final."""
        most_bytes = first_bytes
        while pieces and not budget.is_spent:
            is_alone = not self._in_flight
            largest = max(first_bytes, min(BATCH_BYTES, self._client.welcome.reserve_bytes // BATCHES_IN_FLIGHT))
            most_bytes = first_bytes if is_alone else min(2 * most_bytes, largest)
            batch = self._next_batch(pieces, budget, most_bytes, last_bytes)
            try:
                reserved = self._try_reserve(prompt, batch, budget, is_alone=is_alone)
            except ServerError:
                if is_alone:
                    raise
                return
            if reserved is None:
                return
            for _ in batch:
                pieces.popleft()
            if reserved.jobs:
                yield reserved
            if reserved.without_room or reserved.is_in_inbox:
                return

    def _try_reserve(
        self, prompt: HashedPrompt, batch: list[ChunkRef], budget: Budget, *, is_alone: bool
    ) -> ReservedBatch | None:
        """A batch, which is in flight if it has places; None if it gets some only when no other is in flight."""
        held, welcome, limiter = HeldBytes(self._arena.num_bytes(batch)), self._client.welcome, self._client.reserving
        if is_alone:
            limiter.hold(held, welcome.reserve_bytes, welcome.lease_s, budget)
        elif not limiter.hold_now(held, welcome.reserve_bytes):
            return None
        number, is_in_flight = self._client.number(), False
        try:
            reserved = self._reserve(prompt, number, held, batch, budget, waits=is_alone)
            if is_in_flight := bool(reserved.jobs):
                self._in_flight.append(reserved)
        except BaseException:  # the daemon may have reserved: until the lease ends nobody could save these pieces
            self._client.post(protocol.Commit(number, abandon=True))
            raise
        finally:
            if not is_in_flight:
                limiter.give_back(held)
                self._client.inbox_turn.give_back(held)
        is_refused = reserved.without_room and not reserved.jobs
        return None if is_refused and not is_alone else reserved

    def _next_batch(
        self, pieces: Sequence[ChunkRef], budget: Budget, most_bytes: int, last_bytes: int
    ) -> list[ChunkRef]:
        """What is saved at once: no more than the inbox holds, where there is one. From a GPU, what one call copies is
        not cut, but for the last `last_bytes`, if any, which are a batch of their own. Raises `OverLimit`."""
        batch = next(self._arena.batches(self._client, pieces, budget, most_bytes=most_bytes, through_inbox=True))
        inbox_bytes = self._client.welcome.inbox_bytes
        if inbox_bytes and (size := self._arena.num_bytes(batch)) > inbox_bytes:
            raise OverLimit(f"a blob of {size} bytes, an inbox of {inbox_bytes}: take a larger --inbox")
        if not isinstance(self._source, StagedGather):
            return batch
        if len(batch) == len(pieces):
            backwards = batch[::-1] if last_bytes else []
            last = next(self._arena.batches(self._client, backwards, budget, most_bytes=last_bytes), [])
            return batch[: len(batch) - len(last)] or batch
        following = pieces[len(batch)][0]
        whole = [*dropwhile(lambda piece: piece[0] == following, reversed(batch))][::-1]
        return whole or batch

    def _reserve(
        self,
        prompt: HashedPrompt,
        number: int,
        held: HeldBytes,
        batch: list[ChunkRef],
        budget: Budget,
        *,
        waits: bool,
    ) -> ReservedBatch:
        until = time.monotonic() + self._client.welcome.lease_s
        until = until if budget.until is None else min(until, budget.until)

        def request(sequence: int) -> protocol.Message:
            return protocol.Reserve(sequence, number, packed(batch, "<i4"), daemon_budget(budget), waits)

        meanwhile = partial(self._gather_ahead, batch) if waits else discard
        reply, generation = self._session.ask(prompt, request, budget, meanwhile=meanwhile)
        starts: list[int] = numbers(self._client.check(reply, protocol.Places).starts).tolist()
        places = [*zip(batch, starts, strict=True)]
        granted = [piece for piece, at in places if at >= 0]
        self.present |= {piece for piece, at in places if at == PRESENT}
        self._written_elsewhere -= {*batch}
        self._written_elsewhere |= {piece for piece, at in places if at == WRITING}
        is_in_inbox = bool(self._client.welcome.inbox_bytes)
        if is_in_inbox:
            jobs = self._arena.in_inbox(self._session.inbox(generation), prompt, granted)
        else:
            arena = self._session.arena(generation, budget)
            jobs = [self._arena.job(arena, prompt, *piece, at) for piece, at in places if at >= 0]
        without_room = [piece for piece, at in places if at == NO_ROOM]
        reserved = ReservedBatch(prompt, number, until, generation, granted, jobs, without_room, held, is_in_inbox)
        if is_in_inbox and jobs and not self._client.inbox_turn.hold(held, 0, until - time.monotonic(), budget):
            self.abandon(reserved)
            return reserved._replace(jobs=[])
        return reserved

    def _gather_ahead(self, batch: Sequence[ChunkRef]) -> None:
        """Gather what the first call will copy, on a GPU, while the daemon reserves: on one that was idle the daemon
        takes half a millisecond, and the client as long until a copy begins."""
        if isinstance(self._source, StagedGather) and self._is_first:
            self._is_first = False  # where the first pieces are present, later ones mostly are, too
            shard, chunks = self._arena.first_call(batch, self._source.together_bytes)
            with suppress(Exception):  # it is raised again when the copy is begun
                self._source.gather_ahead(shard, chunks)

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

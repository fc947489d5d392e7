"""Saving to a daemon: reserve places in the arena, write, commit; in batches, as far as room and time allow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Protocol

from kvweave.errors import LeaseExpired, OverLimit, ServerError
from kvweave.server import protocol
from kvweave.server.allowance import Allowance
from kvweave.server.arena_copier import ArenaCopier
from kvweave.server.arena_writer import ArenaBlob
from kvweave.server.inbox import inbox_starts
from kvweave.server.prompt_session import PromptSession, daemon_budget, key_of, reply_timeout
from kvweave.server.protocol import MOST_PIECES, NO_ROOM, numbers, packed
from kvweave.store import GatheredSave, HashedPrompt, Saved, Schema, Source
from kvweave.store.any_store import GATHER_BYTES
from kvweave.store.batches import batches
from kvweave.store.keys import Bytes
from kvweave.store.operations import ChunkRef
from kvweave.store.results import SaveOutcome
from kvweave.store.tier_stack import UNLIMITED, Budget

BATCH_BYTES = 1 << 30
"""What one request is for, at most: between two requests nothing is copied, for as long as 50 MiB take."""


class ArenaLayout:
    """The blobs of a schema in a daemon's arena."""

    def __init__(self, prompt_session: PromptSession, schema: Schema) -> None:
        self.prompt_session, self._shards = prompt_session, schema.shards
        self._sizes = prompt_session.blob_bytes

    def job(self, arena: Bytes, prompt: HashedPrompt, number: int, chunk: int, start: int) -> ArenaBlob:
        shard = self._shards[number]
        return ArenaBlob(arena[start : start + self._sizes[number]], shard, chunk, key_of(prompt, shard, chunk))

    def in_inbox(self, inbox: Bytes, prompt: HashedPrompt, pieces: Sequence[ChunkRef]) -> list[ArenaBlob]:
        """The blobs of these pieces in an inbox."""
        starts = inbox_starts([self._sizes[number] for number, _ in pieces])
        return [self.job(inbox, prompt, *piece, at) for piece, at in zip(pieces, starts, strict=False)]

    def num_bytes(self, pieces: Sequence[ChunkRef]) -> int:
        """What the blobs of these pieces take in an inbox."""
        return inbox_starts([self._sizes[number] for number, _ in pieces])[-1]

    def batches(
        self, pieces: Sequence[ChunkRef], budget: Budget, *, most_bytes: int = BATCH_BYTES, through_inbox: bool = False
    ) -> Iterator[list[ChunkRef]]:
        """Pieces for one request each, as far as they fit into the inbox, if there is one; a larger one is alone."""
        client = self.prompt_session.client
        with suppress(ServerError):  # the request that follows fails the same way
            client.refresh(reply_timeout(budget))
        inbox_bytes = client.welcome.inbox_bytes if through_inbox else 0
        most = min(most_bytes, client.welcome.reserve_bytes, inbox_bytes or most_bytes)
        least = -(-most // MOST_PIECES)  # so that a batch has no more than so many
        return batches(pieces, lambda piece: max(least, self.num_bytes([piece])), most)

    def allowed(self, allowance: Allowance, pieces: Sequence[ChunkRef], budget: Budget) -> AbstractContextManager[None]:
        """A context in which these pieces are held over the connection, within its limit."""
        welcome = self.prompt_session.client.welcome
        return allowance.holding(self.num_bytes(pieces), welcome.reserve_bytes, welcome.lease_s, budget)


class ReservedBatch(NamedTuple):
    """Reserved places of a prompt's pieces: their number, their end, the generation of their connection, and the pieces
    with and without room."""

    prompt: HashedPrompt
    number: int
    until: float
    generation: int
    pieces: list[ChunkRef]
    jobs: list[ArenaBlob]
    without_room: list[ChunkRef]


class SaveOperation:
    """One save: pieces that were stored, pieces that were present already, and the `boot` ids of the daemons that
    have them.

    Every step may raise `ServerError`; what was counted up to then stays valid.
    """

    def __init__(self, arena: ArenaLayout, copier: ArenaCopier, source: Source) -> None:
        self._arena, self._session, self._copier, self._source = arena, arena.prompt_session, copier, source
        self._client = self._session.client
        self.stored: set[ChunkRef] = set()
        self.present: set[ChunkRef] = set()
        self.daemons: set[bytes] = set()

    def outcome(self, wanted: Sequence[ChunkRef]) -> SaveOutcome:
        failed = [piece for piece in wanted if piece not in self.stored and piece not in self.present]
        return SaveOutcome(Saved(len(self.stored), len(self.present), len(failed)), failed)

    def save(
        self, prompt: HashedPrompt, wanted: Sequence[ChunkRef], budget: Budget, gathered: Callable[[], None]
    ) -> None:
        """Save batch by batch, as far as there is room and time. Calls `gathered` when everything is copied."""
        pieces = deque(wanted)
        while pieces and not budget.is_spent:
            batch = next(self._batches(pieces, budget))
            for _ in batch:
                pieces.popleft()
            with self._arena.allowed(self._client.reserving, batch, budget):
                reserved = self.reserve(prompt, batch, budget)
                is_written = self.write(reserved, budget)
                if not pieces and not reserved.without_room:
                    gathered()
                if is_written and self.commit(reserved, budget):  # visible blobs may be evicted, which makes room
                    pieces.extendleft(reversed(reserved.without_room))

    def gather(self, prompt: HashedPrompt, wanted: Sequence[ChunkRef], budget: Budget) -> ReservedBatch | None:
        """Copy the first batch into places that are not visible yet; None if nothing could be copied."""
        batch = next(self._batches(wanted, budget, GATHER_BYTES), [])
        reserved = self.reserve(prompt, batch, budget) if batch else None
        return reserved if reserved and self.write(reserved, budget) else None

    def _batches(
        self, pieces: Sequence[ChunkRef], budget: Budget, most_bytes: int = BATCH_BYTES
    ) -> Iterator[list[ChunkRef]]:
        """What is saved at once: no more than the inbox holds, where there is one. Raises `OverLimit`."""
        for batch in self._arena.batches(pieces, budget, most_bytes=most_bytes, through_inbox=True):
            inbox_bytes = self._client.welcome.inbox_bytes
            if inbox_bytes and (size := self._arena.num_bytes(batch)) > inbox_bytes:
                raise OverLimit(f"a blob of {size} bytes, an inbox of {inbox_bytes}: take a larger --inbox")
            yield batch

    def reserve(self, prompt: HashedPrompt, batch: list[ChunkRef], budget: Budget) -> ReservedBatch:
        number, until = self._client.number(), time.monotonic() + self._client.welcome.lease_s
        until = until if budget.until is None else min(until, budget.until)

        def request(sequence: int) -> protocol.Message:
            return protocol.Reserve(sequence, number, packed(batch, "<i4"), daemon_budget(budget))

        reply, generation = self._session.ask(prompt, request, budget)
        starts: list[int] = numbers(self._client.check(reply, protocol.Places).starts).tolist()
        places = [*zip(batch, starts, strict=True)]
        granted = [piece for piece, at in places if at >= 0]
        self.present |= {piece for piece, at in places if at < 0 and at != NO_ROOM}
        if self._client.welcome.inbox_bytes:
            jobs = self._arena.in_inbox(self._session.inbox(generation), prompt, granted)
        else:
            arena = self._session.arena(generation)
            jobs = [self._arena.job(arena, prompt, *piece, at) for piece, at in places if at >= 0]
        without_room = [piece for piece, at in places if at == NO_ROOM]
        return ReservedBatch(prompt, number, until, generation, granted, jobs, without_room)

    def write(self, reserved: ReservedBatch, budget: Budget) -> bool:
        """Returns whether all of a non-empty batch was written; if not, its places are freed."""
        fine = False
        through = self._through_inbox if self._client.welcome.inbox_bytes else self._written
        try:
            fine = through(reserved) if reserved.jobs else False
        finally:
            if not fine:
                self.abandon(reserved, budget)
        return fine

    def _written(self, reserved: ReservedBatch) -> bool:
        return self._copier.writes(reserved.jobs, self._source, reserved.until)

    def _through_inbox(self, reserved: ReservedBatch) -> bool:
        """Write to the inbox, when no other thread does, and let the daemon copy what is there."""
        lock, budget = self._client.inbox_lock, Budget(reserved.until)
        if not lock.acquire(timeout=max(0.0, reserved.until - time.monotonic())):
            return False
        try:
            if not self._written(reserved):
                return False
            pieces = packed(reserved.pieces, "<i4")

            def request(sequence: int) -> protocol.Message:
                return protocol.CopyIn(sequence, reserved.number, pieces)

            reply, _ = self._session.ask(reserved.prompt, request, budget, reserved.generation)
            return self._client.check(reply, protocol.Done).count == len(reserved.pieces)
        finally:
            lock.release()

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

    def abandon(self, reserved: ReservedBatch, budget: Budget) -> None:
        if reserved.jobs and reserved.generation == self._client.generation:
            with suppress(ServerError):  # then the reservation ends with its lease
                self._client.ask(protocol.Commit(reserved.number, abandon=True), protocol.Done, reply_timeout(budget))


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
            self._saving.abandon(reserved, UNLIMITED)

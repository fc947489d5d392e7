"""Saving to a daemon: reserve places in the arena, write, commit; in batches, as far as room and time allow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvweave.errors import LeaseExpired, ServerError, ServerGone
from kvweave.server import protocol
from kvweave.server.arena_copier import ArenaCopier
from kvweave.server.arena_writer import ArenaBlob
from kvweave.server.prompt_session import PromptSession, daemon_budget, key_of, reply_timeout
from kvweave.server.protocol import MOST_PIECES, NO_ROOM, numbers, packed
from kvweave.store import HashedPrompt, Schema, Source
from kvweave.store.any_store import ChunkRef
from kvweave.store.blob import blob_bytes
from kvweave.store.keys import Bytes
from kvweave.store.tier_stack import Budget

AT_ONCE_BYTES = 256 << 20
"""Bytes that one request reserves or fetches: enough that its round trip is short beside the copy."""


class ArenaLayout:
    """The blobs of a schema in a daemon's arena."""

    def __init__(self, prompt_session: PromptSession, schema: Schema) -> None:
        self.prompt_session, self._shards = prompt_session, schema.shards
        self._sizes = [blob_bytes(shard) for shard in schema.shards]

    def job(self, arena: Bytes, prompt: HashedPrompt, number: int, chunk: int, start: int) -> ArenaBlob:
        shard = self._shards[number]
        return ArenaBlob(arena[start : start + self._sizes[number]], shard, chunk, key_of(prompt, shard, chunk))

    def batches(self, pieces: Sequence[ChunkRef]) -> Iterator[list[ChunkRef]]:
        most, batch, size = min(AT_ONCE_BYTES, self.prompt_session.client.welcome.reserve_bytes), list[ChunkRef](), 0
        for piece in pieces:
            if batch and (size + self._sizes[piece[0]] > most or len(batch) == MOST_PIECES):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += self._sizes[piece[0]]
        if batch:
            yield batch


class _Ticket(NamedTuple):
    """A reservation: its number, its end, and the generation of its connection."""

    number: int
    until: float
    generation: int


class SaveOperation:
    """One save: pieces that were stored, pieces that were present already, and the `boot` ids of the daemons that
    have them."""

    def __init__(self, arena: ArenaLayout, copier: ArenaCopier, source: Source) -> None:
        self._arena, self._client, self._copier, self._source = arena, arena.prompt_session.client, copier, source
        self.stored = self.present = 0
        self.daemons: set[bytes] = set()

    def save(self, prompt: HashedPrompt, wanted: Sequence[ChunkRef], budget: Budget) -> None:
        """Raises `ServerError`; the counts up to then stay valid."""
        pieces = deque(wanted)
        while pieces and not budget.is_spent:
            batch = next(self._arena.batches(pieces))
            left = self._save(prompt, batch, budget)
            for _ in batch:
                pieces.popleft()
            pieces.extendleft(reversed(left))

    def _save(self, prompt: HashedPrompt, batch: Sequence[ChunkRef], budget: Budget) -> list[ChunkRef]:
        """Write a batch as far as there is room; returns the pieces to try again, now that those written may be
        evicted."""
        number, until = self._client.number(), time.monotonic() + self._client.welcome.lease_s
        until = until if budget.until is None else min(until, budget.until)

        def request(sequence: int) -> protocol.Message:
            return protocol.Reserve(sequence, number, packed(batch, "<i4"), daemon_budget(budget))

        reply, generation = self._arena.prompt_session.ask(prompt, request, budget)
        starts: list[int] = numbers(self._client.check(reply, protocol.Places).starts).tolist()
        mapped = self._client.mapped
        if mapped.generation != generation:
            raise ServerGone("the connection was lost, and what was reserved with it")
        places = [(piece, at) for piece, at in zip(batch, starts, strict=True) if at >= 0]
        granted = [self._arena.job(mapped.arena, prompt, *piece, at) for piece, at in places]
        left = [piece for piece, at in zip(batch, starts, strict=True) if at == NO_ROOM]
        stored = self._write(granted, _Ticket(number, until, generation), budget) if granted else 0
        self.stored += stored
        self.present += len(batch) - len(granted) - len(left)
        return left if stored else []

    def _write(self, jobs: Sequence[ArenaBlob], ticket: _Ticket, budget: Budget) -> int:
        """Write and commit; returns how many became visible: all or none."""
        fine = False
        try:
            fine = self._copier.writes(jobs, self._source, ticket.until)
        finally:
            if ticket.generation == self._client.generation and not fine:
                with suppress(ServerError):
                    self._client.ask(protocol.Commit(ticket.number, abandon=True), protocol.Done, reply_timeout(budget))
        if not fine or ticket.generation != self._client.generation:
            return 0
        with suppress(LeaseExpired):
            commit, boot = protocol.Commit(ticket.number, budget_s=daemon_budget(budget)), self._client.welcome.boot
            stored = self._client.ask(commit, protocol.Done, reply_timeout(budget)).count
            self.daemons.add(boot)
            return stored
        return 0

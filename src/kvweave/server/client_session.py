"""What one client has registered, opened and holds. Its requests are served here, and by `ReadRequests` and
`WriteRequests`: a reply that needs a backing tier, or must wait for space, is a coroutine; all others are computed at
once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvweave.errors import BadRequest, OverLimit
from kvweave.server import protocol
from kvweave.server.inbox import Inbox
from kvweave.server.leases import Leases
from kvweave.server.open_sequence import OpenSequence
from kvweave.server.protocol import Handler, Reply
from kvweave.server.read_requests import ReadRequests
from kvweave.server.registered_model import RegisteredModel
from kvweave.server.server_state import ServerState
from kvweave.server.write_requests import WriteRequests
from kvweave.store.arena_tier import STEP_KEYS
from kvweave.store.keys import PREFIX_BYTES

SCHEMA_BYTES = 8 << 20
"""Bytes that the registrations of one connection may take."""


class ClientSession:
    """A client's schemas, sequences, leases and reservations."""

    def __init__(self, state: ServerState) -> None:
        limits = state.settings.limits
        self._state, self._limits = state, limits
        self._schemas: dict[int, RegisteredModel] = {}
        self._sequences: dict[int, OpenSequence] = {}
        most_leased = state.arena.bytes_of(limits.lease_share)
        self.leases = Leases(state.arena, state.settings.lease_s, limits.leases, state.leased, most_leased)
        self._reads = ReadRequests(state, self.leases, self._sequence)
        self._writes = WriteRequests(state, self.leases, self._sequence)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def handlers(self) -> dict[type, Handler]:
        """Handlers of requests that need the arena, and so come over the Unix socket only."""
        return {
            protocol.Register: self._register,
            protocol.Open: self._open,
            protocol.Close: self._close,
            **self._reads.handlers(),
            **self._writes.handlers(),
        }

    @property
    def last_tokens(self) -> int:
        """Of the prompt that was looked up last."""
        return self._reads.last_tokens

    def open_inbox(self) -> Inbox | None:
        """The inbox of this connection, for its client; None where clients write to the arena."""
        return self._writes.open_inbox()

    def give_back(self) -> int:
        self._writes.end()
        held = self.leases.give_back()
        self._sequences.clear()
        for schema in self._schemas.values():
            self._state.models.release(schema)
        self._schemas.clear()
        if held:
            self._state.changed()
        return held

    def expire(self, now: float) -> int:
        expired = self.leases.expire(now)
        if expired:
            self._state.changed()
        return expired

    # ---- sequences

    def _register(self, request: protocol.Register) -> Reply:
        if request.schema not in self._schemas and len(self._schemas) >= self._limits.schemas:
            raise OverLimit(f"{self._limits.schemas} schemas are registered already by this connection")
        others = [each.num_bytes for number, each in self._schemas.items() if number != request.schema]
        if sum(others) + sum(len(shard.meta) for shard in request.shards) > SCHEMA_BYTES:
            raise OverLimit(f"more than {SCHEMA_BYTES} bytes of schemas by one connection")
        taken, before = self._state.models.take(request), self._schemas.get(request.schema)
        self._schemas[request.schema] = taken
        if before is not None:
            self._state.models.release(before)
        return protocol.Done(len(request.shards))

    def _open(self, request: protocol.Open) -> Reply | Awaitable[Reply]:
        schema = self._schemas.get(request.schema)
        if schema is None:
            raise BadRequest(f"schema {request.schema} is not registered by this connection")
        others = [each for number, each in self._sequences.items() if number != request.sequence]
        if len(others) >= self._limits.sequences:
            raise OverLimit(f"{self._limits.sequences} sequences are open already; close some")
        wanted = len(request.prefixes) // PREFIX_BYTES * schema.num_shards
        if sum(each.num_keys for each in others) + wanted > self._limits.keys:
            raise OverLimit(f"more than {self._limits.keys} keys in open sequences; close some")
        sequence = OpenSequence(schema, request)
        if wanted > STEP_KEYS:
            return self._open_in_steps(request.sequence, sequence)
        for _ in sequence.steps():
            pass
        return self._is_open(request.sequence, sequence)

    async def _open_in_steps(self, number: int, sequence: OpenSequence) -> Reply:
        for _ in sequence.steps():
            await asyncio.sleep(0)
        return self._is_open(number, sequence)

    def _is_open(self, number: int, sequence: OpenSequence) -> Reply:
        self._sequences[number] = sequence
        return protocol.Done(sequence.num_chunks)

    def _sequence(self, number: int) -> OpenSequence:
        sequence = self._sequences.get(number)
        if sequence is None:
            raise BadRequest(f"sequence {number} is not open")
        return sequence

    def _close(self, request: protocol.Close) -> Reply:
        return protocol.Done(sum(self._sequences.pop(number, None) is not None for number in request.sequences))

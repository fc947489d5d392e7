"""What one client said, and the answers. An answer that needs a farther tier, or room, is a coroutine; all else is
answered on the spot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadRequest, OverLimit
from kvweave.server import protocol as say
from kvweave.server.far import Want
from kvweave.server.hub import Hub
from kvweave.server.leases import Leases
from kvweave.server.opened import STEP_KEYS, Opened, Pieces
from kvweave.server.protocol import FAR, NO_ROOM, Answer, numbers, packed
from kvweave.server.registered import Registered
from kvweave.store.cascade import Budget
from kvweave.store.keys import PREFIX_BYTES
from kvweave.store.stripes import SECTOR

ROOM_S = 2.0
"""How long a reservation waits for room that somebody else holds."""
SCHEMA_BYTES = 8 << 20
"""What one connection's registrations may take."""
Flags = NDArray[np.bool_]
"""One for each key of a sequence, chunk by chunk."""
Handler = Callable[[Any], Answer | Awaitable[Answer]]


class Session:
    """A client's schemas, sequences, leases and tickets."""

    def __init__(self, hub: Hub) -> None:
        limits = hub.settings.limits
        self._hub, self._arena, self._limits = hub, hub.arena, limits
        self._schemas: dict[int, Registered] = {}
        self._sequences: dict[int, Opened] = {}
        self._most_bytes, self._most_pinned, most_leased = (
            int(hub.arena.num_bytes * share) for share in (limits.reserve_share, limits.pin_share, limits.lease_share)
        )
        self.leases = Leases(hub.arena, hub.settings.lease_s, limits.leases, hub.leased, most_leased)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def handlers(self) -> dict[type, Handler]:
        """What needs the arena, and therefore the Unix socket."""
        return {
            say.Register: self._register,
            say.Open: self._open,
            say.Close: self._close,
            say.Lookup: self._lookup,
            say.Bring: self._bring,
            say.Prefetch: self._prefetch,
            say.Renew: lambda ask: say.Alive(self.leases.renew(ask.leases)),
            say.Pin: lambda ask: say.Alive(self.leases.pin(ask.leases, self._most_pinned)),
            say.Release: self._release,
            say.Reserve: self._reserve,
            say.Commit: self._commit,
            say.Damaged: self._damaged,
        }

    def give_back(self) -> int:
        held = self.leases.give_back()
        self._sequences.clear()
        for schema in self._schemas.values():
            self._hub.models.release(schema)
        self._schemas.clear()
        if held:
            self._hub.changed()
        return held

    def expire(self, now: float) -> int:
        expired = self.leases.expire(now)
        if expired:
            self._hub.changed()
        return expired

    # ---- sequences

    def _register(self, ask: say.Register) -> Answer:
        if ask.schema not in self._schemas and len(self._schemas) >= self._limits.schemas:
            raise OverLimit(f"{self._limits.schemas} schemas are registered already by this connection")
        others = [each.num_bytes for number, each in self._schemas.items() if number != ask.schema]
        if sum(others) + sum(len(row.meta) for row in ask.rows) > SCHEMA_BYTES:
            raise OverLimit(f"more than {SCHEMA_BYTES} bytes of schemas by one connection")
        taken, before = self._hub.models.take(ask), self._schemas.get(ask.schema)
        self._schemas[ask.schema] = taken
        if before is not None:
            self._hub.models.release(before)
        return say.Done(len(ask.rows))

    def _open(self, ask: say.Open) -> Answer | Awaitable[Answer]:
        schema = self._schemas.get(ask.schema)
        if schema is None:
            raise BadRequest(f"schema {ask.schema} is not registered by this connection")
        others = [each for number, each in self._sequences.items() if number != ask.sequence]
        if len(others) >= self._limits.sequences:
            raise OverLimit(f"{self._limits.sequences} sequences are open already; close some")
        wanted = len(ask.prefixes) // PREFIX_BYTES * schema.num_rows
        if sum(each.num_keys for each in others) + wanted > self._limits.keys:
            raise OverLimit(f"more than {self._limits.keys} keys in open sequences; close some")
        opened = Opened(schema, ask)
        if wanted > STEP_KEYS:
            return self._open_in_steps(ask.sequence, opened)
        for _ in opened.steps():
            pass
        return self._is_open(ask.sequence, opened)

    async def _open_in_steps(self, number: int, opened: Opened) -> Answer:
        for _ in opened.steps():
            await asyncio.sleep(0)
        return self._is_open(number, opened)

    def _is_open(self, number: int, opened: Opened) -> Answer:
        self._sequences[number] = opened
        return say.Done(opened.num_chunks)

    def _opened(self, number: int) -> Opened:
        opened = self._sequences.get(number)
        if opened is None:
            raise BadRequest(f"sequence {number} is not open")
        return opened

    def _close(self, ask: say.Close) -> Answer:
        return say.Done(sum(self._sequences.pop(number, None) is not None for number in ask.sequences))

    # ---- reading

    def _lookup(self, ask: say.Lookup) -> Answer | Awaitable[Answer]:
        opened = self._opened(ask.sequence)
        if opened.num_keys > STEP_KEYS:
            return self._lookup_in_steps(opened, ask)
        return self._looked(opened, ask, self._arena.contains(opened.keys))

    async def _lookup_in_steps(self, opened: Opened, ask: say.Lookup) -> Answer:
        """From the end, since what is asked for last counts as the most recent, and beginnings are worth most."""
        near = np.zeros(opened.num_keys, bool)
        for first in reversed(range(0, opened.num_keys, STEP_KEYS)):
            near[first : first + STEP_KEYS] = self._arena.contains(opened.keys[first : first + STEP_KEYS])
            await asyncio.sleep(0)
        answer = self._looked(opened, ask, near)
        return await answer if isinstance(answer, Awaitable) else answer

    def _looked(self, opened: Opened, ask: say.Lookup, near: Flags) -> Answer | Awaitable[Answer]:
        position = opened.registered.position(_matrix(near, opened), opened.limit)
        if position == opened.limit or not self._hub.far.lanes:
            return self._found(opened, ask, position, near, near, late=False)
        return self._lookup_far(opened, near, ask)

    async def _lookup_far(self, opened: Opened, near: Flags, ask: say.Lookup) -> Answer:
        lacking, present = np.flatnonzero(~near), near.copy()
        keys = [opened.keys[i] for i in lacking.tolist()]
        present[lacking], late = await self._hub.in_thread("read", self._hub.far.where, keys, Budget.of(ask.budget_s))
        position = opened.registered.position(_matrix(present, opened), opened.limit)
        return self._found(opened, ask, position, near, present, late=late)

    def _found(
        self, opened: Opened, ask: say.Lookup, position: int, near: Flags, present: Flags, *, late: bool
    ) -> Answer:
        self._hub.asked(opened, position)
        self._hub.counts["unanswered"] += late
        if position < opened.limit:
            self._hub.missed(opened, near, None if late else present)
        bits = np.packbits(_matrix(present, opened)).tobytes()
        if not ask.lease or not position:
            return say.Found(position, bits, b"", late)
        rows = None if ask.rows is None else numbers(ask.rows, "<i4")
        starts = self._lease(opened, opened.registered.needs(position, rows), ask.lease, counted=True)
        return say.Found(position, bits, b"" if starts is None else packed(starts), late)

    def _lease(self, opened: Opened, pieces: Pieces, lease: int, *, counted: bool = False) -> NDArray[np.int64] | None:
        """Where pieces are, under a lease; None if leases have no room for them, which only `counted` ones need."""
        pinned = self._arena.pin(opened.keys_at(pieces))
        self._hub.counts["memory hits"] += len(pinned.slots)
        if not lease:
            self._arena.unpin(pinned.slots)
        elif not self.leases.lease(lease, pinned.slots, counted=counted):
            return None
        return pinned.starts

    def _bring(self, ask: say.Bring) -> Answer | Awaitable[Answer]:
        opened = self._opened(ask.sequence)
        pieces = opened.pieces(ask.pieces)
        self._check_bytes(opened.lengths_at(pieces))
        if self._hub.far.lanes and not self._arena.contains(opened.keys_at(pieces)).all():
            return self._bring_far(opened, pieces, ask.lease, ask.budget_s)
        return self._brought(opened, pieces, ask.lease)

    async def _bring_far(self, opened: Opened, pieces: Pieces, lease: int, budget_s: float | None) -> Answer:
        near = self._arena.contains(opened.keys_at(pieces))
        wants = opened.wants_at(pieces[~near])
        await self._hub.in_thread("read", self._hub.far.bring, wants, Budget.of(budget_s))
        return self._brought(opened, pieces, lease)

    def _brought(self, opened: Opened, pieces: Pieces, lease: int) -> Answer:
        starts = self._lease(opened, pieces, lease)
        assert starts is not None, "a lease that is not counted was refused"
        self._hub.counts["memory misses"] += int((starts == FAR).sum())
        return say.Places(packed(starts))

    def _prefetch(self, ask: say.Prefetch) -> Answer | Awaitable[Answer]:
        return self._bring(say.Bring(ask.sequence, 0, ask.pieces, ask.budget_s))

    def _release(self, ask: say.Release) -> Answer:
        count = self.leases.release(ask.leases)
        if count:
            self._hub.changed()
        return say.Done(count)

    # ---- writing

    def _reserve(self, ask: say.Reserve) -> Answer | Awaitable[Answer]:
        opened = self._opened(ask.sequence)
        pieces = opened.pieces(ask.pieces)
        keys, lengths = opened.keys_at(pieces), opened.lengths_at(pieces)
        self._check_bytes(lengths, self.leases.reserved_bytes)
        if self.leases.holds(ask.ticket) or len(self.leases) >= self._limits.leases:
            raise OverLimit(f"ticket {ask.ticket} is held already, or too many are; commit first")
        starts = self._arena.reserve(keys, lengths)
        if (starts == NO_ROOM).any() and (starts < 0).all() and self._arena.is_held:
            return self._reserve_later(ask, keys, lengths)
        return self._reserved(ask.ticket, keys, starts, lengths)

    async def _reserve_later(self, ask: say.Reserve, keys: Sequence[bytes], lengths: Sequence[int]) -> Answer:
        """Not even one had room. Whoever waits here holds nothing that another could be waiting for."""
        until = time.monotonic() + Budget.of(ask.budget_s).within(ROOM_S)
        while True:
            await self._hub.change(until - time.monotonic())
            starts = self._arena.reserve(keys, lengths)
            if (starts != NO_ROOM).any() or time.monotonic() >= until:
                return self._reserved(ask.ticket, keys, starts, lengths)

    def _reserved(
        self, ticket: int, keys: Sequence[bytes], starts: NDArray[np.int64], lengths: Sequence[int]
    ) -> Answer:
        extents = [each for each in zip(keys, starts.tolist(), lengths, strict=True) if each[1] >= 0]
        if extents:
            self.leases.reserve(ticket, extents)
        return say.Places(packed(starts))

    def _check_bytes(self, lengths: Sequence[int], held: int = 0) -> None:
        """Of a single blob there is no limit but the arena's."""
        wanted = held + sum(max(length, SECTOR) for length in lengths)
        if len(lengths) > 1 and wanted > self._most_bytes:
            raise OverLimit(f"{wanted} bytes at once, {self._most_bytes} at most; ask for less at a time")

    def _commit(self, ask: say.Commit) -> Answer | Awaitable[Answer]:
        if ask.abandon:
            count = self.leases.abandon(ask.ticket)
            self._hub.changed()
            return say.Done(count)
        keys = self.leases.commit(ask.ticket)
        self._hub.counts["memory stored"] += len(keys)
        self._hub.changed()
        return self._keep(keys, ask.budget_s) if self._hub.far.lanes else say.Done(len(keys))

    async def _keep(self, keys: Sequence[bytes], budget_s: float | None) -> Answer:
        """Queue for the farther tiers; a queue that is full makes its writers wait, for a while."""
        longest = max(lane.policy.deadline_s for lane in self._hub.far.lanes)
        await self._hub.in_thread("write", self._hub.far.keep, keys, Budget.of(budget_s).within(longest))
        return say.Done(len(keys))

    def _damaged(self, ask: say.Damaged) -> Awaitable[Answer]:
        opened = self._opened(ask.sequence)
        return self._forget_damaged(opened.wants_at(opened.pieces(ask.pieces)))

    async def _forget_damaged(self, wants: Sequence[Want]) -> Answer:
        """A client may be wrong: it may have read a place that was somebody else's by then. Farther tiers are checked
        when they are read."""
        damaged = await self._hub.in_thread("read", self._hub.far.forget_damaged, wants)
        self._hub.counts["memory damaged"] += damaged
        return say.Done(damaged)


def _matrix(flags: NDArray[np.bool_], opened: Opened) -> NDArray[np.bool_]:
    """`[rows, chunks]`"""
    return flags.reshape(opened.num_chunks, opened.registered.num_rows).T

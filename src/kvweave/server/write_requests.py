"""The requests of one client that write: reserve places in the arena, copy out of the inbox, commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.copying import Numbers
from kvweave.errors import BadRequest, OverLimit
from kvweave.server import protocol
from kvweave.server.inbox import Inbox, places_of
from kvweave.server.leases import Leases, check_bytes
from kvweave.server.open_sequence import OpenSequence
from kvweave.server.protocol import NO_ROOM, Handler, Reply, packed
from kvweave.server.server_state import ServerState
from kvweave.store.tier_executor import PATIENCE
from kvweave.store.tier_stack import BlobRequest, Budget

ROOM_S = 2.0
"""Seconds that a reservation waits for others to free space; `PATIENCE` times as long while they do, and it is too
little."""


class WriteRequests:
    """`sequence_of` returns an open sequence by its number."""

    def __init__(self, state: ServerState, leases: Leases, sequence_of: Callable[[int], OpenSequence]) -> None:
        self._state, self._arena, self._leases, self._sequence_of = state, state.arena, leases, sequence_of
        self._most_leases = state.settings.limits.leases
        self._most_bytes = state.arena.bytes_of(state.settings.limits.reserve_share)
        self._inbox: Inbox | None = None
        self._is_over = False

    def handlers(self) -> dict[type, Handler]:
        return {
            protocol.Reserve: self._reserve,
            protocol.CopyIn: self._copy_in,
            protocol.Commit: self._commit,
        }

    def open_inbox(self) -> Inbox | None:
        """The inbox of this connection, for its client; None where clients write to the arena."""
        if self._state.settings.inbox:
            self._inbox = Inbox(self._state.settings.inbox)
        return self._inbox

    def end(self) -> None:
        """The connection has ended. The inbox's memory is freed now, and not when the garbage collector finds it."""
        self._inbox, self._is_over = None, True

    def _reserve(self, request: protocol.Reserve) -> Reply | Awaitable[Reply]:
        sequence = self._sequence_of(request.sequence)
        pieces = sequence.pieces(request.pieces)
        keys, lengths = sequence.keys_at(pieces), sequence.lengths_at(pieces)
        check_bytes(lengths, self._leases.reserved_bytes, self._most_bytes)
        if self._leases.holds(request.reservation) or len(self._leases) >= self._most_leases:
            raise OverLimit(f"reservation {request.reservation} is held already, or too many are; commit first")
        starts = self._arena.reserve(keys, lengths)
        if not _is_without_room(starts):
            return self._reserved(request.reservation, keys, starts, lengths)
        return self._reserve_later(request, keys, lengths) if request.waits else protocol.Places(packed(starts))

    async def _reserve_later(self, request: protocol.Reserve, keys: Sequence[bytes], lengths: Sequence[int]) -> Reply:
        """No piece had room. Wait while others free some, and no longer than `ROOM_S` for the next to do so. A client
        that waits here holds nothing that another could wait for, so there is no deadlock."""
        budget, is_last = Budget.of(Budget.of(request.budget_s).within(PATIENCE * ROOM_S)), False
        while True:
            # both before the attempt: what is freed after it is not missed
            change, was_held = self._state.next_change, self._arena.is_held
            starts = self._arena.reserve(keys, lengths)
            may_wait = _is_without_room(starts) and (was_held or self._arena.is_held)
            if is_last or not may_wait:
                return self._reserved(request.reservation, keys, starts, lengths)
            is_last = not await _happens(change, budget.within(ROOM_S))

    def _reserved(
        self, reservation: int, keys: Sequence[bytes], starts: NDArray[np.int64], lengths: Sequence[int]
    ) -> Reply:
        extents = [each for each in zip(keys, starts.tolist(), lengths, strict=True) if each[1] >= 0]
        if extents:
            self._leases.reserve(reservation, extents, is_written=not self._state.settings.inbox)
        else:  # otherwise the client asks again for the others, when it has written these
            self._state.count_no_room(int((starts == NO_ROOM).sum()))
        return protocol.Places(packed(starts))

    def _copy_in(self, request: protocol.CopyIn) -> Awaitable[Reply]:
        sequence, inbox = self._sequence_of(request.sequence), self._inbox
        if inbox is None:
            raise BadRequest("this connection has no inbox: it writes to the arena itself")
        wants = sequence.wants_at(sequence.pieces(request.pieces))
        # shielded: when the connection ends, the thread still writes to the extents
        return asyncio.shield(self._copied_in(inbox, request.reservation, wants))

    async def _copied_in(self, inbox: Inbox, reservation: int, wants: Sequence[BlobRequest]) -> Reply:
        extents, is_intact = self._leases.take(reservation), False
        try:
            starts = places_of(extents, wants)
            places = [self._arena.view(start, want.num_bytes) for start, want in zip(starts, wants, strict=True)]
            is_intact = await self._state.in_thread("copy", inbox.copy, wants, places)
        finally:
            if is_intact and not self._is_over:
                self._leases.reserve(reservation, extents)
            else:
                self._leases.free(extents)
                self._state.changed()
        if not is_intact:
            raise BadRequest(
                f"reservation {reservation}: a blob in the inbox does not match its key; nothing is stored"
            )
        return protocol.Done(len(extents))

    def _commit(self, request: protocol.Commit) -> Reply | Awaitable[Reply]:
        if request.abandon:
            count = self._leases.abandon(request.reservation)
            self._state.changed()
            return protocol.Done(count)
        extents = self._leases.commit(request.reservation)
        keys = [key for key, _, _ in extents]
        self._state.counts["memory stored"] += len(keys)
        self._state.counts["memory written_bytes"] += sum(length for _, _, length in extents)
        self._state.changed()
        return self._keep(keys, request.budget_s) if self._state.backing.executors else protocol.Done(len(keys))

    def _keep(self, keys: Sequence[bytes], budget_s: float | None) -> Awaitable[Reply]:
        """Queue for the backing tiers; a full queue delays the reply, up to the deadline. Pinned from the commit on:
        what is evicted before it is queued would be lost."""
        budget = Budget.of(Budget.of(budget_s).within(self._state.backing.patience_s))
        # shielded: when the connection ends, the blobs are still queued, and unpinned
        return asyncio.shield(self._kept(keys, self._arena.pin(keys).slots, budget))

    async def _kept(self, keys: Sequence[bytes], slots: Numbers, budget: Budget) -> Reply:
        try:
            await self._state.in_thread("write", self._state.backing.keep, keys, budget)
        finally:
            self._arena.unpin(slots)
            self._state.changed()
        return protocol.Done(len(keys))


def _is_without_room(starts: Numbers) -> bool:
    """Whether no piece of a reservation has room, and some need it."""
    return bool((starts == NO_ROOM).any() and (starts < 0).all())


async def _happens(event: asyncio.Event, wait_s: float) -> bool:
    """Whether an event is set in time."""
    try:
        return await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False

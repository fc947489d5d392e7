"""The requests of one client and their replies. A reply that needs a backing tier, or must wait for space, is a
coroutine; all others are computed at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvweave.copying import Numbers
from kvweave.errors import BadRequest, OverLimit
from kvweave.server import protocol
from kvweave.server.inbox import Inbox, places_of
from kvweave.server.leases import Leases
from kvweave.server.open_sequence import OpenSequence, Pieces
from kvweave.server.protocol import NO_ROOM, NOT_IN_ARENA, Reply, numbers, packed
from kvweave.server.registered_model import RegisteredModel
from kvweave.server.server_state import ServerState
from kvweave.server.shared_arena import Pinned
from kvweave.store.arena_tier import STEP_KEYS
from kvweave.store.keys import PREFIX_BYTES, SHARD_ID_BYTES
from kvweave.store.striped_file import SECTOR
from kvweave.store.tier_executor import PATIENCE
from kvweave.store.tier_stack import UNLIMITED, BlobRequest, Budget

ROOM_S = 2.0
"""Seconds that a reservation waits for others to free space; `PATIENCE` times as long while they do, and it is too
little."""
AT_ONCE = Budget(0.0)
SCHEMA_BYTES = 8 << 20
"""Bytes that the registrations of one connection may take."""
Flags = NDArray[np.bool_]
"""One flag for each key of a sequence, chunk by chunk."""
Handler = Callable[[Any], Reply | Awaitable[Reply]]


class ClientSession:
    """A client's schemas, sequences, leases and reservations."""

    def __init__(self, state: ServerState) -> None:
        limits = state.settings.limits
        self._state, self._arena, self._limits = state, state.arena, limits
        self._schemas: dict[int, RegisteredModel] = {}
        self._sequences: dict[int, OpenSequence] = {}
        self._inbox: Inbox | None = None
        self._is_over = False
        self.last_tokens = 0
        """Of the prompt that was looked up last."""
        self._most_bytes, self._most_pinned, most_leased = (
            int(state.arena.num_bytes * share) for share in (limits.reserve_share, limits.pin_share, limits.lease_share)
        )
        self.leases = Leases(state.arena, state.settings.lease_s, limits.leases, state.leased, most_leased)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def handlers(self) -> dict[type, Handler]:
        """Handlers of requests that need the arena, and so come over the Unix socket only."""
        return {
            protocol.Register: self._register,
            protocol.Open: self._open,
            protocol.Close: self._close,
            protocol.Lookup: self._lookup,
            protocol.Fetch: self._fetch,
            protocol.PinLeases: lambda request: protocol.Alive(self.leases.pin(request.leases, self._most_pinned)),
            protocol.Release: self._release,
            protocol.Reserve: self._reserve,
            protocol.CopyIn: self._copy_in,
            protocol.Commit: self._commit,
            protocol.Damaged: self._damaged,
            protocol.RemovedSince: self._removed,
        }

    def open_inbox(self) -> Inbox | None:
        """The inbox of this connection, for its client; None where clients write to the arena."""
        if self._state.settings.inbox:
            self._inbox = Inbox(self._state.settings.inbox)
        return self._inbox

    def give_back(self) -> int:
        self._is_over = True
        self._inbox = None  # its memory is freed now, and not when the garbage collector finds this session
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

    # ---- reading

    def _lookup(self, request: protocol.Lookup) -> Reply | Awaitable[Reply]:
        sequence = self._sequence(request.sequence)
        if sequence.num_keys > STEP_KEYS:
            return self._lookup_in_steps(sequence, request)
        return self._looked_up(sequence, request, self._arena.contains(sequence.keys))

    async def _lookup_in_steps(self, sequence: OpenSequence, request: protocol.Lookup) -> Reply:
        in_arena = np.zeros(sequence.num_keys, bool)
        for first in range(0, sequence.num_keys, STEP_KEYS):
            in_arena[first : first + STEP_KEYS] = self._arena.contains(sequence.keys[first : first + STEP_KEYS])
            await asyncio.sleep(0)  # other clients are served between two steps
        reply = self._looked_up(sequence, request, in_arena)
        return await reply if isinstance(reply, Awaitable) else reply

    def _looked_up(self, sequence: OpenSequence, request: protocol.Lookup, in_arena: Flags) -> Reply | Awaitable[Reply]:
        position = sequence.registered.position(_matrix(in_arena, sequence), sequence.limit)
        if position == sequence.limit or not self._state.backing.executors:
            return self._found(sequence, request, position, in_arena, in_arena, late=False)
        keys = [sequence.keys[i] for i in np.flatnonzero(~in_arena).tolist()]
        if len(keys) <= STEP_KEYS:
            in_backing, is_unknown = self._state.backing.where(keys, AT_ONCE)
            if not is_unknown:
                return self._found_in_backing(sequence, request, in_arena, in_backing, late=False)
        return self._lookup_backing(sequence, request, in_arena, keys)

    async def _lookup_backing(
        self, sequence: OpenSequence, request: protocol.Lookup, in_arena: Flags, keys: Sequence[bytes]
    ) -> Reply:
        in_backing, late = await self._state.in_thread(
            "read", self._state.backing.where, keys, Budget.of(request.budget_s)
        )
        reply = self._found_in_backing(sequence, request, in_arena, in_backing, late=late)
        return await reply if isinstance(reply, Awaitable) else reply

    def _found_in_backing(
        self, sequence: OpenSequence, request: protocol.Lookup, in_arena: Flags, in_backing: Flags, *, late: bool
    ) -> Reply | Awaitable[Reply]:
        present = in_arena.copy()
        present[~in_arena] = in_backing
        position = sequence.registered.position(_matrix(present, sequence), sequence.limit)
        return self._found(sequence, request, position, in_arena, present, late=late)

    def _found(
        self,
        sequence: OpenSequence,
        request: protocol.Lookup,
        position: int,
        in_arena: Flags,
        present: Flags,
        *,
        late: bool,
    ) -> Reply | Awaitable[Reply]:
        self._state.asked(sequence, position)
        self.last_tokens = sequence.num_tokens
        self._state.counts["unanswered"] += late
        if position < sequence.limit:
            self._state.missed(sequence, in_arena, None if late else present)
        matrix = _matrix(present, sequence)
        bits = np.packbits(matrix).tobytes()
        if not position:
            return protocol.Found(position, bits, b"", late)
        shards = None if request.shards is None else numbers(request.shards, "<i4")
        needed = sequence.registered.needs(position, shards, matrix)
        found = protocol.Found(position, bits, b"", late)
        if sequence.num_keys > STEP_KEYS:
            return self._touch_beside(sequence, request, matrix, needed, found)
        # after the reply, for which the client waits; a request that comes later finds it done
        asyncio.get_running_loop().call_soon(self._touch, sequence, matrix, needed)
        return self._found_and_leased(sequence, request, needed, found)

    def _touch(self, sequence: OpenSequence, matrix: NDArray[np.bool_], needed: Pieces) -> None:
        """Tell all tiers what a hit uses, earlier chunks as worth more."""
        for used, is_hit in sequence.registered.uses(matrix, needed):
            if len(used):
                self._state.touch([sequence.keys[i] for i in used.tolist()], is_hit=is_hit)

    async def _touch_beside(
        self,
        sequence: OpenSequence,
        request: protocol.Lookup,
        matrix: NDArray[np.bool_],
        needed: Pieces,
        found: protocol.Found,
    ) -> Reply:
        """In a thread: other clients are served meanwhile."""
        await self._state.in_thread("touch", self._touch, sequence, matrix, needed)
        if not request.lease:
            return found
        pinned = await self._pin_in_steps(sequence, needed)
        return self._with_places(found, self._lease(pinned, request.lease, counted=True))

    async def _pin_in_steps(self, sequence: OpenSequence, pieces: Pieces) -> Pinned:
        steps: list[Pinned] = []
        try:
            for first in range(0, len(pieces) or 1, STEP_KEYS):
                steps.append(self._arena.pin(sequence.keys_at(pieces[first : first + STEP_KEYS]), is_use=False))
                await asyncio.sleep(0)  # other clients are served between two steps
        except BaseException:  # the connection ended
            for step in steps:
                self._arena.unpin(step.slots)
            raise
        return Pinned(*map(np.concatenate, zip(*steps, strict=True)))

    def _found_and_leased(
        self, sequence: OpenSequence, request: protocol.Lookup, needed: Pieces, found: protocol.Found
    ) -> Reply:
        if not request.lease:
            return found
        pinned = self._arena.pin(sequence.keys_at(needed), is_use=False)
        return self._with_places(found, self._lease(pinned, request.lease, counted=True))

    def _with_places(self, found: protocol.Found, starts: Numbers | None) -> Reply:
        return found if starts is None else msgspec.structs.replace(found, starts=packed(starts))

    def _lease(self, pinned: Pinned, lease: int, *, counted: bool = False) -> Numbers | None:
        """The places of pinned pieces, under a lease. If the quota of leases is used up, lookups (`counted`) get None,
        and fetches places that others may evict: what is copied from there is checked."""
        self._state.counts["memory hits"] += len(pinned.slots)
        num_bytes = int(pinned.lengths[pinned.starts != NOT_IN_ARENA].sum())
        if not lease:
            self._arena.unpin(pinned.slots)
            return pinned.starts
        if not self.leases.lease(lease, pinned.slots, counted=counted) and counted:
            return None
        self._state.counts["memory read_bytes"] += num_bytes
        return pinned.starts

    def _fetch(self, request: protocol.Fetch) -> Reply | Awaitable[Reply]:
        sequence = self._sequence(request.sequence)
        pieces = sequence.pieces(request.pieces)
        self._check_bytes(sequence.lengths_at(pieces), self.leases.fetched_bytes if request.lease else 0)
        if self._state.backing.executors and not self._arena.contains(sequence.keys_at(pieces)).all():
            return self._fetch_from_backing(sequence, pieces, request.lease, request.budget_s)
        return self._fetched(sequence, pieces, request.lease)

    async def _fetch_from_backing(
        self, sequence: OpenSequence, pieces: Pieces, lease: int, budget_s: float | None
    ) -> Reply:
        """Until all blobs are in the arena at once: others may evict some before they are leased."""
        backing, keys = self._state.backing, sequence.keys_at(pieces)
        budget = Budget.of(Budget.of(budget_s).within(backing.patience_s))
        while wants := sequence.wants_at(pieces[~self._arena.contains(keys)]):
            if not await self._state.in_thread("read", backing.fetch, wants, budget) or budget.is_spent:
                break
        return self._fetched(sequence, pieces, lease)

    def _fetched(self, sequence: OpenSequence, pieces: Pieces, lease: int) -> Reply:
        starts = self._lease(self._arena.pin(sequence.keys_at(pieces)), lease)
        assert starts is not None, "a fetch got no places"
        self._state.counts["memory misses"] += int((starts == NOT_IN_ARENA).sum())
        return protocol.Places(packed(starts))

    def _release(self, request: protocol.Release) -> Reply:
        count = self.leases.release(request.leases)
        if count:
            self._state.changed()
        return protocol.Done(count)

    async def _removed(self, request: protocol.RemovedSince) -> Reply:
        found = self._state.removals.since(request.after)
        ids = request.shards
        shards = {ids[at : at + SHARD_ID_BYTES] for at in range(0, len(ids), SHARD_ID_BYTES)}
        mine = [key for key in dict.fromkeys(found.keys) if key[-SHARD_ID_BYTES:] in shards]
        mine = [key for key, is_there in zip(mine, self._arena.contains(mine), strict=True) if not is_there]
        there, late = await self._state.in_thread("read", self._state.backing.where, mine, UNLIMITED)
        if late:  # what a tier did not say is not known to be gone
            return protocol.RemovedKeys(request.after, b"", complete=True)
        gone = b"".join(key for key, is_there in zip(mine, there, strict=True) if not is_there)
        return protocol.RemovedKeys(found.number, gone, found.complete)

    # ---- writing

    def _reserve(self, request: protocol.Reserve) -> Reply | Awaitable[Reply]:
        sequence = self._sequence(request.sequence)
        pieces = sequence.pieces(request.pieces)
        keys, lengths = sequence.keys_at(pieces), sequence.lengths_at(pieces)
        self._check_bytes(lengths, self.leases.reserved_bytes)
        if self.leases.holds(request.reservation) or len(self.leases) >= self._limits.leases:
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
            self.leases.reserve(reservation, extents, is_written=not self._state.settings.inbox)
        else:  # otherwise the client asks again for the others, when it has written these
            self._state.count_no_room(int((starts == NO_ROOM).sum()))
        return protocol.Places(packed(starts))

    def _copy_in(self, request: protocol.CopyIn) -> Awaitable[Reply]:
        sequence, inbox = self._sequence(request.sequence), self._inbox
        if inbox is None:
            raise BadRequest("this connection has no inbox: it writes to the arena itself")
        wants = sequence.wants_at(sequence.pieces(request.pieces))
        # shielded: when the connection ends, the thread still writes to the extents
        return asyncio.shield(self._copied_in(inbox, request.reservation, wants))

    async def _copied_in(self, inbox: Inbox, reservation: int, wants: Sequence[BlobRequest]) -> Reply:
        extents, is_intact = self.leases.take(reservation), False
        try:
            starts = places_of(extents, wants)
            places = [self._arena.view(start, want.num_bytes) for start, want in zip(starts, wants, strict=True)]
            is_intact = await self._state.in_thread("copy", inbox.copy, wants, places)
        finally:
            if is_intact and not self._is_over:
                self.leases.reserve(reservation, extents)
            else:
                self.leases.free(extents)
                self._state.changed()
        if not is_intact:
            raise BadRequest(
                f"reservation {reservation}: a blob in the inbox does not match its key; nothing is stored"
            )
        return protocol.Done(len(extents))

    def _check_bytes(self, lengths: Sequence[int], held: int = 0) -> None:
        """Raise `OverLimit` if these were more bytes than a connection may hold; a blob that is held alone is limited
        by the arena only."""
        wanted = held + sum(max(length, SECTOR) for length in lengths)
        if (held or len(lengths) > 1) and wanted > self._most_bytes:
            raise OverLimit(f"{wanted} bytes at once, {self._most_bytes} at most; ask for less, or release some first")

    def _commit(self, request: protocol.Commit) -> Reply | Awaitable[Reply]:
        if request.abandon:
            count = self.leases.abandon(request.reservation)
            self._state.changed()
            return protocol.Done(count)
        extents = self.leases.commit(request.reservation)
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

    def _damaged(self, request: protocol.Damaged) -> Awaitable[Reply]:
        sequence = self._sequence(request.sequence)
        return self._forget_damaged(sequence.wants_at(sequence.pieces(request.pieces)))

    async def _forget_damaged(self, wants: Sequence[BlobRequest]) -> Reply:
        """Check before deleting: the client may have read an extent after its lease expired. Backing tiers check
        what they read anyway."""
        damaged = await self._state.in_thread("read", self._state.backing.forget_damaged, wants)
        self._state.counts["memory damaged"] += damaged
        return protocol.Done(damaged)


def _is_without_room(starts: Numbers) -> bool:
    """Whether no piece of a reservation has room, and some need it."""
    return bool((starts == NO_ROOM).any() and (starts < 0).all())


async def _happens(event: asyncio.Event, wait_s: float) -> bool:
    """Whether an event is set in time."""
    try:
        return await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False


def _matrix(flags: NDArray[np.bool_], sequence: OpenSequence) -> NDArray[np.bool_]:
    """`[shards, chunks]`"""
    return flags.reshape(sequence.num_chunks, sequence.registered.num_shards).T

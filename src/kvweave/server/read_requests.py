"""The requests of one client that read: lookups, fetches, leases, and what it found damaged or removed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvweave.copying import Numbers
from kvweave.server import protocol
from kvweave.server.leases import Leases, check_bytes
from kvweave.server.open_sequence import OpenSequence, Pieces
from kvweave.server.protocol import NOT_IN_ARENA, Handler, Reply, numbers, packed
from kvweave.server.server_state import ServerState
from kvweave.server.shared_arena import Pinned
from kvweave.store.arena_tier import STEP_KEYS
from kvweave.store.keys import SHARD_ID_BYTES
from kvweave.store.tier_stack import UNLIMITED, BlobRequest, Budget

AT_ONCE = Budget(0.0)
Flags = NDArray[np.bool_]
"""One flag for each key of a sequence, chunk by chunk."""


class ReadRequests:
    """`sequence_of` returns an open sequence by its number."""

    def __init__(self, state: ServerState, leases: Leases, sequence_of: Callable[[int], OpenSequence]) -> None:
        self._state, self._arena, self._leases, self._sequence_of = state, state.arena, leases, sequence_of
        limits = state.settings.limits
        self._most_bytes = state.arena.bytes_of(limits.reserve_share)
        self._most_pinned = state.arena.bytes_of(limits.pin_share)
        self.last_tokens = 0
        """Of the prompt that was looked up last."""

    def handlers(self) -> dict[type, Handler]:
        return {
            protocol.Lookup: self._lookup,
            protocol.Fetch: self._fetch,
            protocol.PinLeases: lambda request: protocol.Alive(self._leases.pin(request.leases, self._most_pinned)),
            protocol.Release: self._release,
            protocol.Damaged: self._damaged,
            protocol.RemovedSince: self._removed,
        }

    def _lookup(self, request: protocol.Lookup) -> Reply | Awaitable[Reply]:
        sequence = self._sequence_of(request.sequence)
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
        if not self._leases.lease(lease, pinned.slots, counted=counted) and counted:
            return None
        self._state.counts["memory read_bytes"] += num_bytes
        return pinned.starts

    def _fetch(self, request: protocol.Fetch) -> Reply | Awaitable[Reply]:
        sequence = self._sequence_of(request.sequence)
        pieces = sequence.pieces(request.pieces)
        check_bytes(sequence.lengths_at(pieces), self._leases.fetched_bytes if request.lease else 0, self._most_bytes)
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
        count = self._leases.release(request.leases)
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

    def _damaged(self, request: protocol.Damaged) -> Awaitable[Reply]:
        sequence = self._sequence_of(request.sequence)
        return self._forget_damaged(sequence.wants_at(sequence.pieces(request.pieces)))

    async def _forget_damaged(self, wants: Sequence[BlobRequest]) -> Reply:
        """Check before deleting: the client may have read an extent after its lease expired. Backing tiers check
        what they read anyway."""
        damaged = await self._state.in_thread("read", self._state.backing.forget_damaged, wants)
        self._state.counts["memory damaged"] += damaged
        return protocol.Done(damaged)


def _matrix(flags: NDArray[np.bool_], sequence: OpenSequence) -> NDArray[np.bool_]:
    """`[shards, chunks]`"""
    return flags.reshape(sequence.num_chunks, sequence.registered.num_shards).T

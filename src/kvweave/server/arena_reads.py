"""Verified payloads out of the daemon's arena; missing blobs are fetched first, in batches, under a lease each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import takewhile

from kvweave.errors import ServerError
from kvweave.server import protocol
from kvweave.server.arena_copier import ArenaCopier
from kvweave.server.client import Client
from kvweave.server.prompt_session import PromptSession, daemon_budget, reply_timeout
from kvweave.server.protocol import NOT_IN_ARENA, numbers, packed
from kvweave.server.remote_hit import RemoteHit
from kvweave.server.save_operation import ArenaLayout
from kvweave.store import HashedPrompt
from kvweave.store.keys import Bytes
from kvweave.store.operations import ChunkRef
from kvweave.store.tier_stack import Budget


class ArenaReads:
    """One store's reads. `or_miss` is a context that turns errors of the daemon into misses."""

    def __init__(
        self, layout: ArenaLayout, copier: ArenaCopier, or_miss: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._layout, self._copier, self._or_miss = layout, copier, or_miss

    def fetched(
        self, session: PromptSession, hit: RemoteHit, pieces: Sequence[ChunkRef], budget: Budget
    ) -> Iterator[tuple[ChunkRef, Bytes]]:
        """The payloads of the pieces that could be fetched in time."""
        for batch in self._layout.batches(session.client, pieces, budget):
            if budget.is_spent:
                return
            with self._or_miss(), self._layout.allowed(session.client, batch, budget):
                lease, until = session.client.number(), time.monotonic() + session.client.welcome.lease_s
                try:
                    places, generation = fetch_to_arena(session, hit.prompt, batch, lease, budget)
                    yield from self.copies(session, hit, places, until, generation, budget)
                finally:  # also when the caller stops early; a connection made since knows no such lease
                    post_release(session.client, lease, session.client.generation)

    def copies(
        self,
        session: PromptSession,
        hit: RemoteHit,
        places: dict[ChunkRef, int],
        until: float,
        generation: int,
        budget: Budget,
    ) -> Iterator[tuple[ChunkRef, Bytes]]:
        """The payloads that are intact. Damaged ones are reported to the daemon, unless the lease had expired: then the
        extent may hold another blob."""
        if not places:
            return
        arena, layout = session.arena(generation, budget), self._layout
        pieces = layout.side_by_side([*places], hit.target)
        in_time = takewhile(lambda _: not budget.is_spent, pieces)
        jobs = (layout.job(arena, hit.prompt, *piece, places[piece]) for piece in in_time)
        damaged = []
        for piece, (_, payload) in zip(pieces, self._copier.reads(jobs, len(pieces), hit.target, until), strict=False):
            if payload is None:
                damaged.append(piece)
            else:
                yield piece, payload
        if damaged and time.monotonic() < until:
            with self._or_miss():
                what = packed(damaged, "<i4")
                session.ask(hit.prompt, lambda sequence: protocol.Damaged(sequence, what), budget, generation)


def fetch_to_arena(
    session: PromptSession, prompt: HashedPrompt, pieces: Sequence[ChunkRef], lease: int, budget: Budget
) -> tuple[dict[ChunkRef, int], int]:
    """The places of the pieces that could be fetched, and the generation of the connection that holds them."""

    def request(sequence: int) -> protocol.Message:
        return protocol.Fetch(sequence, lease, packed(pieces, "<i4"), daemon_budget(budget))

    reply, generation = session.ask(prompt, request, budget)
    starts = numbers(session.client.check(reply, protocol.Places).starts).tolist()
    return {piece: start for piece, start in zip(pieces, starts, strict=True) if start != NOT_IN_ARENA}, generation


def release_lease(client: Client, lease: int, generation: int, budget: Budget) -> None:
    """Let the daemon evict what a lease holds. A lease of an earlier connection ended with it."""
    if lease and generation == client.generation:
        with suppress(ServerError):  # then the lease ends by its time
            client.ask(protocol.Release([lease]), protocol.Done, reply_timeout(budget))


def post_release(client: Client, lease: int, generation: int) -> None:
    """As `release_lease`, without waiting for the reply."""
    if lease and generation == client.generation:
        client.post(protocol.Release([lease]))

"""A store behind a daemon, with the face of `Store`. Bytes go between this process and the arena; the daemon is told.

When the daemon is gone, lookups find nothing and saves are dropped, both counted; it is tried again later.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import LeaseExpired, ServerError, ServerGone, ServerTimeout
from kvweave.server import protocol
from kvweave.server.arena_copier import ArenaCopier, Target
from kvweave.server.client import Client
from kvweave.server.description import Description
from kvweave.server.prompt_session import GRACE_S, PromptSession, daemon_budget, reply_timeout
from kvweave.server.protocol import NOT_IN_ARENA, numbers, packed
from kvweave.server.remote_hit import PinnedHit, RemoteHit
from kvweave.server.report import Report
from kvweave.server.save_operation import ArenaLayout, SaveOperation
from kvweave.store import AnyStore, HashedPrompt, Saved, Schema, Shard, Sink, Source, StoreStats
from kvweave.store.base import ChunkRef, in_thread
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.tier_stack import Budget

log = logging.getLogger("kvweave.server")


class RemoteStore(AnyStore[RemoteHit]):
    """KV of one model's chunks in a daemon. Many threads may use it; `workers` of its own copy large blobs."""

    def __init__(self, schema: Schema, client: Client | str | Path, *, model: str = "", workers: int = 2) -> None:
        super().__init__(schema)
        self.client = client if isinstance(client, Client) else Client(client, name=f"{model} {os.getpid()}".strip())
        self._prompt_session = PromptSession(self.client, schema, model)
        self._copier = ArenaCopier(schema, workers)
        self._arena = ArenaLayout(self._prompt_session, schema)
        self._unflushed: set[bytes] = set()
        self._refusals: set[str] = set()
        register_after_fork(self)

    # ---- reading

    def lookup(
        self,
        prompt: HashedPrompt,
        *,
        shards: Sequence[int] | None = None,
        lease: bool = True,
        budget_s: float | None = None,
    ) -> RemoteHit:
        """The longest prefix from which every group can go on. What it needs of `shards` (default: all) stays in the
        arena until the hit is loaded or released, the same prompt is looked up again, or the lease is over.

        Without a lease, or beyond the leases' share of the arena, it may be evicted before it is loaded: `load` asks
        again for what it needs, and shortens if that is gone."""
        shape = (len(self.schema.shards), prompt.num_chunks)
        hit = RemoteHit(prompt, 0, np.zeros(shape, bool), np.full(shape, NOT_IN_ARENA, np.int64))
        if prompt.num_chunks:
            with self._or_miss():
                hit = self._lookup(hit, shards, Budget.of(budget_s), lease=lease)
        self._count(lookups=1, tokens_asked=prompt.num_tokens, tokens_found=hit.position)
        return hit

    def _lookup(self, empty: RemoteHit, shards: Sequence[int] | None, budget: Budget, *, lease: bool) -> RemoteHit:
        asked_at, wanted = time.monotonic(), None if shards is None else packed(sorted(shards), "<i4")

        def question(sequence: int, number: int = 0) -> protocol.Message:
            return protocol.Lookup(sequence, number, wanted, daemon_budget(budget))

        if lease:
            answer, generation, number = self._prompt_session.lease(empty.prompt, question, budget)
        else:
            (answer, generation), number = self._prompt_session.ask(empty.prompt, question, budget), 0
        found = self.client.check(answer, protocol.Found)
        if found.late:
            self._count(unanswered=1)
        shape, places = empty.present.shape, empty.places
        bits = np.unpackbits(np.frombuffer(found.present, np.uint8), count=empty.present.size)
        present = bits.reshape(shape).astype(bool)
        if found.starts:
            at = np.array(
                [*self._needs(found.position, range(shape[0]) if shards is None else shards, present)], np.int64
            )
            places[at[:, 0], at[:, 1]] = numbers(found.starts)
        until, held = asked_at + self.client.welcome.lease_s, number if found.starts else 0
        return RemoteHit(empty.prompt, found.position, present, places, held, until, generation)

    def load(
        self, hit: RemoteHit, sink: Sink, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> int:
        budget = Budget.of(budget_s)
        try:
            return super().load(hit, sink, shards=shards, budget_s=budget_s)
        finally:
            self._release(hit, budget)

    def load_into(
        self, hit: RemoteHit, target: Target, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> int:
        """As `load`, but straight into memory that `target` names: one copy less. Beyond the position that is returned
        it may hold anything."""
        return self.load(replace(hit, target=target), _ignore, shards=shards, budget_s=budget_s)

    def release(self, hit: RemoteHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict what a hit held; may be called twice."""
        self._release(hit, Budget.of(budget_s))

    def _release(self, hit: RemoteHit | PinnedHit, budget: Budget) -> None:
        if hit.lease and hit.generation == self.client.generation:
            with suppress(ServerError):
                self.client.ask(protocol.Release([hit.lease]), protocol.Done, reply_timeout(budget))

    def _fetch(self, hit: RemoteHit, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        held = hit.generation == self.client.generation and time.monotonic() < hit.until
        near = {piece: int(hit.places[piece]) for piece in pieces if held and hit.places[piece] != NOT_IN_ARENA}
        yield from self._copies(hit, near, hit.until, hit.generation, budget)
        backing = [piece for piece in pieces if piece not in near]
        if backing:
            self._release(hit, budget)  # what is copied must not take the room that the rest needs
        for batch in self._arena.batches(backing):
            if budget.is_spent:
                return
            with self._or_miss():
                lease, until = self.client.number(), time.monotonic() + self.client.welcome.lease_s
                places, generation = self._fetch_to_arena(hit.prompt, batch, lease, budget)
                yield from self._copies(hit, places, until, generation, budget)
                self._release(replace(hit, lease=lease, generation=generation), budget)

    def _fetch_to_arena(
        self, prompt: HashedPrompt, pieces: Sequence[ChunkRef], lease: int, budget: Budget
    ) -> tuple[dict[ChunkRef, int], int]:
        """Where those that could be had are now, and the generation of the connection that holds them."""

        def question(sequence: int) -> protocol.Message:
            return protocol.Fetch(sequence, lease, packed(pieces, "<i4"), daemon_budget(budget))

        answer, generation = self._prompt_session.ask(prompt, question, budget)
        starts = numbers(self.client.check(answer, protocol.Places).starts).tolist()
        return {piece: start for piece, start in zip(pieces, starts, strict=True) if start != NOT_IN_ARENA}, generation

    def _copies(
        self, hit: RemoteHit, places: dict[ChunkRef, int], until: float, generation: int, budget: Budget
    ) -> Iterator[tuple[ChunkRef, Bytes]]:
        """What is whole. Of what is not the daemon is told, unless the place may have been somebody else's by then."""
        arena = self.client.arena  # if it is another one by now, nothing in it will pass for what is wanted
        in_time = takewhile(lambda _: not budget.is_spent, places.items())
        jobs = (self._arena.job(arena, hit.prompt, *piece, start) for piece, start in in_time)
        damaged = []
        for piece, (_, payload) in zip(places, self._copier.reads(jobs, hit.target), strict=False):
            if payload is None:
                damaged.append(piece)
            else:
                yield piece, payload
        if damaged and time.monotonic() < until:
            with self._or_miss():
                what = packed(damaged, "<i4")
                self._prompt_session.ask(
                    hit.prompt, lambda sequence: protocol.Damaged(sequence, what), budget, generation
                )

    def _wanted(self, hit: RemoteHit, shards: Sequence[int] | None) -> tuple[Sequence[int], NDArray[np.bool_]]:
        """The rows that matter, and what is near if nothing of them is: all of the others."""
        wanted = range(len(self.schema.shards)) if shards is None else shards
        near = np.zeros_like(hit.present)
        near[[shard for shard in range(len(near)) if shard not in wanted]] = True
        return wanted, near

    def prefetch(
        self, hit: RemoteHit, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Future[int]:
        """Bring what a hit needs into the arena, over a connection of its own; the position that then is near."""
        return in_thread("kvweave-prefetch", self._prefetched, hit, shards, Budget.of(budget_s))

    def _prefetched(self, hit: RemoteHit, shards: Sequence[int] | None, budget: Budget) -> int:
        wanted, near = self._wanted(hit, shards)
        with self._or_miss(), self.client.again(arena=False, timeout_s=reply_timeout(budget)) as client:
            other = RemoteStore(self.schema, client, model=self._prompt_session.model, workers=1)
            for batch in self._arena.batches([*self._needs(hit.position, wanted, hit.present)]):
                for piece in other._fetch_to_arena(hit.prompt, batch, 0, budget)[0]:
                    near[piece] = True
        return self._position(hit.prompt, near, hit.position)

    def pin(self, hit: RemoteHit, *, shards: Sequence[int] | None = None, budget_s: float | None = None) -> PinnedHit:
        """Bring what a hit needs into the arena, and keep it there until `unpin`, or until this connection ends.

        Raises `OverLimit` for more than the daemon lets one connection pin, `LeaseExpired` if what was brought had its
        time before it was pinned, and `ServerGone`; then nothing is pinned. A hit of nothing is a pin of nothing.
        """
        if not hit.position:
            return PinnedHit(0, 0, 0)
        wanted, near = self._wanted(hit, shards)
        lease, generation, budget = self.client.number(), self.client.generation, Budget.of(budget_s)
        try:
            for batch in self._arena.batches([*self._needs(hit.position, wanted, hit.present)]):
                for piece in self._fetch_to_arena(hit.prompt, batch, lease, budget)[0]:
                    near[piece] = True
            alive = self.client.ask(protocol.PinLeases([lease]), protocol.Alive, reply_timeout(budget)).leases
            if self.client.generation != generation:
                raise ServerGone("the connection was lost, and what was pinned with it")
            if lease not in alive:
                raise LeaseExpired("what was brought had its time before it was pinned; nothing is pinned")
        except ServerError:
            self._release(PinnedHit(0, lease, self.client.generation), budget)
            raise
        return PinnedHit(self._position(hit.prompt, near, hit.position), lease, generation)

    def unpin(self, pin: PinnedHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict it; may be called twice."""
        self._release(pin, Budget.of(budget_s))

    # ---- writing

    def save(
        self,
        prompt: HashedPrompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> Saved:
        pieces, saving = self._to_keep(prompt, source, points, shards), SaveOperation(self._arena, self._copier, source)
        with self._or_miss():
            saving.save(prompt, pieces, Budget.of(budget_s))
        self._unflushed |= saving.daemons
        return Saved(saving.stored, saving.present, len(pieces) - saving.stored - saving.present)

    # ---- the rest

    def report(self, *, budget_s: float | None = None) -> Report:
        """What the daemon says of itself. Raises `ServerGone`."""
        return self.client.ask(protocol.StatsRequest(), protocol.StatsReply, budget_s).report

    def describe(self, *, budget_s: float | None = None) -> Description:
        """What the daemon is, and what was registered as this store's model. Raises `ServerGone`."""
        return self.client.ask(
            protocol.Describe(self._prompt_session.model), protocol.DescribeReply, budget_s
        ).description

    def stats(self, *, budget_s: float | None = None) -> StoreStats:
        with self._or_miss():
            return self._stats(self.report(budget_s=budget_s).tiers)
        return self._stats(())

    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait until what was saved since the last time is in the daemon's persistent tiers. False, too, if some of it
        was saved to a daemon that ended since: it may have died with it. Others may ask meanwhile."""
        with self._or_miss(), self.client.again(arena=False, timeout_s=wait_s) as client:
            saved = {*self._unflushed}
            done = client.ask(protocol.Flush(wait_s), protocol.Done, wait_s + GRACE_S).count
            self._unflushed -= saved
            return bool(done) and saved <= {client.welcome.boot}
        return False

    def close(self, wait_s: float = 60.0) -> None:  # noqa: ARG002 - what is queued the daemon writes
        """Give back what is held; what was saved is the daemon's."""
        self.client.close()
        self._copier.close()

    def after_fork(self) -> None:
        """In a forked child: whoever held the lock is not here any more."""
        self._lock = threading.Lock()

    def _or_miss(self) -> _OrMiss:
        return _OrMiss(self)

    @property
    def unreachable(self) -> int:
        """How often the daemon was gone, or said no: what was asked then was a miss, what was saved is lost."""
        return self._counts["unreachable"]

    def _missed(self, error: ServerError) -> None:
        """Count it. What the daemon refuses, it refuses every time: the log says so, once."""
        self._count(**{"unanswered" if isinstance(error, ServerTimeout) else "unreachable": 1})
        words = f"{type(error).__name__}: {error}"
        if not isinstance(error, ServerGone | LeaseExpired) and type(error).__name__ not in self._refusals:
            self._refusals.add(type(error).__name__)
            log.warning("the daemon refuses, and what was asked is a miss: %s", words)


class _OrMiss:
    """A daemon that is gone, or says no, is a miss."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, ServerError):
            return False
        self._store._missed(error)
        return True


def _ignore(shard: Shard, chunk: int, payload: Bytes) -> None:
    """A sink for what is where it shall be already."""

"""A store behind a daemon, with the interface of `Store`. This process copies to and from the arena; the daemon only
gets messages.

While the daemon is gone, lookups find nothing and saves are dropped; both are counted, and connecting is tried again.
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
from kvweave.store import AnyStore, HashedPrompt, Saved, Schema, Sink, Source, StoreStats
from kvweave.store.any_store import ChunkRef, discard, in_thread
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.tier_stack import Budget

log = logging.getLogger("kvweave.server")


class RemoteStore(AnyStore[RemoteHit]):
    """The KV of one model's chunks in a daemon. Thread-safe; large blobs are copied by `workers` threads."""

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
        """The longest prefix at which every group can resume. What it needs of `shards` (default: all) stays in the
        arena until the hit is loaded or released, the same prompt is looked up again, or the lease expires.

        Without a lease, or when the quota of leases is used up, blobs may be evicted before they are loaded: `load`
        then fetches them again, and falls back to a shorter hit if they are gone.
        """
        shape = (len(self.schema.shards), prompt.num_chunks)
        hit = RemoteHit(prompt, 0, np.zeros(shape, bool), np.full(shape, NOT_IN_ARENA, np.int64))
        if prompt.num_chunks:
            with self._or_miss():
                hit = self._lookup(hit, shards, Budget.of(budget_s), lease=lease)
        self._count(lookups=1, tokens_asked=prompt.num_tokens, tokens_found=hit.position)
        return hit

    def _lookup(self, empty: RemoteHit, shards: Sequence[int] | None, budget: Budget, *, lease: bool) -> RemoteHit:
        asked_at, wanted = time.monotonic(), None if shards is None else packed(sorted(shards), "<i4")

        def request(sequence: int, number: int = 0) -> protocol.Message:
            return protocol.Lookup(sequence, number, wanted, daemon_budget(budget))

        if lease:
            reply, generation, number = self._prompt_session.lease(empty.prompt, request, budget)
        else:
            (reply, generation), number = self._prompt_session.ask(empty.prompt, request, budget), 0
        found = self.client.check(reply, protocol.Found)
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
        """As `load`, but directly into memory that `target` returns, which saves a copy. What it holds beyond the
        returned position is undefined."""
        return self.load(replace(hit, target=target), discard, shards=shards, budget_s=budget_s)

    def release(self, hit: RemoteHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict what a hit holds; calling it twice is fine."""
        self._release(hit, Budget.of(budget_s))

    def _release(self, hit: RemoteHit | PinnedHit, budget: Budget) -> None:
        if hit.lease and hit.generation == self.client.generation:
            with suppress(ServerError):
                self.client.ask(protocol.Release([hit.lease]), protocol.Done, reply_timeout(budget))

    def _fetch(self, hit: RemoteHit, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        held = hit.generation == self.client.generation and time.monotonic() < hit.until
        in_arena = {piece: int(hit.places[piece]) for piece in pieces if held and hit.places[piece] != NOT_IN_ARENA}
        yield from self._copies(hit, in_arena, hit.until, hit.generation, budget)
        missing = [piece for piece in pieces if piece not in in_arena]
        if missing:
            self._release(hit, budget)  # the lease must not hold arena space that the remaining blobs need
        for batch in self._arena.batches(missing):
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
        """The places of the pieces that could be fetched, and the generation of the connection that holds them."""

        def request(sequence: int) -> protocol.Message:
            return protocol.Fetch(sequence, lease, packed(pieces, "<i4"), daemon_budget(budget))

        reply, generation = self._prompt_session.ask(prompt, request, budget)
        starts = numbers(self.client.check(reply, protocol.Places).starts).tolist()
        return {piece: start for piece, start in zip(pieces, starts, strict=True) if start != NOT_IN_ARENA}, generation

    def _copies(
        self, hit: RemoteHit, places: dict[ChunkRef, int], until: float, generation: int, budget: Budget
    ) -> Iterator[tuple[ChunkRef, Bytes]]:
        """The payloads that are intact. Damaged ones are reported to the daemon, unless the lease had expired: then
        the extent may hold another blob."""
        arena = self.client.arena  # after a reconnect this may be another daemon's arena: its blobs fail the check
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
        """The wanted shards, and flags `[shards, chunks]` in which all shards that this rank does not read are
        marked as present."""
        wanted = range(len(self.schema.shards)) if shards is None else shards
        in_arena = np.zeros_like(hit.present)
        in_arena[[shard for shard in range(len(in_arena)) if shard not in wanted]] = True
        return wanted, in_arena

    def prefetch(
        self, hit: RemoteHit, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Future[int]:
        """Fetch what a hit needs into the arena, over a separate connection; the result is the position that the
        arena then has."""
        return in_thread("kvweave-prefetch", self._prefetched, hit, shards, Budget.of(budget_s))

    def _prefetched(self, hit: RemoteHit, shards: Sequence[int] | None, budget: Budget) -> int:
        wanted, in_arena = self._wanted(hit, shards)
        with self._or_miss(), self.client.again(arena=False, timeout_s=reply_timeout(budget)) as client:
            other = RemoteStore(self.schema, client, model=self._prompt_session.model, workers=1)
            for batch in self._arena.batches([*self._needs(hit.position, wanted, hit.present)]):
                for piece in other._fetch_to_arena(hit.prompt, batch, 0, budget)[0]:
                    in_arena[piece] = True
        return self._position(hit.prompt, in_arena, hit.position)

    def pin(self, hit: RemoteHit, *, shards: Sequence[int] | None = None, budget_s: float | None = None) -> PinnedHit:
        """Fetch what a hit needs into the arena, and keep it there until `unpin`, or until this connection ends.

        Raises `OverLimit` for more than one connection may pin, `LeaseExpired` if the lease expired before it was
        pinned, and `ServerGone`; in each case nothing is pinned. Pinning an empty hit does nothing.
        """
        if not hit.position:
            return PinnedHit(0, 0, 0)
        wanted, in_arena = self._wanted(hit, shards)
        lease, generation, budget = self.client.number(), self.client.generation, Budget.of(budget_s)
        try:
            for batch in self._arena.batches([*self._needs(hit.position, wanted, hit.present)]):
                for piece in self._fetch_to_arena(hit.prompt, batch, lease, budget)[0]:
                    in_arena[piece] = True
            alive = self.client.ask(protocol.PinLeases([lease]), protocol.Alive, reply_timeout(budget)).leases
            if self.client.generation != generation:
                raise ServerGone("the connection was lost, and what was pinned with it")
            if lease not in alive:
                raise LeaseExpired("the lease expired before it was pinned; nothing is pinned")
        except ServerError:
            self._release(PinnedHit(0, lease, self.client.generation), budget)
            raise
        return PinnedHit(self._position(hit.prompt, in_arena, hit.position), lease, generation)

    def unpin(self, pin: PinnedHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict what was pinned; calling it twice is fine."""
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
        """The daemon's report. Raises `ServerGone`."""
        return self.client.ask(protocol.StatsRequest(), protocol.StatsReply, budget_s).report

    def describe(self, *, budget_s: float | None = None) -> Description:
        """The daemon's description, with the registrations of this store's model. Raises `ServerGone`."""
        return self.client.ask(
            protocol.Describe(self._prompt_session.model), protocol.DescribeReply, budget_s
        ).description

    def stats(self, *, budget_s: float | None = None) -> StoreStats:
        with self._or_miss():
            return self._stats(self.report(budget_s=budget_s).tiers)
        return self._stats(())

    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait until everything saved since the last flush is in the daemon's persistent tiers. False also if a
        daemon ended since: what it had not written is lost. Uses a separate connection, so that other calls are not
        delayed."""
        with self._or_miss(), self.client.again(arena=False, timeout_s=wait_s) as client:
            saved = {*self._unflushed}
            done = client.ask(protocol.Flush(wait_s), protocol.Done, wait_s + GRACE_S).count
            self._unflushed -= saved
            return bool(done) and saved <= {client.welcome.boot}
        return False

    def close(self, wait_s: float = 60.0) -> None:  # noqa: ARG002 - the daemon finishes queued writes
        """Release what is held, and disconnect. Saved blobs stay in the daemon."""
        self.client.close()
        self._copier.close()

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock does not exist."""
        self._lock = threading.Lock()

    def _or_miss(self) -> _OrMiss:
        return _OrMiss(self)

    @property
    def unreachable(self) -> int:
        """How often the daemon was gone or refused a request: lookups were misses then, and saves were lost."""
        return self._counts["unreachable"]

    def _missed(self, error: ServerError) -> None:
        """Count a failed request. A refusal is logged once for each kind of error, since it will be repeated."""
        self._count(**{"unanswered" if isinstance(error, ServerTimeout) else "unreachable": 1})
        words = f"{type(error).__name__}: {error}"
        if not isinstance(error, ServerGone | LeaseExpired) and type(error).__name__ not in self._refusals:
            self._refusals.add(type(error).__name__)
            log.warning("the daemon refuses, and what was asked is a miss: %s", words)


class _OrMiss:
    """Turns errors of the daemon into misses."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, ServerError):
            return False
        self._store._missed(error)
        return True

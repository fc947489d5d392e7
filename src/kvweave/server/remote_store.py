"""A store behind a daemon, with the interface of `Store`. This process copies to and from the arena; the daemon only
gets messages.

While the daemon is gone, lookups find nothing and saves are dropped; both are counted, and connecting is tried again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import LeaseExpired, ServerError, ServerGone, ServerTimeout
from kvweave.server import protocol
from kvweave.server.arena_copier import ArenaCopier, Target
from kvweave.server.arena_reads import ArenaReads, fetch_to_arena, post_release, release_lease
from kvweave.server.client import Client
from kvweave.server.description import Description
from kvweave.server.prompt_session import GRACE_S, PromptSession, daemon_budget, reply_timeout
from kvweave.server.protocol import NOT_IN_ARENA, numbers, packed
from kvweave.server.remote_hit import PinnedHit, RemoteHit
from kvweave.server.report import Report, printable
from kvweave.server.save_operation import ArenaLayout, GatheredReservation, SaveOperation
from kvweave.server.settings import NAME_LENGTH
from kvweave.store import BaseStore, GatheredSave, HashedPrompt, Operation, Schema, Sink, Source, StoreStats
from kvweave.store.blocking_store import discard
from kvweave.store.keys import KEY_BYTES, Bytes
from kvweave.store.operations import ChunkRef
from kvweave.store.page_payloads import StagedScatter
from kvweave.store.removals import Removals
from kvweave.store.results import SaveOutcome
from kvweave.store.ticket import TicketContent
from kvweave.store.tier_stack import Budget

log = logging.getLogger("kvweave.server")
LOOKUPS_AT_ONCE = 16
"""Prompts that are looked up in one round trip, at most: requests of other clients wait until all are answered."""


class RemoteStore(BaseStore[RemoteHit]):
    """The KV of one model's chunks in a daemon. Thread-safe; large blobs are copied by `workers` threads.

    Submitted operations have connections of their own, made when they are first needed: one for loads and one for
    saves, so that a lookup never waits for either at the daemon.
    """

    def __init__(self, schema: Schema, client: Client | str | Path, *, model: str = "", workers: int = 2) -> None:
        super().__init__(schema)
        model = printable(model)[-NAME_LENGTH:]  # of a path the end says more
        name = f"{model} {os.getpid()}".strip()[-NAME_LENGTH:]
        self.client = client if isinstance(client, Client) else Client(client, name=name)
        self._disconnect = self.client.close if isinstance(client, Client) else self.client.retire
        self._prompt_session = PromptSession(self.client, schema, model)
        self._beside: dict[str, PromptSession] = {}
        self._layout = ArenaLayout(schema)
        self._copier = ArenaCopier(schema, workers)
        self._reads = ArenaReads(self._layout, self._copier, self.or_miss)
        self._unflushed: set[bytes] = set()
        self._refusals: set[str] = set()
        self._boot = b""
        """The start of the daemon that was asked for removals."""

    def _session(self, kind: str) -> PromptSession:
        """The connection for loads, or for saves; the client's own until something was submitted."""
        return self._beside.get(kind, self._prompt_session)

    def _begin(self, kind: str, budget: Budget) -> None:
        """Make a connection for what is submitted; where that cannot be, the client's own serves it."""
        if kind not in self._beside:
            with suppress(ServerError):
                client = self.client.again(arena=False, timeout_s=reply_timeout(budget))
                session = PromptSession(client, self.schema, self._prompt_session.model, self.client)
                if self._beside.setdefault(kind, session) is not session:
                    client.close()

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
        return self._lookup_all([prompt], shards, Budget.of(budget_s), lease=lease)[0]

    def _lookup_all(
        self, prompts: Sequence[HashedPrompt], shards: Sequence[int] | None, budget: Budget, *, lease: bool
    ) -> list[RemoteHit]:
        for prompt in prompts:
            self._check(prompt)
        hits = [self._no_hit(prompt) for prompt in prompts]
        asked = [number for number, hit in enumerate(hits) if hit.prompt.num_chunks]
        for first in range(0, len(asked), LOOKUPS_AT_ONCE):
            some = asked[first : first + LOOKUPS_AT_ONCE]
            with self.or_miss(), self._latency["lookup"].timed():
                found = self._lookup(prompts=[prompts[i] for i in some], shards=shards, budget=budget, lease=lease)
                for number, hit in zip(some, found, strict=True):
                    hits[number] = hit
        for hit in hits:
            self._count(lookups=1, tokens_asked=hit.prompt.num_tokens, tokens_found=hit.position)
        return hits

    def _no_hit(self, prompt: HashedPrompt) -> RemoteHit:
        shape = (len(self.schema.shards), prompt.num_chunks)
        places = np.full(shape, NOT_IN_ARENA, np.int64)
        return RemoteHit(prompt, 0, np.zeros(shape, bool), places, self.schema, self.release)

    def _redeemed(self, content: TicketContent) -> RemoteHit:
        return replace(self._no_hit(content.prompt), position=content.position, present=content.present)

    def _lookup(
        self, prompts: Sequence[HashedPrompt], shards: Sequence[int] | None, budget: Budget, *, lease: bool
    ) -> list[RemoteHit]:
        asked_at = time.monotonic()
        wanted = None if shards is None else packed(sorted(self._shard_numbers(shards)), "<i4")

        def request(sequence: int, number: int = 0) -> protocol.Message:
            return protocol.Lookup(sequence, number, wanted, daemon_budget(budget))

        leases = [0] * len(prompts)
        if lease:
            replies, generation, leases = self._prompt_session.lease(prompts, request, budget)
        else:
            replies, generation = self._prompt_session.ask_all(prompts, request, budget)
        until = asked_at + self.client.welcome.lease_s
        hits = [self._no_hit(prompt) for prompt in prompts]
        for number, reply in enumerate(replies):
            with self.or_miss():
                found = self.client.check(reply, protocol.Found)
                held = replace(hits[number], lease=leases[number], until=until, generation=generation)
                hits[number] = self._found(held, found, shards)
        return hits

    def _found(self, empty: RemoteHit, found: protocol.Found, shards: Sequence[int] | None) -> RemoteHit:
        if found.late:
            self._count(unanswered=1)
        shape, places = empty.present.shape, empty.places
        bits = np.unpackbits(np.frombuffer(found.present, np.uint8), count=empty.present.size)
        present = bits.reshape(shape).astype(bool)
        if found.starts:
            at = self._pieces(found.position, self._shard_numbers(shards), present)
            places[at[:, 0], at[:, 1]] = numbers(found.starts)
        held = empty.lease if found.starts else 0
        return replace(empty, position=found.position, present=present, lease=held)

    def _load(
        self,
        hit: RemoteHit,
        sink: Sink,
        start: int,
        shards: Sequence[int] | None,
        budget: Budget,
        arrived: Callable[[ChunkRef], None],
    ) -> int:
        if isinstance(sink, StagedScatter):
            hit, sink = replace(hit, target=sink), discard
        try:
            return super()._load(hit, sink, start, shards, budget, arrived)
        finally:
            post_release(self.client, hit.lease, hit.generation)

    def load_into(
        self,
        hit: RemoteHit,
        target: Target,
        *,
        start: int = 0,
        shards: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> int:
        """As `load`, but directly into memory that `target` returns, which saves a copy. What it holds beyond the
        returned position is undefined."""
        return self.load(replace(hit, target=target), discard, start=start, shards=shards, budget_s=budget_s)

    def release(self, hit: RemoteHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict what a hit holds; calling it twice is fine."""
        release_lease(self.client, hit.lease, hit.generation, Budget.of(budget_s))

    def release_later(self, hit: RemoteHit) -> None:
        if hit.lease and hit.generation == self.client.generation:
            self.client.tell(protocol.Release([hit.lease]))

    def _fetch(self, hit: RemoteHit, pieces: Sequence[ChunkRef], budget: Budget) -> Iterator[tuple[ChunkRef, Bytes]]:
        held = hit.generation == self.client.generation and time.monotonic() < hit.until
        places: list[list[int]] = hit.places.tolist() if held else []
        in_arena = {(i, j): places[i][j] for i, j in pieces if held and places[i][j] != NOT_IN_ARENA}
        with self.or_miss():
            yield from self._reads.copies(self._prompt_session, hit, in_arena, hit.until, hit.generation, budget)
        missing = [piece for piece in pieces if piece not in in_arena]
        if missing:  # the lease must not hold arena space that the remaining blobs need
            release_lease(self.client, hit.lease, hit.generation, budget)
            yield from self._reads.fetched(self._session("load"), hit, missing, budget)

    def _wanted(self, hit: RemoteHit, shards: Sequence[int] | None) -> tuple[Sequence[int], NDArray[np.bool_]]:
        """The wanted shards, and flags `[shards, chunks]` in which all shards that this rank does not read are
        marked as present."""
        wanted = self._shard_numbers(shards)
        in_arena = np.zeros_like(hit.present)
        in_arena[[shard for shard in range(len(in_arena)) if shard not in wanted]] = True
        return wanted, in_arena

    def _farthest(self, hit: RemoteHit, shards: NDArray[np.int64], chunks: NDArray[np.int64]) -> str:
        """ "memory" for the daemon's arena; what lies behind it the daemon alone knows, and is "backing"."""
        places = hit.places[shards, chunks]
        return "" if not len(places) else "memory" if (places != NOT_IN_ARENA).all() else "backing"

    def prefetch(
        self, hit: RemoteHit, *, shards: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Operation[int]:
        """Fetch what a hit needs into the arena, over a separate connection; the result is the position that the
        arena then has."""
        operation: Operation[int] = self._operations.new("load", None, budget_s)
        return self._operations.start(operation, lambda: self._prefetched(hit, shards, operation.budget))

    def _prefetched(self, hit: RemoteHit, shards: Sequence[int] | None, budget: Budget) -> tuple[int, list[ChunkRef]]:
        wanted, in_arena = self._wanted(hit, shards)
        pieces = [*self._needs(hit.position, wanted, hit.present)]
        with self.or_miss(), self.client.again(arena=False, timeout_s=reply_timeout(budget)) as client:
            session = PromptSession(client, self.schema, self._prompt_session.model)
            for batch in self._layout.batches(client, pieces, budget):
                for piece in fetch_to_arena(session, hit.prompt, batch, 0, budget)[0]:
                    in_arena[piece] = True
        failed = [piece for piece in pieces if not in_arena[piece]]
        return self._position(hit.prompt, in_arena, hit.position), failed

    def pin(self, hit: RemoteHit, *, shards: Sequence[int] | None = None, budget_s: float | None = None) -> PinnedHit:
        """Fetch what a hit needs into the arena, and keep it there until `unpin`, or until this connection ends.

        Raises `OverLimit` for more than one connection may pin, `LeaseExpired` if the lease expired before it was
        pinned, and `ServerGone`; in each case nothing is pinned. Pinning an empty hit does nothing.
        """
        if not hit.position:
            return PinnedHit(0, 0, 0, self.unpin)
        wanted, in_arena = self._wanted(hit, shards)
        lease, generation, budget = self.client.number(), self.client.generation, Budget.of(budget_s)
        pieces = [*self._needs(hit.position, wanted, hit.present)]
        try:
            for batch in self._layout.batches(self.client, pieces, budget):
                with self._layout.allowed(self.client, batch, budget):
                    for piece in fetch_to_arena(self._prompt_session, hit.prompt, batch, lease, budget)[0]:
                        in_arena[piece] = True
                    self._keep_lease(lease, generation, budget)
        except ServerError:
            release_lease(self.client, lease, self.client.generation, budget)
            raise
        except BaseException:  # an interrupt: does not wait
            post_release(self.client, lease, self.client.generation)
            raise
        return PinnedHit(self._position(hit.prompt, in_arena, hit.position), lease, generation, self.unpin)

    def _keep_lease(self, lease: int, generation: int, budget: Budget) -> None:
        alive = self.client.ask(protocol.PinLeases([lease]), protocol.Alive, reply_timeout(budget)).leases
        if self.client.generation != generation:
            raise ServerGone("the connection was lost, and what was pinned with it")
        if lease not in alive:
            raise LeaseExpired("the lease expired before it was pinned; nothing is pinned")

    def submit_pin(self, prompt: HashedPrompt) -> Operation[PinnedHit]:
        operation: Operation[PinnedHit] = self._operations.new("load", None, None)
        return self._operations.start(operation, lambda: (self.pin(self.lookup(prompt, lease=False)), []))

    def unpin(self, pin: PinnedHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict what was pinned; calling it twice is fine."""
        release_lease(self.client, pin.lease, pin.generation, Budget.of(budget_s))

    # ---- writing

    def _save(
        self,
        prompt: HashedPrompt,
        source: Source,
        pieces: Sequence[ChunkRef],
        budget: Budget,
        gathered: Callable[[], None],
    ) -> SaveOutcome:
        saving = SaveOperation(self._session("save"), self._layout, self._copier, source)
        with self.or_miss():
            saving.save(prompt, pieces, budget, gathered)
        self.note_saved(saving)
        return saving.outcome(pieces)

    def _gather(self, prompt: HashedPrompt, source: Source, pieces: Sequence[ChunkRef], budget: Budget) -> GatheredSave:
        saving = SaveOperation(self._session("save"), self._layout, self._copier, source)
        made = GatheredReservation(saving, pieces, self)
        with self.or_miss():
            made.hold(saving.gather(prompt, pieces, budget))
        return made

    def _took(self, kind: str, seconds: float, prompt: HashedPrompt) -> None:
        super()._took(kind, seconds, prompt)
        self.client.tell(protocol.Observed("load" if kind == "load" else "save", seconds, prompt.num_tokens))

    def note_saved(self, saving: SaveOperation) -> None:
        """Remember which daemons have the saved blobs: `flush` must find the same ones again."""
        self._unflushed |= saving.daemons

    # ---- the rest

    def _removed(self, after: int, budget: Budget) -> Removals:
        """The daemon counts from its start: after another start nothing is known to be there."""
        request = protocol.RemovedSince(after, self.schema.ids.tobytes())
        reply = self.client.ask(request, protocol.RemovedKeys, reply_timeout(budget))
        keys = [reply.keys[at : at + KEY_BYTES] for at in range(0, len(reply.keys), KEY_BYTES)]
        before, self._boot = self._boot, self.client.welcome.boot
        return Removals(reply.number, keys, reply.complete and before in (b"", self._boot))

    def report(self, *, budget_s: float | None = None) -> Report:
        """The daemon's report. Raises `ServerGone`."""
        return self.client.ask(protocol.StatsRequest(), protocol.StatsReply, budget_s).report

    def describe(self, *, budget_s: float | None = None) -> Description:
        """The daemon's description, with the registrations of this store's model. Raises `ServerGone`."""
        return self.client.ask(
            protocol.Describe(self._prompt_session.model), protocol.DescribeReply, budget_s
        ).description

    def stats(self, *, budget_s: float | None = None) -> StoreStats:
        with self.or_miss():
            return self._stats(self.report(budget_s=budget_s).tiers)
        return self._stats(())

    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait until everything saved since the last flush was written to the daemon's persistent tiers, or dropped by
        them (`stats().tiers`, `drops`): a full disk does not fail a flush. False if that took too long, or if a daemon
        ended since: what it had not written is lost. Uses a separate connection, so that other calls are not
        delayed."""
        with self.or_miss(), self.client.again(arena=False, timeout_s=wait_s) as client:
            saved = {*self._unflushed}
            done = client.ask(protocol.Flush(wait_s), protocol.Done, wait_s + GRACE_S).count
            self._unflushed -= saved
            return bool(done) and saved <= {client.welcome.boot}
        return False

    def close(self, wait_s: float = 60.0) -> None:
        """Finish submitted operations, release what is held, and disconnect. Saved blobs stay in the daemon. Later
        calls are misses, unless the client was given."""
        self._operations.close(wait_s)
        for session in self._beside.values():
            session.client.retire()
        self._disconnect()
        self._copier.close()

    def or_miss(self) -> _OrMiss:
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

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
from kvweave.server import protocol as say
from kvweave.server.client import Client
from kvweave.server.copying import Copier, Target
from kvweave.server.description import Description
from kvweave.server.dialogue import GRACE_S, Dialogue, allowance, patience
from kvweave.server.hit import Pin, RemoteHit
from kvweave.server.protocol import FAR, numbers, packed
from kvweave.server.report import Report
from kvweave.server.saving import ArenaPieces, Saving
from kvweave.store import AnyStore, Prompt, Row, Saved, Schema, Sink, Source, StoreStats
from kvweave.store.base import Piece, in_thread
from kvweave.store.cascade import Budget
from kvweave.store.forking import tell_after_fork
from kvweave.store.keys import Bytes

log = logging.getLogger("kvweave.server")


class RemoteStore(AnyStore[RemoteHit]):
    """KV of one model's chunks in a daemon. Many threads may use it; `workers` of its own copy large blobs."""

    def __init__(self, schema: Schema, client: Client | str | Path, *, model: str = "", workers: int = 2) -> None:
        super().__init__(schema)
        self.client = client if isinstance(client, Client) else Client(client, name=f"{model} {os.getpid()}".strip())
        self._dialogue = Dialogue(self.client, schema, model)
        self._copier = Copier(schema, workers)
        self._arena = ArenaPieces(self._dialogue, schema)
        self._unflushed: set[bytes] = set()
        self._refusals: set[str] = set()
        tell_after_fork(self)

    # ---- reading

    def lookup(
        self,
        prompt: Prompt,
        *,
        rows: Sequence[int] | None = None,
        lease: bool = True,
        budget_s: float | None = None,
    ) -> RemoteHit:
        """The longest prefix from which every group can go on. What it needs of `rows` (default: all) stays in the
        arena until the hit is loaded or released, the same prompt is looked up again, or the lease is over.

        Without a lease, or beyond the leases' share of the arena, it may be evicted before it is loaded: `load` asks
        again for what it needs, and shortens if that is gone."""
        shape = (len(self.schema.rows), prompt.num_chunks)
        hit = RemoteHit(prompt, 0, np.zeros(shape, bool), np.full(shape, FAR, np.int64))
        if prompt.num_chunks:
            with self._or_miss():
                hit = self._lookup(hit, rows, Budget.of(budget_s), lease=lease)
        self._count(lookups=1, tokens_asked=prompt.num_tokens, tokens_found=hit.position)
        return hit

    def _lookup(self, empty: RemoteHit, rows: Sequence[int] | None, budget: Budget, *, lease: bool) -> RemoteHit:
        asked_at, wanted = time.monotonic(), None if rows is None else packed(sorted(rows), "<i4")

        def question(sequence: int, number: int = 0) -> say.Message:
            return say.Lookup(sequence, number, wanted, allowance(budget))

        if lease:
            answer, generation, number = self._dialogue.lease(empty.prompt, question, budget)
        else:
            (answer, generation), number = self._dialogue.ask(empty.prompt, question, budget), 0
        found = self.client.check(answer, say.Found)
        if found.late:
            self._count(unanswered=1)
        shape, places = empty.present.shape, empty.places
        present = np.unpackbits(np.frombuffer(found.present, np.uint8), count=empty.present.size).reshape(shape)
        if found.starts:
            at = np.array([*self._needs(found.position, range(shape[0]) if rows is None else sorted(rows))], np.int64)
            places[at[:, 0], at[:, 1]] = numbers(found.starts)
        until, held = asked_at + self.client.welcome.lease_s, number if found.starts else 0
        return RemoteHit(empty.prompt, found.position, present.astype(bool), places, held, until, generation)

    def load(
        self, hit: RemoteHit, sink: Sink, *, rows: Sequence[int] | None = None, budget_s: float | None = None
    ) -> int:
        budget = Budget.of(budget_s)
        try:
            return super().load(hit, sink, rows=rows, budget_s=budget_s)
        finally:
            self._release(hit, budget)

    def load_into(
        self, hit: RemoteHit, target: Target, *, rows: Sequence[int] | None = None, budget_s: float | None = None
    ) -> int:
        """As `load`, but straight into memory that `target` names: one copy less. Beyond the position that is returned
        it may hold anything."""
        return self.load(replace(hit, target=target), _ignore, rows=rows, budget_s=budget_s)

    def release(self, hit: RemoteHit, *, budget_s: float | None = None) -> None:
        """Let the daemon evict what a hit held; may be called twice."""
        self._release(hit, Budget.of(budget_s))

    def _release(self, hit: RemoteHit | Pin, budget: Budget) -> None:
        if hit.lease and hit.generation == self.client.generation:
            with suppress(ServerError):
                self.client.ask(say.Release([hit.lease]), say.Done, patience(budget))

    def _fetch(self, hit: RemoteHit, pieces: Sequence[Piece], budget: Budget) -> Iterator[tuple[Piece, Bytes]]:
        held = hit.generation == self.client.generation and time.monotonic() < hit.until
        near = {piece: int(hit.places[piece]) for piece in pieces if held and hit.places[piece] != FAR}
        yield from self._copies(hit, near, hit.until, hit.generation, budget)
        far = [piece for piece in pieces if piece not in near]
        if far:
            self._release(hit, budget)  # what is copied must not take the room that the rest needs
        for batch in self._arena.batches(far):
            if budget.is_spent:
                return
            with self._or_miss():
                lease, until = self.client.number(), time.monotonic() + self.client.welcome.lease_s
                places, generation = self._bring(hit.prompt, batch, lease, budget)
                yield from self._copies(hit, places, until, generation, budget)
                self._release(replace(hit, lease=lease, generation=generation), budget)

    def _bring(
        self, prompt: Prompt, pieces: Sequence[Piece], lease: int, budget: Budget
    ) -> tuple[dict[Piece, int], int]:
        """Where those that could be had are now, and the generation of the connection that holds them."""

        def question(sequence: int) -> say.Message:
            return say.Bring(sequence, lease, packed(pieces, "<i4"), allowance(budget))

        answer, generation = self._dialogue.ask(prompt, question, budget)
        starts = numbers(self.client.check(answer, say.Places).starts).tolist()
        return {piece: start for piece, start in zip(pieces, starts, strict=True) if start != FAR}, generation

    def _copies(
        self, hit: RemoteHit, places: dict[Piece, int], until: float, generation: int, budget: Budget
    ) -> Iterator[tuple[Piece, Bytes]]:
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
                self._dialogue.ask(hit.prompt, lambda sequence: say.Damaged(sequence, what), budget, generation)

    def _wanted(self, hit: RemoteHit, rows: Sequence[int] | None) -> tuple[Sequence[int], NDArray[np.bool_]]:
        """The rows that matter, and what is near if nothing of them is: all of the others."""
        wanted = range(len(self.schema.rows)) if rows is None else rows
        near = np.zeros_like(hit.present)
        near[[row for row in range(len(near)) if row not in wanted]] = True
        return wanted, near

    def prefetch(
        self, hit: RemoteHit, *, rows: Sequence[int] | None = None, budget_s: float | None = None
    ) -> Future[int]:
        """Bring what a hit needs into the arena, over a connection of its own; the position that then is near."""
        return in_thread("kvweave-prefetch", self._prefetched, hit, rows, Budget.of(budget_s))

    def _prefetched(self, hit: RemoteHit, rows: Sequence[int] | None, budget: Budget) -> int:
        wanted, near = self._wanted(hit, rows)
        with self._or_miss(), self.client.again(arena=False, timeout_s=patience(budget)) as client:
            other = RemoteStore(self.schema, client, model=self._dialogue.model, workers=1)
            for batch in self._arena.batches([*self._needs(hit.position, wanted)]):
                for piece in other._bring(hit.prompt, batch, 0, budget)[0]:
                    near[piece] = True
        return self._position(hit.prompt, near, hit.position)

    def pin(self, hit: RemoteHit, *, rows: Sequence[int] | None = None, budget_s: float | None = None) -> Pin:
        """Bring what a hit needs into the arena, and keep it there until `unpin`, or until this connection ends.

        Raises `OverLimit` for more than the daemon lets one connection pin, `LeaseExpired` if what was brought had its
        time before it was pinned, and `ServerGone`; then nothing is pinned. A hit of nothing is a pin of nothing.
        """
        if not hit.position:
            return Pin(0, 0, 0)
        wanted, near = self._wanted(hit, rows)
        lease, generation, budget = self.client.number(), self.client.generation, Budget.of(budget_s)
        try:
            for batch in self._arena.batches([*self._needs(hit.position, wanted)]):
                for piece in self._bring(hit.prompt, batch, lease, budget)[0]:
                    near[piece] = True
            alive = self.client.ask(say.Pin([lease]), say.Alive, patience(budget)).leases
            if self.client.generation != generation:
                raise ServerGone("the connection was lost, and what was pinned with it")
            if lease not in alive:
                raise LeaseExpired("what was brought had its time before it was pinned; nothing is pinned")
        except ServerError:
            self._release(Pin(0, lease, self.client.generation), budget)
            raise
        return Pin(self._position(hit.prompt, near, hit.position), lease, generation)

    def unpin(self, pin: Pin, *, budget_s: float | None = None) -> None:
        """Let the daemon evict it; may be called twice."""
        self._release(pin, Budget.of(budget_s))

    # ---- writing

    def save(
        self,
        prompt: Prompt,
        source: Source,
        *,
        points: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        budget_s: float | None = None,
    ) -> Saved:
        pieces, saving = self._to_keep(prompt, points, rows), Saving(self._arena, self._copier, source)
        with self._or_miss():
            saving.save(prompt, pieces, Budget.of(budget_s))
        self._unflushed |= saving.daemons
        return Saved(saving.stored, saving.present, len(pieces) - saving.stored - saving.present)

    # ---- the rest

    def report(self, *, budget_s: float | None = None) -> Report:
        """What the daemon says of itself. Raises `ServerGone`."""
        return self.client.ask(say.Stats(), say.Stated, budget_s).report

    def describe(self, *, budget_s: float | None = None) -> Description:
        """What the daemon is, and what was registered as this store's model. Raises `ServerGone`."""
        return self.client.ask(say.Describe(self._dialogue.model), say.Described, budget_s).description

    def stats(self, *, budget_s: float | None = None) -> StoreStats:
        with self._or_miss():
            return self._stats(self.report(budget_s=budget_s).tiers)
        return self._stats(())

    def flush(self, wait_s: float = 60.0) -> bool:
        """Wait until what was saved since the last time is in the daemon's persistent tiers. False, too, if some of it
        was saved to a daemon that ended since: it may have died with it. Others may ask meanwhile."""
        with self._or_miss(), self.client.again(arena=False, timeout_s=wait_s) as client:
            saved = {*self._unflushed}
            done = client.ask(say.Flush(wait_s), say.Done, wait_s + GRACE_S).count
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


def _ignore(row: Row, chunk: int, payload: Bytes) -> None:
    """A sink for what is where it shall be already."""

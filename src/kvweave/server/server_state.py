"""The state that all connections share: arena, tiers, models and counters. Used by the event loop's thread."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvweave import __version__
from kvweave.errors import BadRequest
from kvweave.server.backing_tiers import BackingTiers
from kvweave.server.description import Description, TierDescription
from kvweave.server.heartbeat import Heartbeat
from kvweave.server.leases import LeaseQuota
from kvweave.server.model_registry import ModelRegistry
from kvweave.server.observations import Observations
from kvweave.server.open_sequence import OpenSequence
from kvweave.server.protocol import VERSION
from kvweave.server.report import ClientReport, PrefixReport, Report, TierCleared
from kvweave.server.settings import Settings
from kvweave.server.shared_arena import SharedArena
from kvweave.store import TierExecutorStats, TierStack
from kvweave.store.removals import RemovalLog
from kvweave.store.tier import KeyFilter
from kvweave.store.tier_executor import COUNTED

T = TypeVar("T")
THREADS = {"read": 16, "write": 16, "clear": 4, "copy": 4, "touch": 1}
"""Threads by kind of work. Writers waiting for a tier's queue, and long clears, must not use up the threads
of readers, nor those that copy out of inboxes. Beyond these numbers, requests of a kind queue up."""
PREFIXES, SHOWN = 4096, 20
LEASED_SHARE, FETCHED_SHARE, PINNED_SHARE = 0.5, 0.75, 0.5
"""The share of the arena that may be leased when a lookup leases more, and when a fetch does; and that may be pinned,
which counts as leased: more only where one connection may pin more."""


class ServerState:
    """The state of one daemon."""

    def __init__(self, settings: Settings, arena: SharedArena, tier_stack: TierStack | None = None) -> None:
        self.settings, self.arena = settings, arena
        self.boot = secrets.token_bytes(8)
        self.heartbeat = Heartbeat()
        self.counts: Counter[str] = Counter()
        self.stopping = False
        self.backing = BackingTiers(arena, tier_stack, self.notify)
        self.removals = RemovalLog()
        arena.follow_removals(self.removals)
        if tier_stack:
            tier_stack.follow_removals(self.removals)
        self._threads = {kind: _started(f"kvweave-{kind}", number) for kind, number in THREADS.items()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._change = asyncio.Event()
        self.models = ModelRegistry()
        pinned_share = max(PINNED_SHARE, settings.limits.pin_share)
        self.leased = LeaseQuota(*map(arena.bytes_of, (LEASED_SHARE, FETCHED_SHARE, pinned_share)))
        self._uses: dict[tuple[bytes, bytes], PrefixReport] = {}
        self.observations = Observations(settings.quotas)
        self._began = time.monotonic()

    # ---- waiting

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.heartbeat.run(loop)

    async def in_thread(self, kind: str, work: Callable[..., T], *args: object) -> T:
        """Run work that blocks in a thread of this kind (`THREADS`)."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[kind], work, *args)

    def notify(self) -> None:
        """Extents or leases were freed. Thread-safe."""
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.changed)

    def changed(self) -> None:
        """The same, from the event loop."""
        self._change.set()
        self._change = asyncio.Event()

    @property
    def next_change(self) -> asyncio.Event:
        """Set when extents or leases are freed the next time."""
        return self._change

    # ---- models and prefixes

    def asked(self, sequence: OpenSequence, position: int) -> None:
        """Count a lookup and its hit."""
        numbers = {"lookups": 1, "tokens_asked": sequence.num_tokens, "tokens_found": position}
        self.counts.update(numbers)
        sequence.registered.counts.update(numbers)
        self.observations.asked(sequence.tenant, numbers)
        if position:
            self._used(sequence, position)

    def touch(self, keys: Sequence[bytes], *, is_hit: bool = False) -> None:
        """Tell the arena and all tiers that keys were used, earlier ones as worth more. `is_hit`: a hit needs them."""
        self.arena.touch(keys, is_hit=is_hit)
        self.backing.touch(keys, is_hit=is_hit)

    def missed(self, sequence: OpenSequence, in_arena: NDArray[np.bool_], present: NDArray[np.bool_] | None) -> None:
        """Count, for the arena and every tier, the blobs that the longest hit would have needed and that are
        missing. `present` is None if a tier did not answer."""
        num_shards, known = sequence.registered.num_shards, in_arena if present is None else present
        needed = sequence.registered.needs(sequence.limit, None, known.reshape(-1, num_shards).T)
        at = needed[:, 1] * num_shards + needed[:, 0]
        self.counts["memory misses"] += int(np.count_nonzero(~in_arena[at]))
        if present is not None:
            lacking = int(np.count_nonzero(~present[at]))
            for executor in self.backing.executors:
                executor.count("misses", lacking)

    def count_no_room(self, number: int) -> None:
        """Count blobs for which nothing in the arena could be evicted."""
        self.counts["memory no room"] += number

    def _used(self, sequence: OpenSequence, position: int) -> None:
        prefix = sequence.prefixes[position // sequence.registered.chunk_tokens - 1].tobytes()
        known = self._uses.get(key := (sequence.tenant, prefix))
        model = sequence.registered.model
        self._uses[key] = replace(known, uses=known.uses + 1) if known else _used_once(prefix, model, position)
        if len(self._uses) > PREFIXES:
            kept = sorted(self._uses.items(), key=lambda item: -item[1].uses)[: PREFIXES // 2]
            self._uses = dict(kept)

    # ---- clearing

    def clear(self, tenant: bytes | None, model: str | None, wait_s: float) -> list[TierCleared]:
        """Delete entries. The arena comes last: before that, it could be written to a tier that is empty already.
        Blocks; run it in a thread. Raises `BadRequest` for a model that no engine has registered."""
        shards = (
            None if model is None else frozenset(shard for each in self.models.named(model) for shard in each.shard_ids)
        )
        if shards is not None and not shards:
            raise BadRequest(
                f"no engine has registered the model {model!r} with this daemon since it started, so its entries are"
                " not known; name one of `kvweave inspect`, or a tenant"
            )
        key_filter = KeyFilter(tenant or b"", shards)
        backing = self.backing.clear(key_filter, wait_s)
        arena = TierCleared(self.arena.name, self.arena.clear(key_filter))
        self.notify()
        return [arena, *backing]

    def forget_uses(self, tenant: bytes | None, model: str | None) -> None:
        """Drop what was cleared from the list of most used prefixes."""
        kept = {
            key: used
            for key, used in self._uses.items()
            if tenant not in (None, key[0]) or model not in (None, used.model)
        }
        self._uses = kept

    # ---- telling

    def report(self, clients: Sequence[ClientReport]) -> Report:
        prefixes = sorted(self._uses.values(), key=lambda each: (-each.uses, -each.tokens))[:SHOWN]
        numbers = (
            "lookups", "tokens_asked", "tokens_found", "unanswered", "requests", "failures", "expired", "returned",
        )  # fmt: skip
        return Report(
            version=__version__,
            pid=os.getpid(),
            boot=self.boot.hex(),
            uptime_s=time.monotonic() - self._began,
            stopping=self.stopping,
            tiers=self.tiers(),
            models=tuple(registered.report() for registered in self.models.named(None)),
            prefixes=tuple(prefixes),
            clients=tuple(clients),
            tenants=self.observations.tenants(),
            latency=self.observations.latency(),
            slowest=self.observations.slowest(),
            waiting={kind: threads._work_queue.qsize() for kind, threads in self._threads.items()},
            **{name: self.counts[name] for name in numbers},
        )

    def describe(self, model: str | None) -> Description:
        settings = self.settings
        arena = TierDescription(self.arena.name, self.arena.kind, self.arena.num_bytes, "through", None)
        return Description(
            version=__version__,
            protocol=VERSION,
            arena_bytes=self.arena.num_bytes,
            lease_s=settings.lease_s,
            drain_s=settings.drain_s,
            inbox_bytes=settings.inbox,
            reserve_bytes=self.arena.bytes_of(settings.limits.reserve_share),
            pin_bytes=self.arena.bytes_of(settings.limits.pin_share),
            limits=settings.limits,
            tiers=(arena, *self.backing.describe()),
            quotas=settings.quotas,
            models=tuple(registered.describe() for registered in self.models.named(model)),
        )

    def tiers(self) -> tuple[TierExecutorStats, ...]:
        counts = {name: self.counts[f"memory {name}"] for name in COUNTED}
        no_room = self.counts["memory no room"]
        arena = TierExecutorStats(
            self.arena.stats(), **counts, drops={"no room": no_room} if no_room else {}, queued_reads=0,
            queued_writes=0, open=False, last_error="",
        )  # fmt: skip
        return (arena, *self.backing.stats())

    def close(self, wait_s: float) -> bool:
        """Finish writes and close every tier; one that hangs for `wait_s` is abandoned. Returns whether none did.
        Blocks; run it in a thread."""
        closed = self.backing.close(wait_s)
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        self.arena.close()
        return closed


def _started(name: str, number: int) -> ThreadPoolExecutor:
    """An executor whose threads all run: the event loop would wait for each to start, milliseconds among many."""
    threads, everybody = ThreadPoolExecutor(number, name), threading.Barrier(number)
    for _ in range(number):
        threads.submit(everybody.wait)
    return threads


def _used_once(prefix: bytes, model: str, position: int) -> PrefixReport:
    return PrefixReport(prefix[:8].hex(), model, position, 1)

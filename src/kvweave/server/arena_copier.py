"""Copies of blobs into the arena and out of it, with checksums computed on the way.

A payload is checked after it was copied out: whatever happens to the arena meanwhile, a copy with the right key and
checksum is correct. So an expired lease costs a miss, never wrong data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from kvweave.server.arena_writer import ArenaBlob, ArenaWriter, write
from kvweave.server.dma import DMARegistration, device_in_use
from kvweave.store import Schema, Shard, Source
from kvweave.store.batches import batches
from kvweave.store.blob import BlobCheck
from kvweave.store.files import aligned
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.page_payloads import FillableSource, StagedScatter

Target = Callable[[Shard, int], Bytes]
"""Returns memory for the payload of a shard's chunk: contiguous, and of its length."""
Destination = Target | StagedScatter
Finish = Callable[[], bool]
THREADED_BYTES = 1 << 20
"""Smaller blobs are copied by the caller's thread: handing them to another takes longer."""

TOGETHER_BYTES = 512 << 10
"""Payloads of one shard that are collected together: they stay in the processor's cache until their checksums are
computed."""


def read(place: Bytes, shard: Shard, chunk: int, key: bytes, payload: Bytes) -> bool:
    """Copy a payload out of the arena; returns whether the copy is intact."""
    return BlobCheck(shard, chunk, key).copied(place, payload) is not None


def land(place: Bytes, shard: Shard, chunk: int, key: bytes, sink: StagedScatter, until: float) -> bool:
    """Copy a payload from the arena to a sink's pages; returns whether it was intact, and the lease not over (`until`).

    The blob is checked after it was read. Under a lease no other blob is written there; a client that writes without
    one damages the blob for good, so what was wrong when it was read is found wrong.
    """
    check = BlobCheck(shard, chunk, key)

    def is_intact() -> bool:
        return check.passes(place) and time.monotonic() < until

    return sink.land(shard, chunk, place[check.head_bytes :], is_intact)


def _of_one_shard(jobs: Iterable[ArenaBlob]) -> Iterator[list[ArenaBlob]]:
    by_shard: dict[bytes, list[ArenaBlob]] = {}
    for job in jobs:
        by_shard.setdefault(job.shard.id, []).append(job)
    for own in by_shard.values():
        yield from batches(own, lambda job: job.shard.payload_bytes, TOGETHER_BYTES)


class ArenaCopier:
    """Copies blobs, large ones with `workers` threads, through buffers that are reused."""

    def __init__(self, schema: Schema, workers: int) -> None:
        self.workers = max(1, workers)
        self._largest = max(TOGETHER_BYTES, *(shard.payload_bytes for shard in schema.shards))
        self._scratch: deque[Bytes] = deque()
        self._registered: list[DMARegistration] = []
        """Of scratch buffers, in a process that uses CUDA."""
        self._pool = ThreadPoolExecutor(self.workers, "kvweave-copy")
        register_after_fork(self)

    def reads(
        self, jobs: Iterable[ArenaBlob], target: Destination | None, until: float
    ) -> Iterator[tuple[ArenaBlob, Bytes | None]]:
        """The payloads that are intact, None for the others; several copies are in flight.

        A payload is valid until the next one is asked for, unless it was copied into memory of `target`, or into its
        pages: straight out of the arena, where nobody but a broken client writes before `until`.
        """
        flying: deque[tuple[ArenaBlob, Bytes, Finish]] = deque()
        try:
            for job in jobs:
                if isinstance(target, StagedScatter):
                    memory, work = job.place, partial(land, *job, target, until)
                else:
                    memory = target(job.shard, job.chunk) if target else self._memory()
                    work = partial(read, *job, memory[: job.shard.payload_bytes])
                flying.append((job, memory, self._run(job.shard, work)))
                if len(flying) > self.workers:
                    yield from self._finished(*flying.popleft(), target)
            while flying:
                yield from self._finished(*flying.popleft(), target)
        finally:
            for _, _, finish in flying:
                with suppress(Exception):  # one is on its way to the caller; no copy may outlive the call
                    finish()

    def _finished(
        self, job: ArenaBlob, memory: Bytes, finish: Finish, target: Destination | None
    ) -> Iterator[tuple[ArenaBlob, Bytes | None]]:
        yield job, memory[: job.shard.payload_bytes] if finish() else None
        if target is None:
            self._scratch.append(memory)

    def writes(self, jobs: Iterable[ArenaBlob], source: Source, until: float) -> bool:
        """Write payloads; returns whether all were written in time. If `source` raises, no write is in flight any
        more."""
        if not isinstance(source, FillableSource):
            return self._write_given(jobs, source, until)
        flying: list[Finish] = []
        try:
            for together in _of_one_shard(jobs):
                flying.append(self._run(together[0].shard, partial(self._write_filled, together, source, until)))
        finally:
            fine = [finish() for finish in flying]
        return all(fine)

    def _write_given(self, jobs: Iterable[ArenaBlob], source: Source, until: float) -> bool:
        writing = ArenaWriter(source, until, 2 * self.workers)
        try:
            for job in jobs:
                writing.add(job, self._pool if self._is_large(job.shard) else None)
        finally:
            writing.finish()
        return writing.fine

    def _write_filled(self, jobs: Sequence[ArenaBlob], source: FillableSource, until: float) -> bool:
        """Blobs of one shard: collected by one call, as that takes longer than to copy a small one."""
        memory, size = self._memory(), jobs[0].shard.payload_bytes
        try:
            # not directly into the arena, which others could write to between the copy and its checksum
            source.fill(jobs[0].shard, [job.chunk for job in jobs], memory[: len(jobs) * size])
            payloads = memory[: len(jobs) * size].reshape(len(jobs), size)
            return all(write(*job, payload, until) for job, payload in zip(jobs, payloads, strict=True))
        finally:
            self._scratch.append(memory)

    def _memory(self) -> Bytes:
        try:
            return self._scratch.pop()
        except IndexError:  # all buffers are in use
            memory, device = aligned(self._largest), device_in_use()
            if device is not None:
                self._registered.append(registration := DMARegistration(memory))
                registration.register(device)
            return memory

    def _run(self, shard: Shard, work: Finish) -> Finish:
        """Start work; the returned function waits for its end."""
        if self._is_large(shard):
            return self._pool.submit(work).result
        done = work()
        return lambda: done

    def _is_large(self, shard: Shard) -> bool:
        return shard.payload_bytes >= THREADED_BYTES and self.workers > 1

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads, and cannot use CUDA."""
        for registration in self._registered:
            registration.disown()
        self._pool, self._scratch = ThreadPoolExecutor(self.workers, "kvweave-copy"), deque()

    def close(self) -> None:
        self._pool.shutdown()
        for registration in self._registered:
            registration.close()

"""Copies of blobs into the arena and out of it, with checksums computed on the way.

A payload is checked after it was copied out: whatever happens to the arena meanwhile, a copy with the right key and
checksum is correct. So an expired lease costs a miss, never wrong data.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kvweave.copying import PartChecksums
from kvweave.server.arena_writer import ArenaBlob, ArenaWriter, write, write_header
from kvweave.store import Schema, Shard, Source, checksums
from kvweave.store.batches import batches
from kvweave.store.blob import BlobCheck, flat_target, header_bytes
from kvweave.store.files import aligned
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.page_payloads import FillableSource, Gather, StagedGather, StagedScatter

Target = Callable[[Shard, int], Bytes]
"""Returns memory for the payload of a shard's chunk: contiguous, and of its length."""
Destination = Target | StagedScatter
Result = TypeVar("Result")
Finish = Callable[[], Result]


class WriteBatch(Protocol):
    """Blobs to write, and until when."""

    @property
    def jobs(self) -> Sequence[ArenaBlob]: ...

    @property
    def until(self) -> float: ...


Batch = TypeVar("Batch", bound=WriteBatch)


class _Begun(NamedTuple, Generic[Batch]):
    """A copy in flight; `is_last` of its batch."""

    finish: Finish[bool]
    batch: Batch
    is_last: bool


STAGED_AT_ONCE = 3
"""Calls of a staged copier in flight. They take the host little time, so that one thread starts and ends all of them:
several would wait for one another."""
LAST_CALL_BYTES = 10 << 20
"""What the last call of a load copies, at most: nothing is copied while pages get its bytes."""
THREADED_BYTES = 1 << 20
"""Fewer bytes are copied by the caller's thread: handing them to another takes longer."""


def read(job: ArenaBlob, payload: Bytes) -> list[bool]:
    """Copy a payload out of the arena; returns whether the copy is intact, as the only one."""
    return [BlobCheck(job.shard, job.chunk, job.key).copied(job.place, payload) is not None]


def begin_landing(jobs: Sequence[ArenaBlob], sink: StagedScatter, until: float) -> Finish[list[bool]]:
    """Start to copy payloads of one shard from the arena to a sink's pages. What is returned ends it, and returns which
    were intact, and the lease not over (`until`); if one was not, each is copied by itself.

    What was copied is checked, and not what the arena has. Headers are read meanwhile; under a lease no other blob is
    written there.
    """
    head = header_bytes(jobs[0].shard)
    payloads = [job.place[head:] for job in jobs]
    land = sink.begin_landing(jobs[0].shard, [job.chunk for job in jobs], payloads)
    expected = [BlobCheck(job.shard, job.chunk, job.key).expected(job.place) for job in jobs]

    def are_intact(found: Sequence[PartChecksums]) -> bool:
        passed = all(fits(checksums.of_parts(parts)) for fits, parts in zip(expected, found, strict=True))
        return passed and time.monotonic() < until

    def finish() -> list[bool]:
        if land(are_intact):
            return [True] * len(jobs)
        return [False] if len(jobs) == 1 else [begin_landing([job], sink, until)()[0] for job in jobs]

    return finish


def begin_gather(jobs: Sequence[ArenaBlob], source: StagedGather, until: float) -> Finish[bool]:
    """Start to copy payloads of one shard from a source's pages straight to the arena. What is returned ends it, and
    returns whether that was in time: after `until` the extents may belong to another client."""
    head = header_bytes(jobs[0].shard)
    if time.monotonic() >= until:
        return lambda: False
    gather = source.begin_gather(jobs[0].shard, [job.chunk for job in jobs], [job.place[head:] for job in jobs])

    def finish() -> bool:
        found = gather()
        if time.monotonic() >= until:  # the extents may have been reassigned: write no headers into them
            return False
        for job, parts in zip(jobs, found, strict=True):
            write_header(job, checksums.of_parts(parts))
        return True

    return finish


def together(jobs: Iterable[ArenaBlob], most_bytes: int) -> Iterator[list[ArenaBlob]]:
    """Jobs in order, those of one shard that follow each other together, up to so many bytes; if payloads are not of
    whole words, one by one."""
    for (_, payload_bytes), of_shard in groupby(jobs, lambda job: (job.shard.id, job.shard.payload_bytes)):
        # lazily: the first batch is begun before the last job is made
        yield from batches(of_shard, lambda job: job.shard.payload_bytes, 0 if payload_bytes % 8 else most_bytes)


def _by_shard(jobs: Sequence[ArenaBlob]) -> list[ArenaBlob]:
    """Those of one shard together, the shard of the first job first."""
    order: dict[bytes, int] = {}
    return sorted(jobs, key=lambda job: order.setdefault(job.shard.id, len(order)))


class ArenaCopier:
    """Copies blobs, many bytes at once with `workers` threads, through buffers that are reused."""

    def __init__(self, schema: Schema, workers: int) -> None:
        self.workers = max(1, workers)
        self._largest = max(shard.payload_bytes for shard in schema.shards)
        self._scratch: defaultdict[int, deque[Bytes]] = defaultdict(deque)
        """Buffers that are not in use, by size."""
        self._pool = ThreadPoolExecutor(self.workers, "kvweave-copy")
        register_after_fork(self)

    def reads(
        self, jobs: Iterator[ArenaBlob], count: int, target: Destination | None, until: float
    ) -> Iterator[tuple[ArenaBlob, Bytes | None]]:
        """The payloads of `count` jobs, or fewer, that are intact, None for the others, in order; several copies are in
        flight.

        A payload is valid until the next one is asked for, unless it was copied into memory of `target`, or into its
        pages: straight out of the arena, where only a broken client would write before `until`.
        """
        flying: deque[tuple[list[ArenaBlob], Bytes, Finish[list[bool]]]] = deque()
        try:
            for some in self._calls(jobs, count, target):
                job, memory = some[0], some[0].place
                if isinstance(target, StagedScatter):
                    finish = begin_landing(some, target, until)
                else:
                    shard, chunk = job.shard, job.chunk
                    memory = flat_target(shard, target(shard, chunk)) if target else self._memory(self._largest)
                    finish = self._run(some, partial(read, job, memory[: job.shard.payload_bytes]))
                flying.append((some, memory, finish))
                if len(flying) > (STAGED_AT_ONCE if isinstance(target, StagedScatter) else self.workers):
                    yield from self._finished(*flying.popleft(), target)
            while flying:
                yield from self._finished(*flying.popleft(), target)
        finally:
            for _, _, finish in flying:
                with suppress(Exception):  # one is on its way to the caller; no copy may outlive the call
                    finish()

    def _calls(self, jobs: Iterator[ArenaBlob], count: int, target: Destination | None) -> Iterator[list[ArenaBlob]]:
        """What is copied by one call each. The last call of a staged copier is small: pages get its bytes last."""
        if not isinstance(target, StagedScatter):
            return together(jobs, 0)
        few, most_bytes = max(1, LAST_CALL_BYTES // self._largest), target.together_bytes
        return chain(together(islice(jobs, max(0, count - few)), most_bytes), together(jobs, most_bytes))

    def _finished(
        self, jobs: list[ArenaBlob], memory: Bytes, finish: Finish[list[bool]], target: Destination | None
    ) -> Iterator[tuple[ArenaBlob, Bytes | None]]:
        for job, fine in zip(jobs, finish(), strict=True):
            yield job, memory[: job.shard.payload_bytes] if fine else None
        if target is None:
            self._scratch[memory.nbytes].append(memory)

    def writes(self, batches: Iterable[Batch], source: Source) -> Generator[tuple[Batch, bool]]:
        """Write the payloads of batches; each is returned when that is done, with whether all was in time. The next one
        is asked for when all copies of those before it have begun. When this ends, no copy is in flight."""
        most = STAGED_AT_ONCE if isinstance(source, StagedGather) else self.workers
        flying: deque[_Begun[Batch]] = deque()
        fine = True
        try:
            for begun in chain(self._begun(batches, source), [None]):
                flying.extend([begun] if begun else [])
                while len(flying) > (most if begun else 0):
                    finish, batch, is_last = flying.popleft()
                    fine &= finish()
                    if is_last:
                        yield batch, fine
                        fine = True
        finally:
            for finish, _, _ in flying:
                with suppress(Exception):  # one is on its way to the caller
                    finish()

    def _begun(self, batches: Iterable[Batch], source: Source) -> Iterator[_Begun[Batch]]:
        begin, together_bytes = self._writer(source)
        for batch in batches:
            if isinstance(source, StagedGather):
                source.wait_for_caller()  # so that no copy is started in time and made too late
            parts = [[*batch.jobs]]
            if together_bytes is not None:
                parts = [*together(_by_shard(batch.jobs), together_bytes)]
            for number, some in enumerate(parts, 1):
                yield _Begun(begin(some, source, batch.until), batch, number == len(parts))

    def _writer(self, source: Source) -> tuple[Callable[[Sequence[ArenaBlob], Any, float], Finish[bool]], int | None]:
        """What begins to write jobs of a source, and how many bytes of a shard it takes at once; None: a batch. Asked
        once for all batches: whether a source is of a protocol takes long to say."""
        if isinstance(source, StagedGather):
            return begin_gather, source.together_bytes
        if isinstance(source, Gather | FillableSource):  # our own first: of a protocol it takes long
            return self._begin_filling, source.together_bytes
        return self._begin_given, None

    def _begin_filling(self, jobs: Sequence[ArenaBlob], source: FillableSource, until: float) -> Finish[bool]:
        return self._run(jobs, partial(self._write_filled, jobs, source, until))

    def _begin_given(self, jobs: Sequence[ArenaBlob], source: Source, until: float) -> Finish[bool]:
        fine = self._write_given(jobs, source, until)
        return lambda: fine

    def _write_given(self, jobs: Iterable[ArenaBlob], source: Source, until: float) -> bool:
        writing = ArenaWriter(source, until, 2 * self.workers)
        try:
            for job in jobs:
                writing.add(job, self._pool if self._are_many_bytes([job]) else None)
        finally:
            writing.finish()
        return writing.fine

    def _write_filled(self, jobs: Sequence[ArenaBlob], source: FillableSource, until: float) -> bool:
        """Blobs of one shard: collected by one call, as that takes longer than to copy a small one."""
        memory, size = self._memory(max(source.together_bytes, self._largest)), jobs[0].shard.payload_bytes
        # not directly into the arena, which others could write to between the copy and its checksum
        payloads = memory[: len(jobs) * size].reshape(len(jobs), size)
        try:
            source.fill(jobs[0].shard, [job.chunk for job in jobs], payloads.reshape(-1))
            return all(write(job, payload, until) for job, payload in zip(jobs, payloads, strict=True))
        finally:
            self._scratch[memory.nbytes].append(memory)

    def _memory(self, num_bytes: int) -> Bytes:
        try:
            return self._scratch[num_bytes].pop()
        except IndexError:  # all buffers are in use
            return aligned(num_bytes)

    def _run(self, jobs: Sequence[ArenaBlob], work: Finish[Result]) -> Finish[Result]:
        """Start work; the returned function waits for its end."""
        if self._are_many_bytes(jobs):
            return self._pool.submit(work).result
        done = work()
        return lambda: done

    def _are_many_bytes(self, jobs: Sequence[ArenaBlob]) -> bool:
        """Whether jobs of one shard are."""
        return len(jobs) * jobs[0].shard.payload_bytes >= THREADED_BYTES and self.workers > 1

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads."""
        self._pool = ThreadPoolExecutor(self.workers, "kvweave-copy")
        self._scratch.clear()

    def close(self) -> None:
        self.workers = 1  # what other threads still copy, they copy themselves
        self._pool.shutdown()

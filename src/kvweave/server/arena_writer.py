"""Writes of payloads into the arena, with their headers. Large ones are copied by threads while the source makes the
next.

A source may return memory that it reuses for the next payload. That is detected by comparing addresses: a payload that
was still being copied from the same memory is requested once more, and from then on each payload is copied before the
next is requested.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np

from kvweave.store import Shard, Source, checksums
from kvweave.store.blob import flat_payload, header_bytes, sealed
from kvweave.store.keys import Bytes


class ArenaBlob(NamedTuple):
    """A blob in the arena: its memory, and the shard, chunk and key it must be of."""

    place: Bytes
    shard: Shard
    chunk: int
    key: bytes


def write(job: ArenaBlob, payload: Bytes, until: float) -> bool:
    """Write payload and header; False if `until` passed, after which the extent may belong to another client."""
    place = job.place[header_bytes(job.shard) :]
    payload_sum = checksums.copy(place, payload, until)
    if payload_sum is None:  # the extent may have been reassigned: write no header into it
        return False
    write_header(job, payload_sum)
    return True


def write_header(job: ArenaBlob, payload_sum: int) -> None:
    """What makes a payload that is there a blob."""
    head = sealed(job.shard, job.chunk, job.key, payload_sum)
    job.place.data[: len(head)] = head


class _Copy(NamedTuple):
    """A payload that is being copied by a thread."""

    job: ArenaBlob
    payload: Bytes
    future: Future[bool]


class ArenaWriter:
    """The payloads of one save. Used by one thread; at most `most` copies are in flight. `fine`: all were in time so
    far."""

    def __init__(self, source: Source, until: float, most: int) -> None:
        self._source, self._until, self._most = source, until, most
        self._copies: deque[_Copy] = deque()
        self._one_by_one = False
        self.fine = True

    def add(self, job: ArenaBlob, threads: Executor | None) -> None:
        """Request a payload from the source and copy it, in one of `threads` if given."""
        under_way = [copy for copy in self._copies if not copy.future.done()]
        payload = self._payload(job)
        suspect = [copy.job for copy in under_way if np.may_share_memory(copy.payload, payload)]
        if suspect:
            self._again([*suspect, job])
        elif threads is None or self._one_by_one:
            self.fine &= write(job, payload, self._until)
        else:
            self._copies.append(_Copy(job, payload, threads.submit(write, job, payload, self._until)))
            if len(self._copies) > self._most:
                self.fine &= self._copies.popleft().future.result()

    def _again(self, jobs: list[ArenaBlob]) -> None:
        self._one_by_one = True
        self.finish()
        for job in jobs:
            self.fine &= write(job, self._payload(job), self._until)

    def _payload(self, job: ArenaBlob) -> Bytes:
        return flat_payload(job.shard, self._source(job.shard, job.chunk))

    def finish(self) -> None:
        """Wait for the copies in flight."""
        while self._copies:
            self.fine &= self._copies.popleft().future.result()

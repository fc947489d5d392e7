"""Payloads into the arena, sealed on the way. Large ones are copied by threads while the source makes the next.

A source may hand out memory that it uses again for the next payload. That is found out by what it gives: what was still
being copied from the same bytes is asked for once more, and from then on every payload is copied before the next.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np

from kvweave.store import Shard, Source, checksums
from kvweave.store.blob import header_bytes, sealed
from kvweave.store.keys import Bytes


class ArenaBlob(NamedTuple):
    """A blob of the arena: where it lies, and what it must be."""

    place: Bytes
    shard: Shard
    chunk: int
    key: bytes


def write(place: Bytes, shard: Shard, chunk: int, key: bytes, payload: Bytes, until: float) -> bool:
    """Seal a payload where it shall lie; False if that took so long that the place may be somebody else's by now."""
    head = header_bytes(shard)
    payload_sum = checksums.copy(place[head:], payload.reshape(-1).view(np.uint8), until)
    if payload_sum is None:  # what the arena holds there by now may be somebody else's doing
        return False
    place[:head] = np.frombuffer(sealed(shard, chunk, key, payload_sum), np.uint8)
    return True


class _Copy(NamedTuple):
    """A payload that a thread copies."""

    job: ArenaBlob
    payload: Bytes
    future: Future[bool]


class ArenaWriter:
    """The payloads of one save. Belongs to one thread; at most `most` are under way. `fine`: all in time so far."""

    def __init__(self, source: Source, until: float, most: int) -> None:
        self._source, self._until, self._most = source, until, most
        self._copies: deque[_Copy] = deque()
        self._one_by_one = False
        self.fine = True

    def add(self, job: ArenaBlob, threads: Executor | None) -> None:
        """Ask the source for a payload, and copy it, by one of `threads` if there are any."""
        under_way = [copy for copy in self._copies if not copy.future.done()]
        payload = self._payload(job)
        suspect = [copy.job for copy in under_way if np.may_share_memory(copy.payload, payload)]
        if suspect:
            self._again([*suspect, job])
        elif threads is None or self._one_by_one:
            self.fine &= write(*job, payload, self._until)
        else:
            self._copies.append(_Copy(job, payload, threads.submit(write, *job, payload, self._until)))
            if len(self._copies) > self._most:
                self.fine &= self._copies.popleft().future.result()

    def _again(self, jobs: list[ArenaBlob]) -> None:
        self._one_by_one = True
        self.finish()
        for job in jobs:
            self.fine &= write(*job, self._payload(job), self._until)

    def _payload(self, job: ArenaBlob) -> Bytes:
        payload = self._source(job.shard, job.chunk)
        if payload.nbytes != job.shard.payload_bytes:
            raise ValueError(
                f"row {job.shard.tag!r}: payload has {payload.nbytes} bytes, {job.shard.payload_bytes} expected"
            )
        return payload

    def finish(self) -> None:
        """Wait for what is under way."""
        while self._copies:
            self.fine &= self._copies.popleft().future.result()

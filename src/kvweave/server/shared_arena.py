"""The arena: shared memory that the daemon owns and every client maps. The daemon keeps the catalog; clients copy the
bytes.

reserve   allocate an extent for a key, evicting until there is one; it is not visible yet
commit    the key is visible          abandon   the extent is freed
          (a key of two extents: the first that is committed is visible, the other is freed)
pin       keep an extent in place, even if its key is deleted    unpin
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvweave.copying import Numbers
from kvweave.errors import ConfigError, OutOfMemory
from kvweave.host_memory import check_memory
from kvweave.server.protocol import NO_ROOM, NOT_IN_ARENA, PRESENT, WRITING
from kvweave.store import MemoryTier, Quota
from kvweave.store.arena_tier import RemovedEntries
from kvweave.store.keys import Bytes
from kvweave.store.striped_file import SECTOR

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE: processes that are passed the file can only read it."""


class Pinned(NamedTuple):
    """The catalog slots that are held; the start of each key (`NOT_IN_ARENA` where it is absent) and its length."""

    slots: Numbers
    starts: Numbers
    lengths: Numbers


class SharedArena(MemoryTier):
    """A memory tier in an anonymous file, whose descriptor can be passed to other processes: to `read_only` ones, if
    so."""

    def __init__(self, capacity: int, *, quotas: Mapping[str, Quota] | None = None, read_only: bool = False) -> None:
        self.num_bytes = -(-capacity // SECTOR) * SECTOR
        check_memory("arena", self.num_bytes)
        self.fd = _memory_file(self.num_bytes)
        memory = np.frombuffer(mmap.mmap(self.fd, self.num_bytes), np.uint8)
        add_seals(self.fd, SIZE_SEALS | (FUTURE_WRITE if read_only else 0))
        super().__init__(buffer=memory, quotas=quotas, align=SECTOR)
        self._bytes = memory
        self._beside: set[int] = set()
        """Starts of extents for keys that are being written elsewhere, too."""

    def bytes_of(self, share: float) -> int:
        """So many bytes are this share of the arena."""
        return int(self.num_bytes * share)

    def view(self, start: int, length: int) -> Bytes:
        return self._bytes[start : start + length]

    # ---- writing

    def reserve(self, keys: Sequence[bytes], lengths: Sequence[int], *, beside: bool = False) -> Numbers:
        """Where each blob may be written; or `PRESENT`, `WRITING` (by another client), or `NO_ROOM`, even after
        eviction. `beside`: also what another client is writing, which may take long, or never end."""
        with self._lock:
            self._check_open()
            # makes the blobs that are present the most recent, so that the others do not evict them
            slots = self._catalog.find(keys)
            self._catalog.touch(slots)
            in_a_row = self._reserve_in_a_row(keys, lengths) if slots.max(initial=-1) < 0 else None
            if in_a_row is not None:
                return in_a_row
            pairs = zip(keys, lengths, strict=True)
            return np.array([self._reserve(key, length, beside=beside) for key, length in pairs], np.int64)

    def _reserve_in_a_row(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Numbers | None:
        """Places for absent keys in one free run, in a quarter of the time of one by one. None if there is no such run,
        or keys are of several tenants, or are being written."""
        catalog, new = self._catalog, {*keys}
        owners = {*map(catalog.owner, keys if catalog.has_quotas else keys[:1])}  # without, all tenants are alike
        if len(new) < len(keys) or len(owners) != 1 or not new.isdisjoint(self._writing):
            return None
        (owner,), sizes = owners, self._extents.rounded_all(np.array(lengths, np.int64))
        ends = sizes.cumsum()
        size = int(ends[-1])
        if not catalog.has_quotas and size <= self._extents.capacity:
            self._evict(size)
        if catalog.used[owner] + size > catalog.limits[owner] or (start := self._extents.take(size)) is None:
            return None
        catalog.charge(owner, size)
        self._writing |= new
        starts: Numbers = start + ends - sizes
        return starts

    def _evict(self, size: int) -> None:
        """Evict until as many bytes are free, wherever, as far as that can be; without quotas."""
        lacking, catalog, removed = size - self._extents.free_bytes, self._catalog, RemovedEntries([], [])
        while lacking > 0 and (victim := catalog.victim(0, size)) is not None:
            lacking -= int(catalog.sizes[victim])
            removed.unpinned.append((int(catalog.starts[victim]), int(catalog.lengths[victim])))
            removed.keys.append(catalog.remove(victim))
        self._evicted += len(removed.keys)
        self._forget(removed)

    def _reserve(self, key: bytes, length: int, *, beside: bool) -> int:
        if key in self._catalog.slot_of:
            return PRESENT
        is_second = key in self._writing
        if is_second and not beside:
            return WRITING
        start = self._room(key, length)
        if start is None:
            return NO_ROOM
        if is_second:
            self._beside.add(start)
        else:
            self._writing.add(key)
        return start

    def commit(self, key: bytes, start: int, length: int) -> None:
        self.commit_all([(key, start, length)])

    def commit_all(self, extents: Sequence[tuple[bytes, int, int]]) -> None:
        """As `commit`, for keys, starts and lengths, of one tenant."""
        if not extents:
            return
        with self._lock:
            keys, starts, lengths = zip(*extents, strict=True)
            if self._catalog.slot_of.keys().isdisjoint(keys):
                sizes = self._extents.rounded_all(np.array(lengths, np.int64))
                self._catalog.add_all(keys, starts, lengths, sizes)
            else:
                for extent in extents:
                    self._commit_first(*extent)
            self._end_writing(keys, starts)

    def _commit_first(self, key: bytes, start: int, length: int) -> None:
        if key in self._catalog.slot_of:
            self._give(key, start, length)
        else:
            self._catalog.add(key, start, length, self._extents.rounded(length))

    def abandon(self, key: bytes, start: int, length: int) -> None:
        with self._lock:
            self._give(key, start, length)
            self._end_writing([key], [start])

    def _end_writing(self, keys: Sequence[bytes], starts: Sequence[int]) -> None:
        if self._beside:
            keys = [key for key, start in zip(keys, starts, strict=True) if start not in self._beside]
            self._beside.difference_update(starts)
        self._writing.difference_update(keys)

    # ---- reading

    def pin(self, keys: Sequence[bytes], *, is_use: bool = True) -> Pinned:
        """Pin the keys that are present; they count as used, earlier keys as the most recent, if it `is_use`."""
        catalog = self._catalog
        with self._lock:
            self._check_open()
            slots = catalog.find(keys)
            if is_use:
                catalog.touch(slots)
            held = slots[slots >= 0]
            catalog.add_pins(held, 1)
            return Pinned(held, np.where(slots >= 0, catalog.starts[slots], NOT_IN_ARENA), catalog.lengths[slots])

    def unpin(self, slots: Numbers) -> None:
        """Unpin; an extent whose key was removed is freed with its last pin."""
        catalog = self._catalog
        with self._lock:
            gone = catalog.ticks[slots] == 0
            catalog.add_pins(slots[~gone], -1)
            for slot in slots[gone].tolist():
                start, length = int(catalog.starts[slot]), int(catalog.lengths[slot])
                if catalog.unpin(slot):
                    self._give_extent(start, length)

    @property
    def is_held(self) -> bool:
        """Whether there are extents that cannot be evicted now, but may be later."""
        return bool(self._writing or self._beside) or bool(self._catalog.pins.any())

    def pinned_bytes(self, slots: Numbers) -> int:
        return int(self._catalog.sizes[slots].sum())

    def close(self) -> None:
        if not self._closed:
            super().close()
            os.close(self.fd)


def _memory_file(num_bytes: int) -> int:
    """An anonymous file with its memory allocated."""
    descriptor = os.memfd_create("kvweave-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise OutOfMemory("arena", wanted_bytes=num_bytes, reason=str(error.strerror)) from error
    return descriptor


def add_seals(descriptor: int, seals: int) -> None:
    """Seal an anonymous file, for good. Raises `ConfigError` where the kernel has no such seal."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"the kernel cannot seal memory ({error.strerror}): read-only arenas need 5.1") from error

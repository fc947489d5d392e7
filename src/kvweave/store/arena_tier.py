"""A tier of fixed size: extents of a medium (memory, a file), a catalog, and eviction when space is needed.

    put      take an extent (evicting until there is one), write, then make it visible
    get      pin, read, unpin: an extent that is being read is never overwritten
    delete   invisible at once; the extent is freed when its last reader is done

The lock is held while the catalog changes, never while bytes are copied or the journal is written: a disk that is slow
to take a record does not delay lookups. `_journal_lock` keeps the order of records; it is taken before the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError, TierError, Unreadable
from kvweave.store.catalog import Catalog, Quota
from kvweave.store.closeable import Closeable
from kvweave.store.extents import ExtentAllocator
from kvweave.store.forking import register_after_fork
from kvweave.store.keys import Bytes
from kvweave.store.removals import RemovalLog
from kvweave.store.tier import ABSENT, ALL, UNREADABLE, Blob, ChecksumObserver, KeyFilter, TierStats

STEP_KEYS = 1 << 14
"""Keys that are processed before others get their turn: some milliseconds."""


class Medium(Protocol):
    """Bytes that many threads may write and read at offsets. Raises `TierError`, and `Unreadable` for bytes that are
    lost."""

    def write(self, start: int, blob: Blob) -> None: ...

    def read(self, start: int, into: Bytes, observer: ChecksumObserver | None = None) -> bool:
        """Fill `into`; returns False if the medium ends before it is full."""
        ...

    def close(self) -> None: ...


class Journal(Protocol):
    """Persists entries, in order. Called with `_journal_lock` held."""

    def added(self, key: bytes, start: int, length: int) -> None: ...

    def removed(self, keys: Sequence[bytes]) -> None:
        """Called before the bytes of these keys may be reused."""
        ...

    def close(self) -> None: ...


class RemovedEntries(NamedTuple):
    """Keys that left the catalog, and the extents of those that are not being read."""

    keys: list[bytes]
    unpinned: list[tuple[int, int]]


class ArenaTier(Closeable):
    """Blobs in extents of `medium`, of at most `capacity` bytes in total."""

    kind: str

    def __init__(
        self,
        name: str,
        medium: Medium,
        capacity: int,
        *,
        align: int,
        quotas: Mapping[str, Quota] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.name = name
        self._medium, self._journal = medium, journal
        self._extents = ExtentAllocator(capacity, align)
        if not self._extents.capacity:
            raise StoreError(f"tier {name!r}: {capacity} bytes are too few for one extent of {align}")
        self._catalog = Catalog(self._extents.capacity, quotas)
        self._set_locks()
        self._moving = 0
        self._writing: set[bytes] = set()
        self._bad: set[int] = set()
        """Starts of extents that could not be read: this process does not write there again."""
        self._evicted = 0
        self._removals: RemovalLog | None = None
        self._closed = False
        register_after_fork(self)

    def _set_locks(self) -> None:
        self._lock, self._journal_lock = threading.RLock(), threading.Lock()
        self._stopped = threading.Condition(self._lock)
        """Notified when bytes were moved."""

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        with self._lock:
            self._check_open()
            found: NDArray[np.bool_] = self._catalog.find(keys) >= 0
        return found

    def contains_now(self, keys: Sequence[bytes]) -> NDArray[np.bool_] | None:
        """As `contains`, but None if another thread changes the catalog now."""
        try:
            return self.contains(keys) if self._lock.acquire(blocking=False) else None
        finally:
            try:  # noqa: SIM105 - an interrupt may come when it is acquired, or in `suppress` before it is released
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass

    def touch(self, keys: Sequence[bytes], *, is_hit: bool = False) -> None:
        catalog, found = self._catalog, [np.empty(0, np.int64)]
        for first in range(0, len(keys), STEP_KEYS):
            with self._lock:
                self._check_open()
                found.append(catalog.find(keys[first : first + STEP_KEYS]))
        with self._lock:
            slots = np.concatenate(found)
            # between two steps entries may be removed: a slot of another key is touched all the same, a free one never
            catalog.touch(np.where(catalog.ticks[slots] > 0, slots, -1), is_hit=is_hit)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        observers: Sequence[ChecksumObserver | None] = observer or [None] * len(keys)
        return [self._get(*each) for each in zip(keys, into, observers, strict=True)]

    def _get(self, key: bytes, target: Bytes, observer: ChecksumObserver | None) -> int:
        catalog = self._catalog
        with self._lock:
            self._check_open()
            slot = catalog.slot_of.get(key, -1)
            if slot < 0:
                return ABSENT
            catalog.touch_one(slot)
            start, length = int(catalog.starts[slot]), int(catalog.lengths[slot])
            if length != target.nbytes:
                return length
            catalog.pins[slot] += 1
            self._moving += 1
        try:
            return length if self._medium.read(start, target, observer) else 0
        except Unreadable:
            self._bad.add(start)
            return UNREADABLE
        finally:
            with self._lock:
                is_removed = catalog.unpin(slot)
            if is_removed:  # perhaps by `clear`, while it was read
                self._erase([(start, length)])
            with self._lock:
                if is_removed:
                    self._give_extent(start, length)
                self._moved()

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        return [self._put(key, blob, blob.num_bytes) for key, blob in zip(keys, blobs, strict=True)]

    def _put(self, key: bytes, blob: Blob, length: int) -> bool:
        with self._lock:
            # what another thread is writing is not stored yet: that write may fail, or the process be killed before
            self._stopped.wait_for(lambda: key not in self._writing)
            self._check_open()
            if (slot := self._catalog.slot_of.get(key)) is not None:
                self._catalog.touch_one(slot)
                return True
            self._writing.add(key)
            self._moving += 1
        try:
            with self._journal_lock:
                start = self._room(key, length)
            if start is not None:
                self._write(key, start, blob, length)
            return start is not None
        finally:
            with self._lock:
                self._writing.discard(key)
                self._moved()

    def _write(self, key: bytes, start: int, blob: Blob, length: int) -> None:
        try:
            self._medium.write(start, blob)
            self._publish(key, start, length)  # only now: a reader never finds half a blob
        except BaseException:
            with self._lock:
                self._give(key, start, length)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name!r} is closed")

    def _moved(self) -> None:
        self._moving -= 1
        self._stopped.notify_all()

    def _publish(self, key: bytes, start: int, length: int) -> None:
        with self._journal_lock:
            if self._journal:
                self._journal.added(key, start, length)
            with self._lock:
                self._catalog.add(key, start, length, self._extents.rounded(length))

    def _room(self, key: bytes, length: int) -> int | None:
        """Allocate an extent and charge it to the key's tenant; evicts entries until there is room. None: there is
        no room. Called with `_journal_lock` held, where there is a journal."""
        catalog, size = self._catalog, self._extents.rounded(length)
        while True:
            with self._lock:
                owner = catalog.owner(key)
                if size > min(self._extents.capacity, catalog.limits[owner]):
                    return None
                fits = catalog.used[owner] + size <= catalog.limits[owner]
                if fits and (start := self._extents.take(length)) is not None:
                    catalog.charge(owner, size)
                    return start
                victim = catalog.victim(owner, size)
                if victim is None:
                    return None
                removed = self._remove([victim])
                self._evicted += 1
            self._forget(removed)

    def _give(self, key: bytes, start: int, length: int) -> None:
        self._catalog.used[self._catalog.owner(key)] -= self._extents.rounded(length)
        self._give_extent(start, length)

    def _give_extent(self, start: int, length: int) -> None:
        if start not in self._bad:
            self._extents.give(start, length)

    def _remove(self, slots: Sequence[int]) -> RemovedEntries:
        """Take entries out of the catalog. Called with the lock held; `_forget` must follow."""
        catalog = self._catalog
        unpinned = [(int(catalog.starts[slot]), int(catalog.lengths[slot])) for slot in slots if not catalog.pins[slot]]
        return RemovedEntries([catalog.remove(slot) for slot in slots], unpinned)

    def _forget(self, removed: RemovedEntries) -> None:
        """Record removals, then free their extents. Called with `_journal_lock` held, where there is a journal."""
        if self._journal:
            # on a full disk the removal is not recorded: the stale record fails its key or checksum later
            with suppress(TierError):
                self._journal.removed(removed.keys)
        if self._removals:
            self._removals.add(removed.keys)
        with self._lock:
            for start, length in removed.unpinned:
                self._give_extent(start, length)

    def follow_removals(self, log: RemovalLog) -> None:
        """From now on add to `log` what leaves this tier."""
        self._removals = log

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._journal_lock:
            removed = self._removed(keys)
            self._forget(removed)
        return len(removed.keys)

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        keys, count = [key for key in self.keys() if key in key_filter], 0
        for first in range(0, len(keys), STEP_KEYS):
            with self._journal_lock:
                removed = self._removed(keys[first : first + STEP_KEYS])
                self._erase(removed.unpinned)
                self._forget(removed)
            count += len(removed.keys)
        return count

    def _removed(self, keys: Sequence[bytes]) -> RemovedEntries:
        with self._lock:
            self._check_open()
            found = (self._catalog.slot_of.get(key) for key in dict.fromkeys(keys))
            return self._remove([slot for slot in found if slot is not None])

    def _erase(self, extents: Sequence[tuple[int, int]]) -> None:
        """Erase bytes that would outlive the process. Called before their extents may be reused."""

    def keys(self) -> list[bytes]:
        """All keys that are stored now."""
        with self._lock:
            return [*self._catalog.slot_of]

    def stats(self) -> TierStats:
        """A snapshot. Does not take the lock: its holder may hang in disk I/O."""
        used = self._extents.capacity - self._extents.free_bytes
        return TierStats(self.name, len(self._catalog), used, self._extents.capacity, self._evicted)

    def after_fork(self) -> None:
        """In a forked child: bytes and journal belong to the parent, and the lock's holder does not exist. The tier
        is closed there."""
        self._set_locks()
        self._moving, self._closed = 0, True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # the kernel could reuse a closed file descriptor while another thread still reads through it
            self._stopped.wait_for(lambda: not self._moving)
        with self._journal_lock:
            if self._journal:
                self._journal.close()
            self._medium.close()

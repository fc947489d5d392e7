"""The disk tier: blobs in files, and a journal of their locations. Survives `kill -9` at any moment.

    DIR/blobs-N   extents, in stripes (`striped_file.py`), reused after eviction; they grow up to the capacity
    DIR/journal   the location of each key (`journal.py`)
    DIR/lock      the process that owns the directory

Nothing is synced: what a power failure loses or tears fails its checksum or key, and is a miss.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import ReadOnly, TierFull, Vanished
from kvweave.store.arena_tier import ArenaTier, RemovedEntries
from kvweave.store.catalog import Quota
from kvweave.store.files import BufferedFile, DirectFile, DirectoryLock, aligned, failure
from kvweave.store.journal import Entries, FileJournal
from kvweave.store.recovery import recovered
from kvweave.store.striped_file import SECTOR
from kvweave.store.tier import Blob
from kvweave.units import parse_bytes


class DiskTier(ArenaTier):
    """Blobs in a directory, at most `capacity` bytes; `direct` bypasses the page cache.

    A directory that cannot be written is served read-only: `writable` is False, and `put` raises `ReadOnly`. One that
    another process has locked is `Busy`.
    """

    kind = "disk"

    def __init__(
        self,
        directory: str | Path,
        capacity: int | str,
        *,
        direct: bool = False,
        quotas: Mapping[str, Quota] | None = None,
        name: str = "disk",
    ) -> None:
        self.directory = Path(directory)
        self._owned = _own(self.directory)
        try:
            file = (DirectFile if direct else BufferedFile)(self.directory / "blobs", writable=self.writable)
        except OSError as error:
            self._release()
            raise failure(str(self.directory), error) from error
        self._files = file.stripes
        self._file_journal = FileJournal(self.directory / "journal", writable=self.writable)
        journal = self._file_journal if self.writable else None
        try:
            super().__init__(name, file, parse_bytes(capacity), align=SECTOR, quotas=quotas, journal=journal)
            self._fill(self._file_journal.open(partial(recovered, files=file.stripes)), file)
        except BaseException:
            file.close()
            self._release()
            raise

    @property
    def writable(self) -> bool:
        return self._owned is not None

    @property
    def _is_gone(self) -> bool:
        owned = self._owned
        return bool(owned and owned.is_gone) or self._file_journal.is_gone or self._files.finds_removed()

    def _fill(self, entries: Entries, file: BufferedFile) -> None:
        """Take over the entries of the journal that fit the files and the capacity."""
        ends = entries.starts + entries.lengths
        fine = file.hold(ends) & (ends <= self._extents.capacity)
        fine &= (entries.starts >= 0) & (entries.starts % SECTOR == 0)
        order = np.flatnonzero(fine)[np.argsort(entries.starts[fine], kind="stable")]
        order = order[_apart(entries.starts[order], ends[order])]
        self._extents.keep(entries.starts[order], entries.lengths[order])
        kept, number_of = np.sort(order), entries.number_of
        if len(kept) < len(number_of):
            keys = [*number_of]
            number_of = {keys[i]: number for number, i in enumerate(kept)}
        lengths = entries.lengths[kept]
        sizes = -(-lengths // SECTOR) * SECTOR
        self._catalog.fill(number_of, entries.tenants[kept], entries.starts[kept], lengths, sizes)

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        if not self.writable:
            raise ReadOnly(f"{self.directory}: cannot be written; what is stored is still served")
        if self._is_gone:
            raise Vanished(f"{self.directory}: files of the store were removed")
        return super().put(keys, blobs)

    def _put(self, key: bytes, blob: Blob, length: int) -> bool:
        try:
            return super()._put(key, blob, length)
        except TierFull:  # the disk has less room than the tier may use
            if not self._shrink(key, length):
                raise
        return super()._put(key, blob, length)

    def _shrink(self, key: bytes, length: int) -> bool:
        """Evict as many bytes for a key, and give their blocks back to the file system; returns whether there were as
        many. Where it does not take blocks back, one entry is evicted: a blob of its length can take its place."""
        catalog, left = self._catalog, self._extents.rounded(length) + SECTOR  # the journal may need one more
        with self._journal_lock:
            while left > 0:
                with self._lock:
                    victim = catalog.victim(catalog.owner(key), 0)
                    if victim is None:
                        return False
                    removed = self._remove([victim])
                    self._evicted += 1
                try:  # before it is recorded, for which there may be no room either; a stale record fails its checksum
                    for start, size in removed.unpinned:
                        self._files.discard(start, size)
                        left -= self._extents.rounded(size)
                except OSError:
                    left = 0
                finally:
                    self._forget(removed)
        return True

    def _erase(self, extents: Sequence[tuple[int, int]]) -> None:
        """What was cleared must not come back when a damaged journal is rebuilt. Its blocks go back to the file system,
        adjacent ones by one call, which may wait for the disk. Where that fails, headers are overwritten."""
        header, runs = aligned(SECTOR), list[tuple[int, int]]()
        header[:] = 0
        for start, length in sorted(extents):
            before = runs.pop() if runs and sum(runs[-1]) == start else (start, 0)
            runs.append((before[0], before[1] + self._extents.rounded(length)))
        try:
            for run in runs:
                self._files.discard(*run)
        except OSError:
            for start, _ in extents:
                with suppress(OSError):  # a disk that fails now: a checksum decides what it returns later
                    self._files.write(start, [header.data])

    def _forget(self, removed: RemovedEntries) -> None:
        super()._forget(removed)
        if self.writable and self._file_journal.wants_rewriting:
            self._rewrite()

    def _rewrite(self) -> None:
        catalog = self._catalog
        with self._lock:
            keys, slots = catalog.by_value()
            starts, lengths = catalog.starts[slots], catalog.lengths[slots]
        self._file_journal.compact(keys, starts, lengths)

    def close(self) -> None:
        with self._journal_lock:
            # The next process evicts in the journal's order.
            if self.writable and not self._closed and self._catalog.was_asked and not self._is_gone:
                self._rewrite()
        super().close()
        self._release()

    def _release(self) -> None:
        if self._owned:
            self._owned.release()
            self._owned = None


def _own(directory: Path) -> DirectoryLock | None:
    """The lock of the directory; None if it can be read but not written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return DirectoryLock(directory / "lock")
    except OSError as error:
        unwritable = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        if unwritable and os.access(directory / "blobs-0", os.R_OK):
            return None
        raise failure(str(directory), error) from error


def _apart(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which extents, in order of start, overlap no other; of two that overlap, neither is trusted."""
    apart = np.ones(len(starts), bool)
    if len(starts) > 1:
        apart[1:] &= np.maximum.accumulate(ends)[:-1] <= starts[1:]
        apart[:-1] &= starts[1:] >= ends[:-1]
    return apart

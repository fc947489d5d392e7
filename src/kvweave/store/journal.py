"""The index of a disk tier: an append-only file of 64-byte records, rebuilt into a catalog at start.

    key (48)   start (8)   length (4)   check (4)          length 0: the key was removed

A record is one `write`; a torn or damaged one is skipped. A key is added after its bytes were written and removed
before they may be overwritten, so that the records are true at whatever moment the process dies.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import mul
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import TierError
from kvweave.store.files import failure
from kvweave.store.keys import KEY_BYTES
from kvweave.store.striped_file import open_regular

RECORD = np.dtype([("key", f"V{KEY_BYTES}"), ("start", "<u8"), ("length", "<u4"), ("check", "<u4")])
PLACE, WORDS = struct.Struct("<QI"), struct.Struct("<15I")
FACTORS, MASK = tuple(0x9E3779B1 * odd & 0xFFFFFFFF for odd in range(1, 30, 2)), 0x6B767765
"""Of the words before its check, by which a record's check is made."""
MAGIC = b"kvweave journal 2\n".ljust(RECORD.itemsize, b"\0")
OTHER_VERSION = re.compile(rb"kvweave journal \d+\n\0*")
MOST_BYTES = 2**32 - 1
SLACK = 65_536
"""The file is rewritten when records of removed entries outnumber live ones by this many."""


class Entries(NamedTuple):
    """Live entries, the oldest first: the index of each key, and by index its tenant, start and length."""

    number_of: dict[bytes, int]
    tenants: NDArray[np.uint64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class FileJournal:
    """Appends records to `path`, which is opened for reading only unless `writable`."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._path, self._writable = path, writable
        self._fd = -1
        self._records = self._live = 0
        self._unrecorded = b""
        """Removals that the disk did not take. They are written before the next record, which may be of a blob in the
        same place: of two in one place neither is trusted."""

    def open(self, recover: Callable[[Entries], Entries]) -> Entries:
        """Read the records, drop torn ones, and append after the last. If the start of the file is damaged or missing,
        `recover` finds the missing entries. On a disk without room for a compacted journal the longer one stays in
        use."""
        try:
            data = self._read() if self._path.exists() else b""
            entries = self._parse(data)
            damaged = data[: len(MAGIC)] != MAGIC
            if damaged:
                entries = recover(entries)
            if self._writable:
                if damaged:
                    self._rewrite([*entries.number_of], entries.starts, entries.lengths)
                else:
                    self._go_on(len(data) - len(data) % RECORD.itemsize, entries)
        except OSError as error:
            raise failure(str(self._path), error) from error
        return entries

    def _read(self) -> bytes:
        with open(open_regular(self._path, os.O_RDONLY), "rb") as file:
            return file.read()

    def _go_on(self, num_bytes: int, entries: Entries) -> None:
        self._fd = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._fd, num_bytes)  # without half a record at its end, so that the next one is aligned
        if self.wants_rewriting:
            self.compact([*entries.number_of], entries.starts, entries.lengths)

    def _parse(self, data: bytes) -> Entries:
        body = memoryview(data)[len(MAGIC) :]
        found = np.frombuffer(body, RECORD, len(body) // RECORD.itemsize)
        live = found[checks(found) == found["check"]]
        head = data[: len(MAGIC)]
        if len(head) == len(MAGIC) and head != MAGIC and OTHER_VERSION.fullmatch(head) and not len(live):
            raise TierError(f"{self._path} is no journal of this version of kvweave; move it away, or clear the store")
        number_of = _numbered(live)
        if len(number_of) < len(live) or not live["length"].all():
            live = live[np.sort(np.fromiter(number_of.values(), np.int64, len(number_of)))]
            live = live[live["length"] > 0]
            number_of = _numbered(live)
        self._records, self._live = len(found), len(live)
        tenants = live.view("<u8").reshape(len(live), RECORD.itemsize // 8)[:, 0].copy()
        return Entries(number_of, tenants, live["start"].astype(np.int64), live["length"].astype(np.int64))

    def _rewrite(self, keys: Sequence[bytes], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Write all live entries to a new file, which atomically replaces the old one."""
        records = packed(keys, starts, lengths)
        beside = self._path.with_suffix(".new")
        descriptor = open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(MAGIC)
                file.write(records.tobytes())
            os.replace(beside, self._path)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                beside.unlink()
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._records, self._live = descriptor, len(records), len(records)

    def added(self, key: bytes, start: int, length: int) -> None:
        if length > MOST_BYTES:
            raise TierError(f"{self._path}: a blob of {length} bytes, {MOST_BYTES} at most; take smaller chunks")
        self._append(packed_one(key, start, length))
        self._live += 1

    def removed(self, keys: Sequence[bytes]) -> None:
        if keys:
            nothing = np.zeros(len(keys), np.int64)
            self._unrecorded += (
                packed_one(keys[0], 0, 0) if len(keys) == 1 else packed(keys, nothing, nothing).tobytes()
            )
            self._live -= len(keys)
            self._append(b"")

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed from its directory."""
        return self._fd >= 0 and not os.fstat(self._fd).st_nlink

    @property
    def wants_rewriting(self) -> bool:
        return self._records > 2 * self._live + SLACK

    def compact(self, keys: Sequence[bytes], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Rewrite the file with these entries, the oldest first. Where that fails the longer file stays in use: this
        only saves space, for which a full disk may lack space."""
        try:
            self._rewrite(keys, starts, lengths)
        except OSError:
            self._records = self._live  # tried again after as many more records, and not with each of them

    def _append(self, record: bytes) -> None:
        records = self._unrecorded + record
        try:
            written = os.write(self._fd, records)
        except OSError as error:
            raise failure(str(self._path), error) from error
        # a full disk took a part of a record: truncate it, so that the next record is aligned
        if written % RECORD.itemsize:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written % RECORD.itemsize)
        complete = written // RECORD.itemsize
        self._unrecorded = self._unrecorded[complete * RECORD.itemsize :]
        self._records += complete
        if written < len(records):
            raise failure(str(self._path), OSError(28, "No space left on device"))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _numbered(records: NDArray[np.void]) -> dict[bytes, int]:
    """The last record of each key."""
    return dict(zip(records["key"].tolist(), range(len(records)), strict=True))


def packed(keys: Sequence[bytes], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.void]:
    records = np.empty(len(keys), RECORD)
    records["key"] = np.frombuffer(b"".join(keys), RECORD["key"])
    records["start"], records["length"] = starts, lengths
    records["check"] = checks(records)
    return records


def checks(records: NDArray[np.void]) -> NDArray[np.uint32]:
    """A weighted sum of a record's words, each with an odd factor: any one damaged word changes it."""
    words = records.view("<u4").reshape(len(records), RECORD.itemsize // 4)[:, :-1]
    sums: NDArray[np.uint32] = (words * np.array(FACTORS, np.uint32)).sum(axis=1, dtype=np.uint32)
    return sums ^ np.uint32(MASK)


def packed_one(key: bytes, start: int, length: int) -> bytes:
    """As `packed`, for one entry: without arrays, which take ten times as long."""
    body = key + PLACE.pack(start, length)
    check: int = sum(map(mul, WORDS.unpack(body), FACTORS)) & 0xFFFFFFFF ^ MASK
    return body + check.to_bytes(4, "little")

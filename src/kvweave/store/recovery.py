"""Recovery of a disk tier whose journal is damaged or missing: entries are found by the headers of the blobs.

A header starts at a sector and contains key, length and description of the payload; the digest of the description is
part of the key. Payloads are not read here: one that was overwritten fails its checksum when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvweave.store.blob import HEADER, MAGIC, VERSION
from kvweave.store.files import aligned
from kvweave.store.journal import Entries
from kvweave.store.keys import KEY_BYTES, SHARD_ID_BYTES, TENANT_BYTES, shard_id
from kvweave.store.striped_file import SECTOR, StripedFile

WINDOW_BYTES = 64 << 10
META_BYTES = 1 << 20


def recovered(known: Entries, files: StripedFile) -> Entries:
    """The known entries, and those found between them, which count as older."""
    found = {key: place for key, *place in _scan(files, known) if key not in known.number_of}
    keys = [*found, *known.number_of]
    starts, lengths = np.array([*found.values()], np.int64).reshape(-1, 2).T
    return Entries(
        dict(zip(keys, range(len(keys)), strict=True)),
        np.frombuffer(b"".join(key[:TENANT_BYTES] for key in keys), "<u8"),
        np.concatenate((starts, known.starts)),
        np.concatenate((lengths, known.lengths)),
    )


def _scan(files: StripedFile, known: Entries) -> Iterator[tuple[bytes, int, int]]:
    end = files.end()
    order = np.argsort(known.starts)
    starts = [*known.starts[order].tolist(), end]
    ends = [0, *(known.starts + known.lengths)[order].tolist()]
    for first, last in zip(ends, starts, strict=True):
        yield from _scan_gap(files, -(-first // SECTOR) * SECTOR, min(last, end))


def _scan_gap(files: StripedFile, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    window = aligned(WINDOW_BYTES)
    while at < end:
        window[:] = 0
        files.read(at, window[: files.in_sectors(min(WINDOW_BYTES, end - at))])
        found = _first(files, at, window)
        if found is None:
            at += WINDOW_BYTES
        else:
            yield found
            at = -(-(found[1] + found[2]) // SECTOR) * SECTOR


def _first(files: StripedFile, at: int, window: NDArray[np.uint8]) -> tuple[bytes, int, int] | None:
    """Key, start and length of the first blob that starts in the window."""
    heads = window.reshape(-1, SECTOR)[:, : len(MAGIC)]
    for number in np.flatnonzero((heads == np.frombuffer(MAGIC, np.uint8)).all(axis=1)).tolist():
        start = at + number * SECTOR
        found = _header(files, start, window[number * SECTOR :])
        if found:
            return found[0], start, found[1]
    return None


def _header(files: StripedFile, start: int, begin: NDArray[np.uint8]) -> tuple[bytes, int] | None:
    """Key and length, if this is a header whose key matches its description."""
    _, version, _, meta_bytes, _, payload_bytes, _, key, _, _ = HEADER.unpack_from(begin.data)
    head_bytes = HEADER.size + meta_bytes
    ends_behind = start + head_bytes + payload_bytes > files.end()
    if version != VERSION or meta_bytes > META_BYTES or head_bytes % SECTOR or ends_behind:
        return None
    head = aligned(head_bytes)
    if files.read(start, head) < head_bytes:
        return None
    meta = head[HEADER.size :].tobytes().rstrip(b" ")
    if shard_id(meta) != key[KEY_BYTES - SHARD_ID_BYTES :]:
        return None
    return key, head_bytes + payload_bytes

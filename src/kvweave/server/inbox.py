"""Inboxes: where a daemon has them, clients map its arena read-only. What a client saves it writes into an inbox, which
no other client can map; the daemon copies it into the arena, and checks the copy.

    client   payload -> inbox                    daemon   inbox -> arena, then the blob may become visible
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvweave.errors import BadRequest, OverLimit
from kvweave.server.shared_arena import SIZE_SEALS, add_seals
from kvweave.store.keys import Bytes
from kvweave.store.striped_file import SECTOR
from kvweave.store.tier_stack import BlobRequest


def inbox_starts(lengths: Sequence[int]) -> list[int]:
    """Where blobs of these lengths lie in an inbox, one after the other; and behind them where the last one ends."""
    return [*accumulate((-(-length // SECTOR) * SECTOR for length in lengths), initial=0)]


class Inbox:
    """One connection's inbox, at the daemon. Its memory is allocated as the client writes to it."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("kvweave-inbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        add_seals(self.fd, SIZE_SEALS)
        self._bytes = np.frombuffer(mmap.mmap(self.fd, num_bytes, prot=mmap.PROT_READ), np.uint8)

    def close_file(self) -> None:
        """When the client has it."""
        os.close(self.fd)

    def copy(self, wants: Sequence[BlobRequest], places: Sequence[Bytes]) -> bool:
        """Copy the blobs that lie at `inbox_starts` to their places; returns whether all copies are intact. The client
        may write meanwhile: then a copy is damaged. Blocks; run it in a thread."""
        starts = inbox_starts([want.num_bytes for want in wants])
        if starts[-1] > self._bytes.nbytes:
            raise OverLimit(f"{starts[-1]} bytes in an inbox of {self._bytes.nbytes}; take a larger --inbox")
        blobs = (self._bytes[at : at + want.num_bytes] for at, want in zip(starts, wants, strict=False))
        return all(_copy(*each) for each in zip(wants, blobs, places, strict=True))


def _copy(want: BlobRequest, blob: Bytes, place: Bytes) -> bool:
    check = want.check()
    head = check.copied(blob, place[check.head_bytes :])
    if head is not None:
        place[: check.head_bytes] = head
    return head is not None


def places_of(extents: Sequence[tuple[bytes, int, int]], wants: Sequence[BlobRequest]) -> list[int]:
    """The starts of reserved extents, in the order of `wants`, which must be exactly these."""
    starts = {key: start for key, start, _ in extents}
    if len(wants) != len(starts) or any(want.key not in starts for want in wants):
        raise BadRequest(f"{len(wants)} blobs are not the {len(starts)} that were reserved")
    return [starts[want.key] for want in wants]

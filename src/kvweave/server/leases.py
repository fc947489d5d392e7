"""What one connection holds: extents it reads (leases) and extents it writes (reservations). Both expire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.copying import Numbers
from kvweave.errors import BadRequest, LeaseExpired, OverLimit
from kvweave.server.shared_arena import SharedArena
from kvweave.store.striped_file import SECTOR

FOREVER = float("inf")
Extent = tuple[bytes, int, int]
"""Key, start and length of a reserved extent."""


@dataclass(slots=True)
class Lease:
    """Slots that are pinned until a time. Of their bytes, `counted` are charged to the quota of lookups, `fetched` to
    that of fetches, and `permanent` to that of pins."""

    slots: Numbers
    until: float
    num_bytes: int
    counted: int = 0
    fetched: int = 0
    permanent: int = 0


class LeaseQuota:
    """Bytes that the leases of all connections hold, and those of them that are permanent. Lookups, fetches and pins
    have a limit each, so that there is always room to write, and for what others fetch."""

    def __init__(self, lookup_bytes: int, fetch_bytes: int, pin_bytes: int) -> None:
        self.lookup_bytes, self.fetch_bytes, self.pin_bytes = lookup_bytes, fetch_bytes, pin_bytes
        self.held_bytes = self.permanent_bytes = 0


def check_bytes(lengths: Sequence[int], held: int, most: int) -> None:
    """Raise `OverLimit` if blobs of these lengths, beside what is held, are more bytes than a connection may hold; a
    blob that is held alone is limited by the arena only."""
    wanted = held + sum(max(length, SECTOR) for length in lengths)
    if (held or len(lengths) > 1) and wanted > most:
        raise OverLimit(f"{wanted} bytes at once, {most} at most; ask for less, or release some first")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Extents that are reserved until a time. `is_written`: their blobs may become visible."""

    extents: tuple[Extent, ...]
    until: float
    is_written: bool


class Leases:
    """The leases and reservations of a connection, under numbers that the client chose."""

    def __init__(self, arena: SharedArena, lease_s: float, most: int, share: LeaseQuota, most_bytes: int) -> None:
        self._arena, self._lease_s, self._most = arena, lease_s, most
        self._share, self._most_bytes, self._counted = share, most_bytes, 0
        self._leases: dict[int, Lease] = {}
        self._reservations: dict[int, Reservation] = {}

    def __len__(self) -> int:
        return len(self._leases) + len(self._reservations)

    @property
    def leased_bytes(self) -> int:
        return sum(lease.num_bytes for lease in self._leases.values())

    @property
    def fetched_bytes(self) -> int:
        """What is held by fetches, and is not permanent."""
        return sum(lease.fetched for lease in self._leases.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(length for reservation in self._reservations.values() for _, _, length in reservation.extents)

    # ---- reading

    def lease(self, number: int, slots: Numbers, *, counted: bool = False) -> bool:
        """Hold pinned slots under a number, in addition to those it holds already; a slot is held once. Raises
        `OverLimit`, and unpins them, if the connection has too many leases.

        If the quota of all connections is used up, or that of this connection's lookups (`counted`), the slots are
        unpinned, and this returns False.
        """
        known = self._leases.get(number)
        if known is None and len(self) >= self._most:
            self._arena.unpin(slots)
            raise OverLimit(f"{self._most} leases are held already; release some")
        if known is not None:
            is_held = np.isin(slots, known.slots)
            self._arena.unpin(slots[is_held])
            slots = slots[~is_held]
        num_bytes = self._arena.pinned_bytes(slots)
        if not self._charge(num_bytes, counted=counted):
            self._arena.unpin(slots)
            return False
        held = self._leases.setdefault(number, Lease(slots[:0], 0.0, 0))
        held.slots, held.until = np.concatenate((held.slots, slots)), max(held.until, time.monotonic() + self._lease_s)
        held.num_bytes += num_bytes
        if counted:
            held.counted += num_bytes
        else:
            held.fetched += num_bytes
        return True

    def _charge(self, num_bytes: int, *, counted: bool) -> bool:
        share, counted_bytes = self._share, num_bytes if counted else 0
        limit = share.lookup_bytes if counted else share.fetch_bytes
        if share.held_bytes + num_bytes > limit or self._counted + counted_bytes > self._most_bytes:
            return False
        self._counted += counted_bytes
        share.held_bytes += num_bytes
        return True

    def pin(self, numbers: Sequence[int], most_bytes: int) -> list[int]:
        """Make leases permanent; returns those that still exist. Raises `OverLimit`, and changes nothing, if that
        would be more than `most_bytes`, or than all connections may pin."""
        alive = [number for number in dict.fromkeys(numbers) if number in self._leases]
        added = sum(self._leases[number].num_bytes - self._leases[number].permanent for number in alive)
        mine = sum(lease.permanent for lease in self._leases.values())
        for before, most, whose in (
            (mine, most_bytes, "by one client"),
            (self._share.permanent_bytes, self._share.pin_bytes, "by all clients"),
        ):
            if before + added > most:
                raise OverLimit(f"{before + added} bytes would be pinned {whose}, {most} at most; unpin something")
        for number in alive:
            lease = self._leases[number]
            lease.until, lease.fetched, lease.permanent = FOREVER, 0, lease.num_bytes
        self._share.permanent_bytes += added
        return alive

    def release(self, numbers: Sequence[int]) -> int:
        leases = [lease for number in numbers if (lease := self._leases.pop(number, None))]
        for lease in leases:
            self._arena.unpin(lease.slots)
            self._counted -= lease.counted
            self._share.held_bytes -= lease.num_bytes
            self._share.permanent_bytes -= lease.permanent
        return len(leases)

    # ---- writing

    def reserve(self, number: int, extents: Sequence[Extent], *, is_written: bool = True) -> None:
        """`is_written`: the client writes to the arena itself, or the daemon has done so."""
        self._reservations[number] = Reservation(tuple(extents), time.monotonic() + self._lease_s, is_written)

    def take(self, number: int) -> tuple[Extent, ...]:
        """Take a reservation's extents over: it does not expire until it is given back by `reserve`."""
        reservation = self._reservations.pop(number, None)
        if reservation is None:
            raise LeaseExpired(f"reservation {number}: expired or unknown; nothing is reserved")
        return reservation.extents

    def holds(self, number: int) -> bool:
        return number in self._reservations

    def commit(self, number: int) -> tuple[Extent, ...]:
        """Make all blobs of a reservation visible; returns their extents."""
        reservation = self._reservations.get(number)
        if reservation is None:
            raise LeaseExpired(f"reservation {number}: expired or unknown; nothing became visible")
        if not reservation.is_written:
            raise BadRequest(f"reservation {number}: its blobs are not in the arena yet; CopyIn comes first")
        del self._reservations[number]
        self._arena.commit_all(reservation.extents)
        return reservation.extents

    def abandon(self, number: int) -> int:
        reservation = self._reservations.pop(number, None)
        self.free(reservation.extents if reservation else ())
        return len(reservation.extents) if reservation else 0

    def free(self, extents: Sequence[Extent]) -> None:
        """Free reserved extents whose blobs shall not become visible."""
        for extent in extents:
            self._arena.abandon(*extent)

    # ---- the end

    def expire(self, now: float) -> int:
        """Release all leases and reservations that have expired; returns how many."""
        leases = [number for number, lease in self._leases.items() if lease.until <= now]
        reservations = [number for number, reservation in self._reservations.items() if reservation.until <= now]
        self.release(leases)
        for number in reservations:
            self.abandon(number)
        return len(leases) + len(reservations)

    def give_back(self) -> int:
        """Release everything."""
        return self.expire(FOREVER)

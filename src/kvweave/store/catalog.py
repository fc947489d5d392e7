"""The catalog of a tier: the extent, tenant, recency and value of each key, and which entry to evict next.

Entries are arrays over slots, so that thousands of them are touched in one step, and the next victims are found by one
partition of an array. Below its floor, a tenant's entries are not evicted for other tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.store.entry_values import MOST_HITS, EntryValues
from kvweave.store.keys import TENANT_BYTES, tenant_id

Slots = NDArray[np.int64]
Scope = tuple[int, bool, bool]
"""A tenant, and whether its own entries, and those of others, may be evicted for it."""

MANY = 1 << 14
"""As many numbers take longer to compare than other threads take."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's share of a tier: `floor_bytes` that others cannot evict, and a limit (None: the whole tier)."""

    floor_bytes: int = 0
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        floor, limit = self.floor_bytes, self.limit_bytes
        if floor < 0 or (limit is not None and limit < floor):
            raise StoreError(f"a floor of {floor} bytes and a limit of {limit}: 0 <= floor <= limit is needed")


class Catalog:
    """Entries of a tier of `capacity` bytes. Not thread-safe: the tier holds its lock."""

    def __init__(self, capacity: int, quotas: Mapping[str, Quota] | None = None) -> None:
        self.slot_of: dict[bytes, int] = {}
        self._set_columns(64)
        self._entry_values = EntryValues()
        self._keys: list[bytes] = []
        self._free: list[int] = []
        self._tick = 1
        self._counting = np.arange(64)
        self.was_asked = False
        """Whether any entry was touched, so that the order of eviction differs from the order in the journal."""
        self._victims: dict[Scope, deque[tuple[int, int]]] = {}
        """By scope, the next entries to evict: slots, with the tick at which they were chosen."""
        self._none_since: dict[Scope, int] = {}
        """By scope in which nothing could be evicted, the value of `_changes` then: until it changes, a search is
        pointless."""
        self._changes = 0
        each = quotas or {}
        self._number_of = {tenant_id(name): number for number, name in enumerate(each, 1)}
        """Tenants with a quota. All others are number 0: their number has no bound, and they are treated alike."""
        self.used = np.zeros(1 + len(each), np.int64)
        self.floors = np.array([0, *(quota.floor_bytes for quota in each.values())], np.int64)
        limits = (capacity if quota.limit_bytes is None else quota.limit_bytes for quota in each.values())
        self.limits = np.array([capacity, *limits], np.int64)
        if self.floors.sum() > capacity:
            raise StoreError(f"tenants' floors are {self.floors.sum()} bytes, more than the {capacity} there are")

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def has_quotas(self) -> bool:
        return len(self.used) > 1

    # ---- owners

    def owner(self, key: bytes) -> int:
        return self._number_of.get(key[:TENANT_BYTES], 0)

    # ---- entries

    def find(self, keys: Sequence[bytes]) -> Slots:
        """The slots of keys, -1 where absent."""
        return np.fromiter(map(self.slot_of.get, keys, repeat(-1)), np.int64, len(keys))

    def touch(self, slots: Slots, *, is_hit: bool = False) -> None:
        """Entries (-1: none) become the most recent, earlier ones more so than later ones. `is_hit`: a lookup found
        them, and its hit needs them. Hits are counted where they end: an entry has as many as the one that had most of
        those at which hits ended that need it. (So the turns of one conversation are one hit each, and what prompts
        have in common has many.)"""
        found = slots[slots >= 0]
        if not len(found):
            return
        self.was_asked = True
        self._tick += len(found)
        if is_hit:
            self._entry_values.hit(self.hits[found], self._tick - self.ticks[found])
            ended = min(int(self.hits[found[-1]]) + 1, MOST_HITS)
            self.hits[found] = np.maximum(self.hits[found], ended)
        self.ticks[found] = self._tick - self._count_to(len(found))
        self.values[found] = self._entry_values.of(self.hits[found])

    def _count_to(self, count: int) -> Slots:
        """0, 1, 2, ...: kept, since during `np.arange` other threads run, wait for the tier's lock, and are next."""
        if count > len(self._counting):
            self._counting = np.arange(2 * count)
        return self._counting[:count]

    def touch_one(self, slot: int) -> None:
        """As `touch`, for one entry: without arrays, which take ten times as long."""
        self.was_asked = True
        self._tick += 1
        self.ticks[slot], self.values[slot] = self._tick, self._entry_values.of_one(self.hits[slot])

    def add(self, key: bytes, start: int, length: int, size: int) -> int:
        """Add an entry whose `size` bytes were charged before."""
        slot = self._free.pop() if self._free else self._new_slot()
        self._keys[slot] = key
        self._tick += 1
        self.starts[slot], self.lengths[slot], self.sizes[slot] = start, length, size
        self.ticks[slot], self.owners[slot], self.pins[slot], self.hits[slot] = self._tick, self.owner(key), 0, 0
        self.values[slot] = self._entry_values.of_one(0)
        self.slot_of[key] = slot
        self.freed()
        return slot

    def add_all(self, keys: Sequence[bytes], starts: Sequence[int], lengths: Sequence[int], sizes: Slots) -> None:
        """As `add`, for entries of one tenant, one after the other."""
        slots = [self._free.pop() if self._free else self._new_slot() for _ in keys]
        for slot, key in zip(slots, keys, strict=True):
            self._keys[slot] = key
        at, count = np.array(slots), len(slots)
        self.starts[at], self.lengths[at], self.sizes[at] = starts, lengths, sizes
        self.ticks[at] = self._tick + 1 + self._count_to(count)
        self.owners[at], self.pins[at], self.hits[at] = self.owner(keys[0]), 0, 0
        self.values[at] = self._entry_values.of_one(0)
        self._tick += count
        self.slot_of.update(zip(keys, slots, strict=True))
        self.freed()

    def remove(self, slot: int) -> bytes:
        """Remove an entry. Its slot is freed, and its bytes are no longer charged, when it is not pinned."""
        key = self._keys[slot]
        del self.slot_of[key]
        self.ticks[slot] = 0
        if not self.pins[slot]:
            self._let_go(slot)
        return key

    def _let_go(self, slot: int) -> None:
        self.used[self.owners[slot]] -= self.sizes[slot]
        self._free.append(slot)

    def add_pins(self, slots: Slots, number: int) -> None:
        """Pin (1) or unpin (-1) entries that are not removed; one that is named twice, twice."""
        if len(slots) < MANY and len({*slots.tolist()}) == len(slots):
            self.pins[slots] += number
        else:  # not always: during `at`, too, other threads run
            np.add.at(self.pins, slots, number)
        if number < 0:
            self.freed()

    def unpin(self, slot: int) -> bool:
        """Unpin; returns whether the entry was removed meanwhile and this was its last pin."""
        self.pins[slot] -= 1
        self.freed()
        if self.pins[slot] or self.ticks[slot]:
            return False
        self._let_go(slot)
        return True

    def charge(self, owner: int, size: int) -> None:
        """Charge bytes to a tenant, before their entry exists."""
        self.used[owner] += size
        if self.floors[owner]:  # entries that were below its floor may now be above it
            self.freed()

    def freed(self) -> None:
        """Note that something may be evictable that was not: an entry was added, unpinned, or is above its floor
        now."""
        self._changes += 1

    def fill(
        self, number_of: dict[bytes, int], tenants: NDArray[np.uint64], starts: Slots, lengths: Slots, sizes: Slots
    ) -> None:
        """Set the initial entries, numbered from 0, the first to evict first."""
        keys, count = [*number_of], len(number_of)
        self.slot_of = number_of
        room = max(64, count)
        self._set_columns(room)
        self._keys = [*keys, *repeat(b"", room - count)]
        self._free = list(range(count, room))
        self.starts[:count], self.lengths[:count], self.sizes[:count] = starts, lengths, sizes
        self.ticks[:count] = np.arange(1, count + 1)
        self._tick = count + 1
        different, whose = np.unique(tenants, return_inverse=True)
        owners = np.array([self.owner(tenant.tobytes()) for tenant in different], np.int64)[whose]
        self.owners[:count] = owners
        self.used += np.bincount(owners, sizes, len(self.used)).astype(np.int64)

    def by_value(self) -> tuple[list[bytes], Slots]:
        """Keys and slots of all entries, the first to evict first."""
        slots = self._sorted(np.fromiter(self.slot_of.values(), np.int64, len(self.slot_of)))
        return [self._keys[slot] for slot in slots.tolist()], slots

    def _set_columns(self, count: int) -> None:
        """Start over, with space for `count` entries."""
        columns = np.zeros((7, count), np.int64)
        self.starts, self.lengths, self.sizes, self.ticks, self.owners, self.pins, self.hits = columns
        self.values = np.zeros(count)

    def _new_slot(self) -> int:
        slot = len(self._keys)
        self._keys.append(b"")
        if slot == len(self.starts):
            for name in ("starts", "lengths", "sizes", "ticks", "owners", "pins", "hits", "values"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        return slot

    # ---- which entry is evicted

    def victim(self, owner: int, size: int) -> int | None:
        """The entry to evict so that `owner` gets `size` bytes; None if there is none. The caller evicts it.

        Over its limit, a tenant's own entries are evicted; below its floor, those of others; otherwise that of the
        least value.
        """
        wanted = self.used[owner] + size
        own, others = wanted > self.limits[owner], wanted > self.floors[owner]
        for mine, theirs in ((True, False),) if own else ((others, True), (True, True)):
            # without a floor the choice does not depend on the tenant, so all such tenants share one queue
            alike = mine and theirs and not self.floors[owner]
            slot = self._next(-1 if alike else owner, mine, theirs)
            if slot is not None:
                age = self._tick - int(self.ticks[slot])
                self._entry_values.evicted(float(self.values[slot]), int(self.hits[slot]), age)
                return slot
        return None

    def _next(self, *scope: *Scope) -> int | None:
        """Amortised constant time: all entries are searched once for many victims, and once each time that there is
        none. (An entry that came after the search is not evicted before the next one, whatever its value.)"""
        if self._none_since.get(scope) == self._changes:
            return None
        victims = self._victims.setdefault(scope, deque())
        for refill in (False, True):
            if refill:
                victims.extend(self._least(*scope))
            while victims:
                slot, tick = victims.popleft()
                if self.ticks[slot] == tick and not self.pins[slot] and self._is_in_scope(slot, *scope):
                    return slot
        self._none_since[scope] = self._changes
        return None

    def _is_in_scope(self, slot: int, owner: int, mine: bool, theirs: bool) -> bool:
        """Whether an entry is the owner's own, or of another tenant that stays above its floor. Without arrays, which
        take ten times as long."""
        whose = self.owners[slot]
        if whose == owner:
            return mine
        return theirs and bool(self.used[whose] - self.sizes[slot] >= self.floors[whose])

    def _may_go(self, owner: int, mine: bool, theirs: bool) -> Slots:
        """The entries in scope, as `_is_in_scope`, that are not pinned."""
        end = len(self._keys)
        whose = self.owners[:end]
        above = self.used[whose] - self.sizes[:end] >= self.floors[whose]
        fair = np.where(whose == owner, mine, theirs & above)
        return np.flatnonzero((self.ticks[:end] > 0) & (self.pins[:end] == 0) & fair)

    def _sorted(self, slots: Slots) -> Slots:
        """By value, and equal ones by age."""
        return slots[np.lexsort((self.ticks[slots], self.values[slots]))]

    def _least(self, *scope: *Scope) -> Iterable[tuple[int, int]]:
        """The entries of the least value that may be evicted, and of equal ones the oldest: one in sixteen, so that one
        search serves many evictions. During it other threads run, and wait for the tier's lock."""
        slots = self._may_go(*scope)
        count = -(-len(slots) // 16)
        if count < len(slots):
            values = self.values[slots]
            most = np.partition(values, count)[count]
            less, equal = slots[values < most], slots[values == most]  # there may be very many of equal value
            oldest = np.argpartition(self.ticks[equal], count - len(less))[: count - len(less)]
            slots = np.concatenate((less, equal[oldest]))
        slots = self._sorted(slots)
        return zip(slots.tolist(), self.ticks[slots].tolist(), strict=True)

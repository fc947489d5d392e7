"""A queue of points in the order of a policy's keys, from which any point can leave at any time.

Sorted buckets of at most `BUCKET` entries: an insertion or a removal is a bisection and a short move, nothing is ever
left behind, and no call costs more than another. (A heap with entries that are void has to be cleaned up, all at once.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, Final

from kvweave.prefix.node import Point

BUCKET: Final = 512

Entry = Any
"""A tuple of the policy's key (its parts, where it is a tuple: one comparison does), the order of arrival (so that
points are never compared), and the point. (Not typed as a tuple: compiled code would unpack and pack it again at every
use.)"""


class EvictionQueue:
    def __init__(self, is_tips: bool) -> None:
        self.is_tips = is_tips
        """Whether its points are the ends of leaves."""
        self._buckets: list[list[Entry]] = []
        self._last: list[Entry] = []
        """The last entry of each bucket."""
        self._arrivals = 0
        self.size = 0

    def add(self, point: Point, key: Any) -> None:
        assert point.queue is None, "a point is in one queue at most"
        self._arrivals += 1
        rest = (self._arrivals, point)
        entry: Entry = key + rest if isinstance(key, tuple) else (key, self._arrivals, point)
        point.queue, point.entry = self, entry
        self.size += 1
        if not self._buckets:
            self._buckets.append([entry])
            self._last.append(entry)
            return
        at = bisect_left(self._last, entry, 0, len(self._last) - 1)
        bucket = self._buckets[at]
        insort(bucket, entry)
        self._last[at] = bucket[-1]
        if len(bucket) > BUCKET:
            half = len(bucket) // 2
            self._buckets[at : at + 1] = [bucket[:half], bucket[half:]]
            self._last[at : at + 1] = [bucket[half - 1], bucket[-1]]

    def remove(self, point: Point) -> None:
        entry, at, index = point.entry, 0, 0
        bucket = self._buckets[0]
        if bucket[0] is not entry:  # most that leave are evicted, and come first
            at = bisect_left(self._last, entry, 0, len(self._last) - 1)
            bucket = self._buckets[at]
            index = bisect_left(bucket, entry)
        assert bucket[index][-1] is point, "the entry of a point is where its key says"
        del bucket[index]
        self.size -= 1
        point.queue = point.entry = None
        if bucket:
            self._last[at] = bucket[-1]
        else:
            del self._buckets[at], self._last[at]

    def first(self) -> Entry | None:
        """The entry with the smallest key."""
        return self._buckets[0][0] if self._buckets else None

    def at(self, index: int) -> Point:
        """The point of the entry with the smallest key but so many."""
        number = 0
        while index >= len(self._buckets[number]):
            index -= len(self._buckets[number])
            number += 1
        point: Point = self._buckets[number][index][-1]
        return point

    def every(self, each: int) -> list[Point]:
        """One of `each` points, in their order."""
        points, at = list[Point](), 0
        for bucket in self._buckets:
            points += [entry[-1] for entry in bucket[at::each]]
            at = (at - len(bucket)) % each
        return points

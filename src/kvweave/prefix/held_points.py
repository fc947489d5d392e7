"""Resume points whose window pages block tables reference: evicting one would free little, so they are in no queue."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvweave.pool import NULL, GroupPages, Ids
from kvweave.prefix.node import Point

MOST_AT_ONCE: Final = 64
LOOKED_AT: Final = 2048
"""So many points return to the queues at a time, and so many are looked at until there are any."""
NOT_HELD: Final = -1
QUEUED_ANYWAY: Final = -2
"""A point is not held; or it is queued though it would be: no others were left."""
PATIENCE: Final = 32
"""Points are looked at when tables have released so many pages for each: two pages of each, all over the memory, are
read then. (With 1, a request under eviction took 40 us more, nearly half of its time.)"""


class HeldPoints:
    """Of the shortest window, each point has the first page that it needs, which tables release first, and the last
    one, which only tables of sequences at or behind it reference. A point is held while tables reference both."""

    def __init__(self, pages: GroupPages) -> None:
        self._pages = pages
        self.points: list[Point] = []
        self._set(np.zeros((2, 64), np.int32))
        self._seen = 0
        """`GroupPages.num_unreferenced` when points were last looked at."""

    def _set(self, ends: Ids) -> None:
        """First and last pages, in the points' order."""
        self._ends = ends
        self._first_of, self._last_of = ends[0].data, ends[1].data

    def holds(self, point: Point) -> bool:
        """Whether a point that is in no queue would be held."""
        if point.held == QUEUED_ANYWAY:
            return False
        if point.last_page == NULL:
            group, node = self._pages.group, point.node
            first, end = group.first_block(point.position), point.position // group.slot_tokens
            point.last_page = node.page_of(group, end - 1)
            point.first_page = node.page_of(group, first if first < end else node.start // group.slot_tokens)
        return self._pages.is_referenced(point.last_page) and self._pages.is_referenced(point.first_page)

    def add(self, point: Point) -> None:
        at = point.held = len(self.points)
        self.points.append(point)
        if at == self._ends.shape[1]:
            self._set(np.concatenate([self._ends, self._ends], axis=1))
        self._first_of[at], self._last_of[at] = point.first_page, point.last_page

    def remove(self, point: Point) -> None:
        """The last one takes its place."""
        at, last = point.held, self.points.pop()
        if last is not point:
            self.points[at], last.held = last, at
            self._first_of[at], self._last_of[at] = last.first_page, last.last_page
        point.held = NOT_HELD

    def poll(self) -> list[Point]:
        """`unheld`, but only now and again as tables release pages."""
        if self._pages.num_unreferenced - self._seen <= PATIENCE * len(self.points):
            return []
        self._seen = self._pages.num_unreferenced
        return self.unheld()

    def unheld(self) -> list[Point]:
        """Points that are held no longer, some of them."""
        found, start = list[Point](), 0
        while start < len(self.points) and len(found) < MOST_AT_ONCE:
            first, last = self._pages.are_referenced(self._ends[:, start : min(start + LOOKED_AT, len(self.points))])
            found += [self.points[start + at] for at in np.flatnonzero(~(first & last))[:MOST_AT_ONCE].tolist()]
            start += LOOKED_AT
        return found[:MOST_AT_ONCE]

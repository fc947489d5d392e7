"""Resume points whose window pages block tables name: evicting one would free nothing, so they wait in no queue."""

from __future__ import annotations

import numpy as np

from kvweave.pool import GroupPages, Ids
from kvweave.prefix.node import Point
from kvweave.prefix.tree import PageRun

MOST_WOKEN = 64
"""So many points return to the queues at a time."""


class HeldPoints:
    """Of the shortest window, each point has the first page that it needs, which tables let go of first, and the last
    one, which only tables of sequences at or behind it name. A point is held while tables name both."""

    def __init__(self, pages: GroupPages) -> None:
        self._group_pages = pages
        self._points: list[Point] = []
        self._ends: Ids = np.zeros((2, 64), np.int32)
        """First and last pages, in the points' order."""
        self._seen = 0
        """Of the pages that tables had let go of, when it was last asked which points are held no longer."""

    def window_ends(self, runs: list[PageRun]) -> tuple[int, int]:
        """Of the window pages that a point needs: the first behind the head, and the last."""
        group = self._group_pages.group
        own = [run for run in runs if run.group is group]
        behind_head = [run for run in own if run.first >= group.head_blocks] or own
        return int(behind_head[-1].pages[0]), int(own[0].pages[-1])

    def holds(self, point: Point) -> bool:
        """Whether a point that is in no queue would be held."""
        first, last = point.window_ends
        return self._group_pages.is_named(first) and self._group_pages.is_named(last)

    def add(self, point: Point) -> None:
        at = point.held = len(self._points)
        self._points.append(point)
        if at == self._ends.shape[1]:
            self._ends = np.concatenate([self._ends, self._ends], axis=1)
        self._ends[:, at] = point.window_ends

    def remove(self, point: Point) -> None:
        """The last one takes its place."""
        at, last = point.held, self._points.pop()
        if last is not point:
            self._points[at], last.held = last, at
            self._ends[:, at] = last.window_ends
        point.held = -1

    def let_go(self) -> list[Point]:
        """Points that are held no longer, some of them, if tables have let go of pages since this was last asked."""
        if not self._points or self._seen == self._group_pages.num_let_go:
            return []
        self._seen = self._group_pages.num_let_go
        return self.unheld()

    def unheld(self) -> list[Point]:
        """Points that are held no longer, some of them."""
        first, last = self._group_pages.are_named(self._ends[:, : len(self._points)])
        return [self._points[at] for at in np.flatnonzero(~(first & last))[:MOST_WOKEN].tolist()]

    @property
    def all(self) -> list[Point]:
        return self._points

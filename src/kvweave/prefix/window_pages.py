"""The window pages of the tree, and the resume points that hold them.

A point needs the pages of [tail(position), position) and of the head. What it needs before the point above it that one
needs as well: so a point counts as a holder of the pages between the two alone, and the point above shields it from the
rest. A page that no point holds leaves the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvweave.pool import NULL, GroupPages, Ids
from kvweave.prefix.node import Kind, Node, Point
from kvweave.prefix.retention import NEVER
from kvweave.prefix.tree import PageRun, Tree

MOST_SHIELDED = 4
"""A point shields so many others at most: when it goes, each of them is looked at."""


class WindowPages:
    """`groups`: the windows of which this rank has pages."""

    def __init__(self, tree: Tree, pages: Sequence[GroupPages]) -> None:
        self.groups = [group for group in tree.windows if group.has_pages]
        self._tree = tree
        self._pages = pages

    def runs(self, node: Node, position: int, start: int = 0, stop: int = NEVER) -> list[PageRun]:
        """The window pages, heads included, that going on from a position needs of the tokens [start, stop) on the path
        down to `node`."""
        runs = list[PageRun]()
        for group in self.groups:
            low, end = start // group.slot_tokens, min(position, stop) // group.slot_tokens
            first = min(group.first_block(position), end)
            runs += self._tree.runs(group, node, max(first, low), end)
            runs += self._tree.runs(group, node, low, min(group.head_blocks, first))
        return runs

    def has_evictable(self, point: Point) -> bool:
        """Whether a point, or one that it stands for, needs a page that no table references."""
        for other in point.node.points if point.kind == Kind.SPACED else (point,):
            for run in self.runs(other.node, other.position) if other.kind == point.kind else ():
                if not self._pages[run.group.number].are_referenced(run.pages).all():
                    return True
        return False

    # ---- points that come

    def hold(self, points: list[Point], held: Sequence[Ids]) -> bool:
        """A new point, or several ones of a run between which there is no gap, hold the pages that they need; those
        that the tree lacks are taken out of `held` (by group and block). False, and nothing done, where that cannot
        be."""
        node, first, last = points[0].node, points[0].position, points[-1].position
        above, runs = node.last_point(last), list[PageRun]()
        for group in self.groups if last > first else ():
            at = np.array([point.position for point in points])
            has_gaps = (group.first_blocks(at[1:]) > at[:-1] // group.slot_tokens).any()
            if has_gaps or (above is not None and above.position > first):
                return False
            runs += self._tree.runs(group, node, first // group.slot_tokens, last // group.slot_tokens)
        above = above if above is not None and len(above.shielded) < MOST_SHIELDED else None
        runs += self.runs(node, first, 0 if above is None else above.position)
        if held and not self._fill(runs, held):
            return False
        for run in runs:
            self._pages[run.group.number].enter_cache(run.pages)
        for point in points:
            _shield(above, point)
            above = point
        return True

    def _fill(self, runs: list[PageRun], held: Sequence[Ids]) -> bool:
        """Fill the gaps of window runs with held pages; False, and nothing done, where some are nowhere."""
        gaps = list[tuple[PageRun, Ids]]()
        for run in runs:
            if np.count_nonzero(run.pages) < len(run.pages):
                ours = held[run.group.number][run.first : run.first + len(run.pages)]
                if np.count_nonzero(run.pages | ours) < len(ours):
                    return False
                gaps.append((run, ours))
        for run, ours in gaps:
            np.copyto(run.pages, ours, where=run.pages == NULL)
            self._tree.emit_kept(run.node, [run.group])
        return True

    def keep_needed(self, node: Node) -> None:
        """Of the window pages of a new run the tree keeps those that points hold."""
        for group in self.groups:
            self._pages[group.number].prune(node.pages[group.number])
        self._tree.emit_kept(node, self.groups)

    # ---- points that go

    def release(self, point: Point) -> None:
        """A point goes, and with it the pages that no other point needs."""
        for run in self._hand_down(point) if self.groups else ():
            before = run.pages.copy() if self._tree.emit else run.pages
            if self._pages[run.group.number].leave_cache(run.pages):
                self._tree.emit_lost(run, before)

    def _hand_down(self, point: Point) -> list[PageRun]:
        """The points that one which goes shields hold what they need instead of it; returns what it holds no more."""
        start, above, others, runs = point.kept_from, point.shield, point.shielded, list[PageRun]()
        if above is not None:
            above.shielded.remove(point)
        if len(others) == 1:  # it takes over what both need as it is
            _shield(above, others[0])
            for group in self.groups:
                low = max(group.first_block(point.position), start // group.slot_tokens)
                end = min(group.first_block(others[0].position), point.position // group.slot_tokens)
                runs += self._tree.runs(group, point.node, low, end)
            return runs
        for other in others:
            _shield(above if above is not None and len(above.shielded) < MOST_SHIELDED else None, other)
            for run in self.runs(point.node, other.position, other.kept_from, point.position):
                self._pages[run.group.number].enter_cache(run.pages)
        return self.runs(point.node, point.position, start)


def _shield(above: Point | None, point: Point) -> None:
    point.shield = above
    if above is not None:
        above.shielded.append(point)

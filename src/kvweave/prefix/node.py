"""A node of the prefix tree is a resume point: its end. Its edge is the run of tokens from the point above.

    root --[ system prompt ]-- A --[ question 1, answer 1 ]-- B
                               \\--[ question 2 ]-- C

Per group of rows it holds an int32 array with the page of each block of its run, NULL where the page is not kept: all
pages of groups that see everything, the blocks of [tail(end), end) of windows. States it holds all together, a page a
group, by position: those at its end. Windows and states may keep `extras` in between, of positions passed on the way:
resume points that nobody has asked for. One that is asked for becomes a node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.pool import Ids

Tokens = NDArray[np.int32]
Snapshots = dict[int, tuple[int, ...]]
"""State pages, one a group of states, by the position they were taken at."""


class Node:
    """One run of tokens. `pins` counts the running sequences at or below it, `uses` those that stand exactly on it."""

    __slots__ = (
        "children",
        "counts",
        "end",
        "extras",
        "hits",
        "id",
        "last_used",
        "pages",
        "parent",
        "pins",
        "priority",
        "queued",
        "rolling",
        "snapshots",
        "start",
        "tokens",
        "uses",
    )

    def __init__(
        self, id: int, parent: Node | None, start: int, tokens: Tokens, pages: list[Ids], snapshots: Snapshots
    ) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens
        self.pages = pages
        """By group; those of states have none."""
        self.snapshots = snapshots
        self.counts = [0] * len(pages)
        """Pages kept, by group; for states, how many snapshots. The tree counts them."""
        self.children: dict[bytes, Node] = {}
        self.extras = False
        self.pins = 0
        self.uses = 0
        self.last_used = 0
        self.hits = 0
        self.priority = 0
        self.queued = 0
        """In which queues of the evictor it is: a bit each."""
        self.rolling = False
        """Whether it is the end of a sequence that still grows, and that nobody else has used."""

    def put(self, group: int, pages: Ids) -> None:
        """Replace a group's pages."""
        self.pages[group] = pages
        self.counts[group] = int(np.count_nonzero(pages))

    def path(self) -> list[Node]:
        """The nodes from the root, which is left out, down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

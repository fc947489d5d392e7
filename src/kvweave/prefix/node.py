"""A node of the prefix tree is a resume point: its end. Its edge is the run of tokens from the point above.

    root --[ system prompt ]-- A --[ question 1, answer 1 ]-- B
                               \\--[ question 2 ]-- C

Per group it holds an int32 array with the page of each block of its run, NULL where the page is not kept: all pages
of groups that see everything, the blocks of [tail(end), end) of windows, the one snapshot at the end of states.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.pool import NULL, Ids

Tokens = NDArray[np.int32]


class Node:
    """One run of tokens. `pins` counts the running sequences at or below it, `uses` those that stand exactly on it."""

    __slots__ = (
        "children",
        "end",
        "hits",
        "id",
        "last_used",
        "pages",
        "parent",
        "pins",
        "priority",
        "rolling",
        "start",
        "tokens",
        "uses",
        "wanted",
    )

    def __init__(self, id: int, parent: Node | None, start: int, tokens: Tokens, pages: list[Ids]) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.uses = 0
        self.last_used = 0
        self.hits = 0
        self.wanted = True
        self.priority = 0
        self.rolling = False
        """Whether it is the end of a sequence that still grows, and that nobody else has used."""

    def count(self, group: int) -> int:
        """Pages kept in a group."""
        return int(np.count_nonzero(self.pages[group]))

    def path(self) -> list[Node]:
        """The nodes from the root, which is left out, down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def has(self, group: int) -> bool:
        return bool((self.pages[group] != NULL).any())

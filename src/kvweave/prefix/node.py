"""The prefix tree's parts: nodes are runs of tokens, points are positions inside them from which sequences resume.

    root --[ system prompt   .   . p]-- A --[ question 1, answer 1  p]-- B        p: a resume point
                                        \\--[ question 2  p]-- C                  .: one that nobody has asked for

Per full group a node holds the page of every block of its run; per window group an array with NULL where no page is
kept: exactly the blocks of [tail(p), p) of the points p are. The states of a point are pages of its own, one a group.
What a point needs before the point above it that one needs as well: each is counted for the pages between the two.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.pool import NULL, Ids, PagedGroup

Tokens = NDArray[np.int32]
StatePages = tuple[int, ...]
"""The state after some position: a page of each state group, in the groups' order."""


class Kind(IntEnum):
    """Why a resume point is there."""

    SPACED = 0
    """Kept every so many tokens of a prompt; nobody has asked for it."""
    ANSWER = 1
    """The end of what a sequence generated, or the last point before it."""
    PROMPT = 2
    """The last position from which the same prompt can be asked again."""
    BRANCH = 3
    """Where a prompt left the path of an earlier one, or resumed."""


class PastUse(NamedTuple):
    """What a point that is made again had been used for: its hits, and whether the only one was by a prompt that went
    on from the end of a leaf (`Point.continued`)."""

    hits: int
    continued: bool = False


class Point:
    """A resume point: its position, and what eviction knows of it. `pins` counts who must find its states unharmed."""

    def __init__(self, node: Node, position: int, kind: Kind, states: StatePages) -> None:
        self.node = node
        self.position = position
        self.kind = kind
        self.states = states
        self.alive = True
        self.last_used = 0
        self.floor = 0.0
        """That of the policy's order, when it was last used."""
        self.hits = 0
        self.priority = 0
        self.pins = 0
        self.shield: Point | None = None
        """The point above it, if any, that holds the window pages before that one for it; and those it does so for."""
        self.shielded: list[Point] = []
        self.found = 0
        """Tokens that the request which made it had found in the cache."""
        self.continued = False
        """Whether it was the end of a leaf when it was hit for the first time."""
        self.cut = False
        """Whether it is what was left when the end of a leaf was evicted, and was not hit since."""
        self.weight = 0.0
        """How many times more slowly than others it ages, where the policy looks at ages; 0 until that is asked."""
        self.queue: Any = None
        """The eviction queue that it is in, if any, and its entry there."""
        self.entry: Any = None
        self.queued = 0
        """Clock when it came to wait there."""
        self.first_page = self.last_page = NULL
        """Of the shortest window: the first page behind the head that it needs, and the last; NULL until asked."""
        self.held = -1
        """Its number among the held points, if it is one of them (see `held_points`)."""

    @property
    def kept_from(self) -> int:
        """Of the window pages that it needs, it is counted as a holder of those from here on."""
        return 0 if self.shield is None else self.shield.position


class Node:
    """One run of tokens. `pins` counts the holders (running sequences, pins) at or below it, `uses` those exactly at
    its end. `points` are in order."""

    def __init__(self, id: int, parent: Node | None, start: int, tokens: Tokens, pages: list[Ids]) -> None:
        self.id = id
        self.parent = parent
        self.namespace: Any = None if parent is None else parent.namespace
        """What the sequences below its root have in common."""
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens
        self.key = b""
        """Its first tokens, a grid of them, as its parent knows it."""
        self.pages = pages
        """By group; those of states have none."""
        self.points: list[Point] = []
        self.children: dict[bytes, Node] = {}
        self.running: dict[bytes, dict[Any, None]] | None = None
        """Running sequences whose published tokens end here, by their next tokens: before a prompt continues here
        with the same tokens, what they have committed is published. No bytes: the next tokens are not known yet."""
        self.pins = 0
        self.uses = 0

    def point_at(self, position: int) -> Point | None:
        for point in reversed(self.points):
            if point.position <= position:
                return point if point.position == position else None
        return None

    def last_point(self, limit: int, low: int = 0, *, skip_spaced: bool = False) -> Point | None:
        """The last point up to `limit` on the path down to this node, of the runs that end behind `low`."""
        at: Node | None = self
        while at is not None and at.end > low:
            for point in reversed(at.points):
                if point.position <= limit and not (skip_spaced and point.kind == Kind.SPACED):
                    return point
            at = at.parent
        return None

    def page_of(self, group: PagedGroup, block: int) -> int:
        """The page of a block, in this node or above."""
        node = self
        while node.start > block * group.slot_tokens and node.parent is not None:
            node = node.parent
        return int(node.pages[group.number][block - node.start // group.slot_tokens])

    def first_spaced(self) -> Point | None:
        """The first of the points that nobody has asked for."""
        for point in self.points:
            if point.kind == Kind.SPACED:
                return point
        return None

    def path(self) -> list[Node]:
        """The nodes from the root, which is left out, down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

"""What a policy may know of a resume point, and the policies with a fixed rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kvweave.pool import PagedGroup
from kvweave.prefix.node import Kind, Point
from kvweave.prefix.order import Order


class EvictionCandidate:
    """What a policy may know of a resume point. Use it at once, do not keep it: some of it is read when it is asked."""

    def __init__(self, point: Point, groups: list[PagedGroup], is_tip: bool, now: int) -> None:
        self.kind = point.kind
        """Why it was made."""
        self.wanted = point.kind != Kind.SPACED
        """False for points kept every so many tokens that nobody has asked for."""
        self.last_used = point.last_used
        """Clock of the last hit, or of its making."""
        self.age = now - point.last_used
        """Moments since then; a request takes a few of them."""
        self.found = point.found
        """Tokens of its prompt that the request which made it had found in the cache."""
        self.hits = point.hits
        self.priority = point.priority
        """As given by the requests that made or used it: the highest."""
        self.position = point.position
        """Tokens from the start of the prompt."""
        self._point, self._groups, self._is_tip = point, groups, is_tip
        self._tokens = -1

    @property
    def tokens(self) -> int:
        """Tokens it saves over the nearest point above it."""
        if self._tokens < 0:  # asked for several times, and a walk up the tree
            above = self._point.node.last_point(self.position - 1)
            self._tokens = self.position - (0 if above is None else above.position)
        return self._tokens

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes: of its states, of the windows and, at the end of a leaf, of all rows since the nearest
        point above it."""
        return freed_bytes(self._groups, self.tokens, self._is_tip)

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of full attention that its tokens take."""
        return row_bytes(self._groups, self.tokens)


def freed_bytes(groups: list[PagedGroup], tokens: int, is_tip: bool) -> int:
    """Bytes of a point that saves so many tokens: states, windows and, at the end of a leaf, rows."""
    num_bytes = 0
    for group in groups:
        if group.is_state:
            num_bytes += group.page_bytes
        elif group.is_window or is_tip:
            span = group.reach.span
            num_bytes += group.page_bytes * (tokens if span is None else min(tokens, span)) // group.slot_tokens
    return num_bytes


def row_bytes(groups: list[PagedGroup], tokens: int) -> int:
    """Bytes of the rows of full attention of so many tokens."""
    return sum([group.page_bytes * tokens // group.slot_tokens for group in groups if group.is_full])


class ValuePolicy(Protocol):
    """A policy as a class. It may have `on_hit(point)`, `on_evict(point)` and `on_ghost_hit(ghost)` as well."""

    def value(self, point: EvictionCandidate) -> float:
        """What keeping a point is worth: of those that are asked the least goes first."""
        ...


Policy = Callable[[EvictionCandidate], Any] | ValuePolicy
"""A function whose key stays until the point is used again, the smallest goes first; or a class."""


class KeyOrder(Order):
    """The order of a function's keys: one queue."""

    def __init__(self, groups: Sequence[PagedGroup], key: Callable[[EvictionCandidate], Any]) -> None:
        super().__init__(groups)
        self._key = key

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:
        return 0, self._key(EvictionCandidate(point, self.groups, is_tip, now))


class WeightedLRU(Order):
    """What was used longest ago goes first, by an age that passes more slowly for what was hit before (`HIT_WEIGHT`),
    and for what saves many tokens for its bytes; of all points first those that nobody has asked for."""

    num_queues = 3

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:  # noqa: ARG002
        return 0 if point.kind == Kind.SPACED else 2 if point.hits else 1, point.last_used

    def value(self, entry: Any, is_tip: bool, now: int) -> Any:
        point: Point = entry[-1]
        age = now - point.last_used + 1
        if point.kind == Kind.SPACED:
            return -float(age + WANTED)
        return -age / (self._density(point, is_tip) * (HIT_WEIGHT if point.hits else 1.0))

    def _density(self, point: Point, is_tip: bool) -> float:
        """A power of the tokens that a point saves for its bytes, 1 where these are rows alone; worked out when a point
        comes first in its queue, and kept until it is used again."""
        if not point.weight:
            candidate = EvictionCandidate(point, self.groups, is_tip, point.last_used)
            point.weight = (max(1, candidate.row_bytes) / max(1, candidate.num_bytes)) ** SIZE_POWER
        return point.weight


class GreedyDual(Order):
    """Greedy-dual with sizes and frequencies: uses x tokens saved for the bytes, plus the value of what went last, so
    that what is not used again falls behind."""

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:
        candidate = EvictionCandidate(point, self.groups, is_tip, now)
        gain = (1 + candidate.hits) * max(1, candidate.row_bytes) / max(1, candidate.num_bytes)
        return 0, self.floor + gain

    def on_evict(self, point: Point, now: int) -> None:  # noqa: ARG002
        self.floor = point.entry[0]


HIT_WEIGHT: Final = 4.0
SIZE_POWER: Final = 0.3
"""Measured on public traces (docs/measurements/reuse.md)."""
WANTED: Final = 1 << 62
"""No clock gets so far; one number is compared sooner than two."""


def lru(candidate: EvictionCandidate) -> Any:
    """Least recently used first; what nobody ever asked for before all."""
    return candidate.last_used + WANTED if candidate.wanted else candidate.last_used


def lfu(candidate: EvictionCandidate) -> Any:
    """Least often used first, then the least recently."""
    return (candidate.hits, candidate.last_used)


def priority(candidate: EvictionCandidate) -> Any:
    """Lowest priority first, then the least recently used."""
    return (candidate.priority, candidate.wanted, candidate.last_used)


def cost(candidate: EvictionCandidate) -> Any:
    """Fewest tokens to recompute for each byte freed first; ties by recency."""
    return (candidate.tokens * (1 + candidate.hits) / max(1, candidate.num_bytes), candidate.last_used)

"""Eviction policies: which resume point goes first.

A policy is any function of an `EvictionCandidate` that returns a sort key: the smallest goes first, and a key stays as
it is until the point is used again. `WeightedLRU`, the default, compares ages, which go on by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol

from kvweave.pool import PagedGroup
from kvweave.prefix.node import Kind, Point


class EvictionCandidate:
    """What a policy may know of a resume point. It reads the point itself: use it at once, do not keep it."""

    __slots__ = ("_groups", "_is_tip", "_point", "_tokens")

    def __init__(self, point: Point, groups: Sequence[PagedGroup], is_tip: bool) -> None:
        self._point = point
        self._groups = groups
        self._is_tip = is_tip
        self._tokens = -1

    @property
    def wanted(self) -> bool:
        """False for points kept every so many tokens that nobody has asked for."""
        return self._point.kind != Kind.SPACED

    @property
    def kind(self) -> Kind:
        """Why it was made."""
        return self._point.kind

    @property
    def last_used(self) -> int:
        """Clock of the last hit, or of its making."""
        return self._point.last_used

    @property
    def hits(self) -> int:
        return self._point.hits

    @property
    def priority(self) -> int:
        """As given by the requests that made or used it: the highest."""
        return self._point.priority

    @property
    def position(self) -> int:
        """Tokens from the start of the prompt."""
        return self._point.position

    @property
    def tokens(self) -> int:
        """Tokens it saves over the nearest point above it."""
        if self._tokens < 0:  # asked for several times, and a walk up the tree
            self._tokens = self._point.position - self._point.position_above()
        return self._tokens

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes: of its states, of the windows and, at the end of a leaf, of all rows since the nearest
        point above it."""
        tokens, num_bytes = self.tokens, 0
        for group in self._groups:
            if group.is_state:
                num_bytes += group.page_bytes
            elif group.is_window or self._is_tip:
                span = group.reach.span
                num_bytes += group.page_bytes * (tokens if span is None else min(tokens, span)) // group.slot_tokens
        return num_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of full attention that its tokens take."""
        tokens = self.tokens
        return sum(g.page_bytes * tokens // g.slot_tokens for g in self._groups if g.is_full)


Policy = Callable[[EvictionCandidate], Any]


class Order(Protocol):
    """How a prefix cache asks a policy: points wait in one of `num_queues` queues, each in the order of its keys; of
    the first ones of all queues that of the smallest `value` goes."""

    num_queues: int

    def place(self, candidate: EvictionCandidate) -> tuple[int, Any]:
        """The queue in which a point waits, and its key there. Asked at every use: cheap."""
        ...

    def weigh(self, candidate: EvictionCandidate) -> float:
        """A weight above 0, asked when a point comes first in its queue, and kept with it until it is used again."""
        ...

    def value(self, entry: Any, now: int) -> Any:
        """Of the first entry (key, arrival, point) of a queue."""
        ...


class KeyOrder:
    """The order of a function's keys: one queue."""

    num_queues = 1

    def __init__(self, key: Policy) -> None:
        self._key = key

    def place(self, candidate: EvictionCandidate) -> tuple[int, Any]:
        key: Any = self._key(candidate)
        return 0, key if key == key else -inf  # noqa: PLR0124 - NaN has no order

    def weigh(self, candidate: EvictionCandidate) -> float:  # noqa: ARG002 - keys alone count
        return 1.0

    def value(self, entry: Any, now: int) -> Any:  # noqa: ARG002 - a key does not age
        return entry


class WeightedLRU:
    """What was used longest ago goes first, by an age that passes more slowly for what was hit before (`HIT_WEIGHT`),
    and for what saves many tokens for its bytes; of all points first those that nobody has asked for."""

    num_queues = 3

    def place(self, candidate: EvictionCandidate) -> tuple[int, Any]:
        number = 0 if not candidate.wanted else 2 if candidate.hits else 1
        return number, candidate.last_used

    def weigh(self, candidate: EvictionCandidate) -> float:
        if not candidate.wanted:
            return SPACED_WEIGHT
        weight: float = (max(1, candidate.row_bytes) / max(1, candidate.num_bytes)) ** SIZE_POWER
        return HIT_WEIGHT * weight if candidate.hits else weight

    def value(self, entry: Any, now: int) -> Any:
        point: Point = entry[2]
        return -(now - point.last_used + 1) / point.weight


HIT_WEIGHT = 4.0
SIZE_POWER = 0.3
SPACED_WEIGHT = 1e-15
"""Measured on public traces (docs/measurements/reuse.md): larger weights gain more where memory is short, and lose
where it is not."""
WANTED = 1 << 62
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


POLICIES: dict[str, Callable[[], Order]] = {
    "weighted_lru": WeightedLRU,
    "lru": partial(KeyOrder, lru),
    "lfu": partial(KeyOrder, lfu),
    "priority": partial(KeyOrder, priority),
    "cost": partial(KeyOrder, cost),
}
"""Those that have a name."""


def order_of(policy: str | Policy) -> Order:
    """Of a policy by its name, or of a user's own function."""
    return POLICIES[policy]() if isinstance(policy, str) else KeyOrder(policy)

"""Eviction policies: a sort key over what is known of a resume point. The smallest key goes first.

A policy is any function of an `EvictionCandidate`; these are ours, and a user's own is as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvweave.pool import PagedGroup
from kvweave.prefix.node import Kind, Point


class EvictionCandidate:
    """What a policy may know of a resume point. It reads the point itself: use it at once, do not keep it."""

    __slots__ = ("_groups", "_point")

    def __init__(self, point: Point, groups: Sequence[PagedGroup]) -> None:
        self._point = point
        self._groups = groups

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
        return self._point.position - self._point.position_above()

    @property
    def num_bytes(self) -> int:
        """Bytes of its states, and of the rows since the nearest point above it."""
        tokens = self.tokens
        return sum(g.page_bytes * (1 if g.is_state else tokens // g.slot_tokens) for g in self._groups)


Policy = Callable[[EvictionCandidate], Any]
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


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "priority": priority, "cost": cost}

"""Eviction policies: a sort key over what is known of a resume point. The smallest key goes first.

A policy is any function of a `Record`; these are ours, and a user's own is as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvweave.prefix.node import Node


class Record:
    """What a policy may know of a resume point. It looks at the point itself: read it at once, do not keep it."""

    __slots__ = ("_node", "_page_bytes", "wanted")

    def __init__(self, node: Node, page_bytes: Sequence[int], wanted: bool) -> None:
        self._node = node
        self._page_bytes = page_bytes
        self.wanted = wanted
        """False for points kept on the way, every so many tokens, that nobody has asked for."""

    @property
    def last_used(self) -> int:
        """Clock of the last hit, or of its making."""
        return self._node.last_used

    @property
    def hits(self) -> int:
        return self._node.hits

    @property
    def priority(self) -> int:
        """As given by the requests that made or used it: the highest."""
        return self._node.priority

    @property
    def tokens(self) -> int:
        """Tokens it saves over the nearest point above it."""
        return self._node.end - self._node.start

    @property
    def end(self) -> int:
        """Its position: tokens from the start."""
        return self._node.end

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that only it keeps."""
        return sum(count * size for count, size in zip(self._node.counts, self._page_bytes, strict=True))


Policy = Callable[[Record], Any]
WANTED = 1 << 62
"""No clock gets so far; one number is compared sooner than two."""


def lru(record: Record) -> Any:
    """Least recently used first; what nobody ever asked for before all."""
    return record.last_used + WANTED if record.wanted else record.last_used


def lfu(record: Record) -> Any:
    """Least often used first, then the least recently."""
    return (record.hits, record.last_used)


def priority(record: Record) -> Any:
    """Lowest priority first, then the least recently used."""
    return (record.priority, record.wanted, record.last_used)


def cost(record: Record) -> Any:
    """Fewest tokens to recompute for each byte freed first; ties by recency."""
    return (record.tokens * (1 + record.hits) / max(1, record.num_bytes), record.last_used)


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "priority": priority, "cost": cost}

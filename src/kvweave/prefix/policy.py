"""Eviction policies: a sort key over what is known of a resume point. The smallest key goes first.

A policy is any function of a `Record`; these are ours, and a user's own is as good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Record(NamedTuple):
    """What a policy may know of a resume point."""

    last_used: int
    """Clock of the last hit, or of its making."""
    hits: int
    wanted: bool
    """False for points kept on the way, every so many tokens, that nobody has asked for."""
    priority: int
    """As given by the requests that made or used it: the highest."""
    tokens: int
    """Tokens it saves over the nearest point above it."""
    end: int
    """Its position: tokens from the start."""
    num_bytes: int
    """Bytes of the pages that only it keeps."""


Policy = Callable[[Record], Any]


def lru(record: Record) -> Any:
    """Least recently used first; what nobody ever asked for before all."""
    return (record.wanted, record.last_used)


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

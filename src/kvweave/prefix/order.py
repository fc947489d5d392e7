"""The order of eviction, as a prefix cache asks for it. The policies are in `kvweave.policy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvweave.pool import PagedGroup
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import Node, PastUse, Point, Tokens


def _call(function: Callable[..., Any], *about: Any) -> Any:
    return function(*about)


class Order:
    """How a prefix cache asks a policy: points wait in one of `num_queues` queues (the ends of leaves apart from the
    others), each in the order of its keys; of the first ones that of the smallest `value` goes."""

    num_queues = 1

    def __init__(self, groups: Sequence[PagedGroup]) -> None:
        self.groups = list(groups)
        self.grid = math.lcm(*[group.slot_tokens for group in groups])
        self.queues: list[EvictionQueue] = []
        """All queues of the cache that asks it."""
        self.floor = 0.0
        """Of orders in which time passes as memory is needed: the key of what was evicted last."""
        self.call: Callable[..., Any] = _call
        """Calls a user's function, about something: within a call of the cache, which must not be called then."""

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:
        """The queue in which a point waits, and its key there. Asked at every use: cheap."""
        raise NotImplementedError

    def value(self, entry: Any, is_tip: bool, now: int) -> Any:  # noqa: ARG002 - a key does not age
        """Of the first entry (key, arrival, point) of a queue."""
        return entry[:-2]

    def choose(self, queues: list[EvictionQueue], now: int) -> Point | None:
        """The point that goes next, out of these queues."""
        least: Any = None
        chosen: Point | None = None
        for queue in queues:
            entry = queue.first()
            if entry is not None:
                value = self.value(entry, queue.is_tips, now)
                if chosen is None or value < least:
                    least, chosen = value, entry[-1]
        return chosen

    def on_hit(self, point: Point, position: int, now: int) -> None:
        """A prompt goes on from `position`, the point's or one in its run; `last_used` is of the use before."""

    def on_evict(self, point: Point, now: int) -> None:
        """A point goes, or is moved up to where its leaf is cut."""

    def on_cut(self, point: Point, node: Node, start: int, now: int) -> None:
        """After `on_evict`: with a point go the rows from `start` on of a leaf, which it ends, or which ends above it
        without a point."""

    def on_open(self, namespace: Hashable, prompt: Tokens, found: int, rows: int) -> dict[int, PastUse]:  # noqa: ARG002
        """A prompt comes and goes on from its first `found` tokens; the rows of its first `rows` are there. Returns, by
        position, the past of points that it is to leave, for what was evicted would have been hit there."""
        return {}

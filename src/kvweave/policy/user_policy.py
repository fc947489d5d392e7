"""Eviction policies written by users. A policy that raises cannot damage the cache: a warning names it, and from then
on the least recently used point is evicted first."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from kvweave.errors import PolicyFailed
from kvweave.policy.ghosts import Ghosts
from kvweave.policy.policy import EvictionCandidate
from kvweave.pool import PagedGroup
from kvweave.prefix.eviction_queue import EvictionQueue
from kvweave.prefix.node import PastUse, Point, Tokens
from kvweave.prefix.order import Order

ASKED = 8
"""The policy values this many of a queue's least recently used points, and as many random ones."""


class UserOrder(Order):
    """One queue for points in the policy's order, one for those by recency, where the policy has failed."""

    num_queues = 2

    def __init__(self, groups: Sequence[PagedGroup], policy: Any) -> None:
        super().__init__(groups)
        self.name = getattr(policy, "__qualname__", None) or type(policy).__qualname__
        self.has_failed = False

    def ask(self, question: Any, *about: Any) -> Any:
        """What the policy answers; None where it has no such method, or has failed."""
        if question is None or self.has_failed:
            return None
        try:
            return self.call(question, *about)
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            self.has_failed = True
            said = f"the policy {self.name} failed: {_described(error)}; from now on LRU decides"
            with suppress(PolicyFailed):  # where warnings are errors: raising here would leave a step half done
                warnings.warn(said, PolicyFailed, stacklevel=2)
            return None

    def choose(self, queues: list[EvictionQueue], now: int) -> Point | None:
        if self.has_failed:
            for own, by_recency in zip(queues[::2], queues[1::2], strict=True):
                while (entry := own.first()) is not None:
                    point: Point = entry[-1]
                    own.remove(point)
                    by_recency.add(point, point.last_used)
        return super().choose(queues, now)


class UserKeys(UserOrder):
    """A function of a candidate: its key stays until the point is used again, the smallest goes first."""

    def __init__(self, groups: Sequence[PagedGroup], policy: Callable[[EvictionCandidate], Any]) -> None:
        super().__init__(groups, policy)
        self._key = policy
        self._length = -1
        """Of all keys that are tuples; 0 where they are numbers; -1 before the first."""

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:
        key = self.ask(self._checked_key, EvictionCandidate(point, self.groups, is_tip, now))
        return (1, point.last_used) if key is None else (0, key)

    def _checked_key(self, candidate: EvictionCandidate) -> Any:
        """The policy's key, of numbers that have an order."""
        key = self._key(candidate)
        length = len(key) if isinstance(key, tuple) else 0
        if self._length not in (-1, length):
            raise TypeError(f"a key {key!r} cannot be compared with those before it")
        self._length = length
        return tuple([_ordered(number) for number in key]) if length else _ordered(key)


class UserValues(UserOrder):
    """A user's class: `value(point)`, asked when something must go, of some points; the smallest goes first."""

    def __init__(self, groups: Sequence[PagedGroup], policy: Any) -> None:
        super().__init__(groups, policy)
        self._value = policy.value
        self._on_hit = getattr(policy, "on_hit", None)
        self._on_evict = getattr(policy, "on_evict", None)
        self._on_ghost_hit: Any = getattr(policy, "on_ghost_hit", None)
        self._ghosts = Ghosts(self.grid) if self._on_ghost_hit else None
        self._random = random.Random(0)

    def place(self, point: Point, is_tip: bool, now: int) -> tuple[int, Any]:  # noqa: ARG002
        return 0, point.last_used

    def choose(self, queues: list[EvictionQueue], now: int) -> Point | None:
        return self.ask(self._least, queues, now) or super().choose(queues, now)

    def _least(self, queues: list[EvictionQueue], now: int) -> Point | None:
        least, chosen = inf, None
        for queue in queues:
            asked = range(min(ASKED, queue.size))
            for number in [*asked, *(self._random.randrange(queue.size) for _ in asked)]:
                point = queue.at(number)
                value = _ordered(self._value(EvictionCandidate(point, self.groups, queue.is_tips, now)))
                if chosen is None or value < least:
                    least, chosen = value, point
        return chosen

    def on_hit(self, point: Point, position: int, now: int) -> None:
        if point.position == position:
            self._tell(self._on_hit, point, now)

    def on_evict(self, point: Point, now: int) -> None:
        self._tell(self._on_evict, point, now)
        if self._ghosts is not None:
            self._ghosts.add(point, now)

    def on_open(self, namespace: Hashable, prompt: Tokens, found: int, rows: int) -> dict[int, PastUse]:  # noqa: ARG002
        if self._ghosts is not None and not self.has_failed:
            ghost = self._ghosts.take(namespace, prompt, found)
            if ghost is not None:
                self.ask(self._on_ghost_hit, ghost)
        return {}

    def _tell(self, hook: Any, point: Point, now: int) -> None:
        is_tip = point.queue is not None and point.queue.is_tips
        self.ask(hook, EvictionCandidate(point, self.groups, is_tip, now))


def _described(error: BaseException) -> str:
    """The kind of an error and its text, which is a user's code too."""
    try:
        return f"{type(error).__name__}: {error}"
    except (Exception, SystemExit):
        return f"{type(error).__name__}, whose text cannot be read"


def _ordered(number: Any) -> Any:
    """A number that has an order; `ValueError` for NaN, which has none."""
    if isinstance(number, int):
        return int(number)
    value = float(number)
    if value != value:  # noqa: PLR0124 - only NaN is not equal to itself
        raise ValueError("NaN has no order")
    return value

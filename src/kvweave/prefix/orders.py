"""The policies that have a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvweave.pool import PagedGroup
from kvweave.prefix.adaptive import Adaptive
from kvweave.prefix.own_policy import OwnKeys, OwnValues
from kvweave.prefix.policy import GreedyDual, KeyOrder, Order, Policy, WeightedLRU, cost, lfu, lru, priority

POLICIES: dict[str, Callable[[Sequence[PagedGroup]], Order]] = {
    "adaptive": Adaptive,
    "weighted_lru": WeightedLRU,
    "lru": partial(KeyOrder, key=lru),
    "lfu": partial(KeyOrder, key=lfu),
    "greedy_dual": GreedyDual,
    "priority": partial(KeyOrder, key=priority),
    "cost": partial(KeyOrder, key=cost),
}


def order_of(policy: str | Policy, groups: Sequence[PagedGroup], grid: int) -> Order:
    """Of a policy by its name, or of a user's own."""
    if isinstance(policy, str):
        return POLICIES[policy](groups)
    return OwnValues(groups, policy, grid) if hasattr(policy, "value") else OwnKeys(groups, policy)

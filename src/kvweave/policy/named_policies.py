"""Eviction policies that are chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvweave.policy.adaptive import Adaptive
from kvweave.policy.policy import GreedyDual, KeyOrder, Policy, WeightedLRU, cost, lfu, lru, priority
from kvweave.policy.user_policy import UserKeys, UserValues
from kvweave.pool import PagedGroup
from kvweave.prefix.order import Order

POLICIES: dict[str, Callable[[Sequence[PagedGroup]], Order]] = {
    "adaptive": Adaptive,
    "weighted_lru": WeightedLRU,
    "lru": partial(KeyOrder, key=lru),
    "lfu": partial(KeyOrder, key=lfu),
    "greedy_dual": GreedyDual,
    "priority": partial(KeyOrder, key=priority),
    "cost": partial(KeyOrder, key=cost),
}


def order_of(policy: str | Policy, groups: Sequence[PagedGroup]) -> Order:
    """The order of a policy, given by its name or as a user's function or object."""
    if isinstance(policy, str):
        return POLICIES[policy](groups)
    return UserValues(groups, policy) if hasattr(policy, "value") else UserKeys(groups, policy)

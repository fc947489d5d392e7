"""WHICH resume point is evicted first: policies with a fixed rule, the one that learns, and those of users."""

from kvweave.policy.class_weights import ClassWeights
from kvweave.policy.ghosts import Ghost
from kvweave.policy.named_policies import POLICIES, order_of
from kvweave.policy.policy import EvictionCandidate, Policy, ValuePolicy

__all__ = ["POLICIES", "ClassWeights", "EvictionCandidate", "Ghost", "Policy", "ValuePolicy", "order_of"]

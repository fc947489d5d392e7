"""WHAT we have already: the tree of resume points, the joint hit, retention, eviction policies, events."""

from kvweave.prefix.class_weights import ClassWeights
from kvweave.prefix.events import Event
from kvweave.prefix.ghosts import Ghost
from kvweave.prefix.joint import Present, joint_hit
from kvweave.prefix.named_policies import POLICIES
from kvweave.prefix.node import Kind, Node, Point, StatePages, Tokens
from kvweave.prefix.policy import EvictionCandidate, Policy, ValuePolicy
from kvweave.prefix.prefix_cache import PrefixCache
from kvweave.prefix.prompt import ContentTokens, Span, TokenIds, as_tokens
from kvweave.prefix.replica import Replica
from kvweave.prefix.retention import NEVER, Retention, Spacing

__all__ = [
    "NEVER",
    "POLICIES",
    "ClassWeights",
    "ContentTokens",
    "Event",
    "EvictionCandidate",
    "Ghost",
    "Kind",
    "Node",
    "Point",
    "Policy",
    "PrefixCache",
    "Present",
    "Replica",
    "Retention",
    "Spacing",
    "Span",
    "StatePages",
    "TokenIds",
    "Tokens",
    "ValuePolicy",
    "as_tokens",
    "joint_hit",
]

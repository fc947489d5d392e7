"""WHAT we have already: the tree of resume points, the joint hit, retention, eviction policies, events."""

from kvweave.prefix.events import Event
from kvweave.prefix.joint import Present, joint_hit
from kvweave.prefix.keys import Contents, Span, as_tokens, tree_groups
from kvweave.prefix.node import Node, Tokens
from kvweave.prefix.policy import POLICIES, Policy, Record
from kvweave.prefix.prefix import Prefix
from kvweave.prefix.replica import Replica
from kvweave.prefix.retention import Retention

__all__ = [
    "POLICIES",
    "Contents",
    "Event",
    "Node",
    "Policy",
    "Prefix",
    "Present",
    "Record",
    "Replica",
    "Retention",
    "Span",
    "Tokens",
    "as_tokens",
    "joint_hit",
    "tree_groups",
]

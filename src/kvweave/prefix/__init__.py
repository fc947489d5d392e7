"""WHAT we have already: the tree of resume points, the joint hit, retention, events."""

from kvweave.prefix.events import Event
from kvweave.prefix.joint import Present, joint_hit
from kvweave.prefix.node import Kind, Node, PastUse, Point, StatePages, Tokens
from kvweave.prefix.prefix_cache import PrefixCache
from kvweave.prefix.prompt import ContentTokens, Span, TokenIds, as_tokens
from kvweave.prefix.replica import Replica
from kvweave.prefix.retention import NEVER, Retention, Spacing

__all__ = [
    "NEVER",
    "ContentTokens",
    "Event",
    "Kind",
    "Node",
    "PastUse",
    "Point",
    "PrefixCache",
    "Present",
    "Replica",
    "Retention",
    "Spacing",
    "Span",
    "StatePages",
    "TokenIds",
    "Tokens",
    "as_tokens",
    "joint_hit",
]

"""Events: every change of the prefix tree, in order, from which another process can rebuild what could be hit.

Nodes are named by number. A router keeps a `Replica` and asks it for the very hit that the engine would give.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

VERSION = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of tokens from `start` on, of a new node below `parent`; or a new root."""

    node: int
    parent: int | None
    namespace: Hashable
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """All blocks (counted from the start of the sequence) of a group that a node holds now."""

    node: int
    tag: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Blocks of a group that a node holds no longer."""

    node: int
    tag: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The part of a node's run before `position` became the new node `upper`, above it."""

    node: int
    upper: int
    position: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The node `upper`, right above a node, is part of it now."""

    node: int
    upper: int


@dataclass(frozen=True, slots=True)
class Trimmed:
    """A node ends at `end` now."""

    node: int
    end: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A node is gone."""

    node: int


@dataclass(frozen=True, slots=True)
class Named:
    """A content (image, sound) with this digest is the negative token `token` from now on; 0: it was forgotten."""

    digest: bytes
    token: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything is gone."""


Event = Stored | Kept | Lost | Split | Joined | Trimmed | Removed | Named | Cleared

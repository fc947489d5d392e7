"""The result of a lookup through a daemon."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.server.arena_copier import Target
from kvweave.store import HashedPrompt


@dataclass(frozen=True, slots=True)
class PinnedHit:
    """A pinned hit: what resuming at `position` needs stays in the arena."""

    position: int
    lease: int
    generation: int


@dataclass(frozen=True)
class RemoteHit:
    """The tokens before `position` can be loaded; the places are valid until `until`."""

    prompt: HashedPrompt
    position: int
    present: NDArray[np.bool_]
    """`[shards, chunks]`"""
    places: NDArray[np.int64]
    """`[shards, chunks]`: offsets in the arena, `NOT_IN_ARENA` for what is not there."""
    lease: int = 0
    until: float = 0.0
    generation: int = 0
    target: Target | None = None

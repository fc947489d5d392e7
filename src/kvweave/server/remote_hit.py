"""What a lookup through a daemon found, and where it lies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvweave.server.arena_copier import Target
from kvweave.store import HashedPrompt, Schema
from kvweave.store.ticket import VALID_S, write_ticket


class HeldByDaemon(ABC):
    """Something that the daemon holds for this process: a context, which lets it go at its end."""

    @abstractmethod
    def let_go(self) -> None:
        """May be called twice, and when it is gone already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


@dataclass(frozen=True)
class PinnedHit(HeldByDaemon):
    """What a prompt needs to go on from `position` stays in the arena."""

    position: int
    lease: int
    generation: int
    unpin: Callable[[PinnedHit], None]

    def let_go(self) -> None:
        self.unpin(self)


@dataclass(frozen=True)
class RemoteHit(HeldByDaemon):
    """From `position` on there is work to do. What lies before stays where it is until `until`."""

    prompt: HashedPrompt
    position: int
    present: NDArray[np.bool_]
    """`[shards, chunks]`"""
    places: NDArray[np.int64]
    """`[shards, chunks]`: where in the arena, `NOT_IN_ARENA` for what is not there."""
    schema: Schema
    release: Callable[[RemoteHit], None]
    lease: int = 0
    until: float = 0.0
    generation: int = 0
    target: Target | None = None

    def let_go(self) -> None:
        self.release(self)

    def ticket(self, valid_s: float | None = None) -> bytes:
        left_s = self.until - time.monotonic() if self.lease else VALID_S
        seconds = left_s if valid_s is None else valid_s
        return write_ticket(self.schema, self.prompt, self.position, self.present, seconds)

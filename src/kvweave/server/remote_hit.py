"""The result of a lookup through a daemon."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvweave.server.arena_copier import Destination
from kvweave.store import HashedPrompt, Schema
from kvweave.store.ticket import VALID_S, write_ticket


class HeldByDaemon(ABC):
    """Something that the daemon holds for this process. As a context it is released at the end."""

    @abstractmethod
    def let_go(self) -> None:
        """Release it; calling it twice is fine, and so is calling it when the lease has expired."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


@dataclass(frozen=True)
class PinnedHit(HeldByDaemon):
    """A pinned hit: what resuming at `position` needs stays in the arena."""

    position: int
    lease: int
    generation: int
    unpin: Callable[[PinnedHit], None]

    def let_go(self) -> None:
        self.unpin(self)


@dataclass(frozen=True)
class RemoteHit(HeldByDaemon):
    """The tokens before `position` can be loaded; the places are valid until `until`."""

    prompt: HashedPrompt
    position: int
    present: NDArray[np.bool_]
    """`[shards, chunks]`"""
    places: NDArray[np.int64]
    """`[shards, chunks]`: offsets in the arena, `NOT_IN_ARENA` for what is not there."""
    schema: Schema
    release: Callable[[RemoteHit], None]
    lease: int = 0
    until: float = 0.0
    generation: int = 0
    target: Destination | None = None

    def let_go(self) -> None:
        self.release(self)

    def ticket(self, valid_s: float | None = None) -> bytes:
        left_s = self.until - time.monotonic() if self.lease else VALID_S
        seconds = left_s if valid_s is None else valid_s
        return write_ticket(self.schema, self.prompt, self.position, self.present, seconds)

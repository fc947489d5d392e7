"""What a lookup through a daemon found, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.server.copying import Target
from kvweave.store import Prompt


@dataclass(frozen=True, slots=True)
class Pin:
    """What a prompt needs to go on from `position` stays in the arena."""

    position: int
    lease: int
    generation: int


@dataclass(frozen=True)
class RemoteHit:
    """From `position` on there is work to do. What lies before stays where it is until `until`."""

    prompt: Prompt
    position: int
    present: NDArray[np.bool_]
    """`[rows, chunks]`"""
    places: NDArray[np.int64]
    """`[rows, chunks]`: where in the arena, `FAR` for what is not there."""
    lease: int = 0
    until: float = 0.0
    generation: int = 0
    target: Target | None = None

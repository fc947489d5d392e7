"""What is known of the engine's cache groups, in our words. No module but `adapter` reads vLLM's own records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.spec import Reach

CHUNK_TOKENS = 64
"""Default tokens of a chunk: fine enough for any engine's blocks, coarse enough that a blob is not small."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """A group of the engine's: layers with one block table."""

    number: int
    block_tokens: int
    reach: Reach
    layers: tuple[str, ...]

    @property
    def table(self) -> str:
        return f"group {self.number}"

    @property
    def is_state(self) -> bool:
        return not self.reach.per_token


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """A layer's memory in one worker: what kind of kernel uses it, and its tensors as vLLM registered them."""

    name: str
    index: int
    kind: str
    """The attention backend and its variant, or the kind of state."""
    tensors: tuple[Any, ...]
    """Attention: one of `[blocks, heads, tokens, content]`. States: one for each, `[blocks, *shape]`."""
    raw: Any
    """The tensor as it was registered: `[blocks, ...]`, all bytes of a page."""
    blocks_per_page: int
    """The kernel's blocks in one page of a block table."""


def hit_alignment(groups: Sequence[EngineGroup]) -> int:
    """Positions that the engine can resume at are multiples of this.

    vLLM enters every complete block of a load into its own prefix cache. Of a window it loads the end only, so that,
    seen from a position inside a block, a block would count as complete whose first rows were never loaded.
    """
    if all(group.reach.span is None for group in groups):
        return 1
    return math.lcm(*(group.block_tokens for group in groups))


def chunk_tokens(groups: Sequence[EngineGroup]) -> int:
    """The default, or a divisor of it at whose multiples the engine takes snapshots of its states."""
    return math.gcd(CHUNK_TOKENS, *(group.block_tokens for group in groups if group.is_state))


def saved_blocks(group: EngineGroup, start: int, points: Sequence[int]) -> list[tuple[int, int]]:
    """The engine's complete blocks of a group (first, one past the last) that a save from `start` on has stored: of
    states those that end at a point."""
    size = group.block_tokens
    if group.is_state:
        return [(point // size - 1, point // size) for point in points if point % size == 0]
    first = max(start, int(group.reach.tail(points[0])))
    ranges = [(-(-first // size), points[-1] // size)]
    return [(first, stop) for first, stop in ranges if first < stop]

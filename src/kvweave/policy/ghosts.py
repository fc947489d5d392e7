"""Ghosts: what is remembered of points that were evicted, for policies that want to hear when one would have hit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.prefix.node import Kind, Point, Tokens

MOST_GHOSTS = 1 << 16
"""The oldest are forgotten beyond so many."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """A point that was evicted. `evicted` is the moment when it went, `hits` what it had been hit until then."""

    kind: Kind
    position: int
    hits: int
    evicted: int


class Ghosts:
    """Those evicted last, by a 64-bit number of their prefix."""

    def __init__(self, grid: int) -> None:
        self._grid = grid
        self._ghosts: dict[int, Ghost] = {}

    def add(self, point: Point, now: int) -> None:
        path = point.node.path()
        prefix = np.concatenate([node.tokens for node in path])[: point.position]
        number = int(prefix_sums(prefix, point.node.namespace, self._grid)[-1])
        self._ghosts.pop(number, None)
        self._ghosts[number] = Ghost(point.kind, point.position, point.hits, now)
        if len(self._ghosts) > MOST_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]

    def take(self, namespace: Hashable, prompt: Tokens, found: int) -> Ghost | None:
        """The ghost from which a prompt could have gone on furthest, beyond what it found; it is taken out."""
        sums = prefix_sums(prompt[:-1], namespace, self._grid)[found // self._grid :].tolist() if self._ghosts else []
        number = next((number for number in reversed(sums) if number in self._ghosts), None)
        return None if number is None else self._ghosts.pop(number)


def prefix_sums(tokens: Tokens, namespace: Hashable, grid: int) -> NDArray[np.uint64]:
    """A number for the first grid of tokens, the first two, and so on."""
    whole = tokens[: len(tokens) // grid * grid].astype(np.uint64) + np.uint64(1)
    powers = np.cumprod(np.full(len(whole), 0x9E3779B97F4A7C15, np.uint64))
    sums: NDArray[np.uint64] = np.cumsum(whole * powers)[grid - 1 :: grid]
    return sums ^ np.uint64(hash(namespace) & 0xFFFFFFFFFFFFFFFF)

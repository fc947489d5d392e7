"""A group of a schema: which of its shards' chunks a position needs, and what the joint-hit formula gets of them.

    chunk     |  3   |  4   |  5   |  6   |
    window            ....##|######|######p       r = tail(p) mod chunk, the same for every p of the grid

Tokens before the tail are not needed, and engines have freed them. So where a group has tails, its first chunk may
be there whole, or from token r on: as a piece of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.prefix import Present
from kvweave.spec import Reach


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The shards of a group: from number `first` on `parts` of whole chunks, then, unless `tail_start` is 0, as many of
    tails, which begin with that token of their chunks."""

    tag: str
    reach: Reach
    chunk_tokens: int
    first: int
    parts: int
    tail_start: int = 0

    @property
    def stop(self) -> int:
        """One past the number of the last shard."""
        return self.first + self.parts * (2 if self.tail_start else 1)

    def presence(self, present: NDArray[np.bool_]) -> Present:
        """What there is of the group, where `present` is `[shards, chunks]` of all groups."""
        whole = present[self.first : self.first + self.parts]
        blocks = np.logical_and.reduce(whole)
        if not self.tail_start:
            return Present(self.reach, self.chunk_tokens, blocks)
        tails = np.logical_and.reduce(whole | present[self.first + self.parts : self.stop])
        return Present(self.reach, self.chunk_tokens, blocks, tails=tails, tail_start=self.tail_start)

    def needs(self, position: int, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Pieces `[n, 2]` (shard, chunk), shard by shard, that going on from `position` needs: whole chunks, and a tail
        where it is enough, and `present` while the whole chunk is not."""
        return self.pieces(
            position, lambda shard, chunk: present[shard + self.parts, chunk] and not present[shard, chunk]
        )

    def pieces(self, position: int, takes_tail: Callable[[int, int], bool], *, first: int = 0) -> NDArray[np.int64]:
        """As `needs`, but `takes_tail` decides for a (whole) shard and chunk of which the tail would be enough. Chunks
        before `first` are left out."""
        chunks = chunks_needed(self.reach, self.chunk_tokens, position)
        chunks = chunks[chunks >= first] if first else chunks
        pieces = np.empty((self.parts, len(chunks), 2), np.int64)
        pieces[..., 0] = np.arange(self.first, self.first + self.parts)[:, None]
        pieces[..., 1] = chunks
        chunk, offset = divmod(int(self.reach.tail(position)), self.chunk_tokens)
        if self.tail_start and offset >= self.tail_start and chunk * self.chunk_tokens >= self.reach.head:
            for at in np.flatnonzero(chunks == chunk).tolist():
                for part in range(self.parts):
                    if takes_tail(self.first + part, chunk):
                        pieces[part, at, 0] += self.parts
        return pieces.reshape(-1, 2)


Use = tuple[NDArray[np.int64], bool]
"""Pieces as numbers chunk x shards + shard, in order, and whether a hit needs them."""


def uses(groups: Sequence[ShardGroup], present: NDArray[np.bool_], pieces: NDArray[np.int64]) -> tuple[Use, Use]:
    """What a lookup uses whose hit needs these pieces: first what it only refreshes."""
    flags = np.zeros_like(present)
    flags[pieces[:, 0], pieces[:, 1]] = True
    return (refreshed(groups, present, flags), False), (flags.T.ravel().nonzero()[0], True)


def refreshed(groups: Sequence[ShardGroup], present: NDArray[np.bool_], needed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """What a lookup refreshes beside what its hit needs (flags, `[shards, chunks]`), as numbers chunk x shards + shard:
    with windows, all that is there but states. (Windows at other points of a path cost no more than their rows, and
    other prompts resume there; a state is a copy.)"""
    if all(group.reach.span is None or not group.reach.per_token for group in groups):
        return np.empty(0, np.int64)
    there = present & ~needed
    for group in groups:
        there[group.first : group.stop] &= group.reach.per_token
    return there.T.ravel().nonzero()[0]


def chunks_needed(reach: Reach, chunk_tokens: int, position: int) -> NDArray[np.int64]:
    """The chunks that must be there, whole or from the tail on, to go on from `position`, in order."""
    end = position // chunk_tokens
    head = min(-(-reach.head // chunk_tokens), end)
    tail = int(reach.tail(position)) // chunk_tokens
    after = np.arange(tail, end)
    return np.concatenate((np.arange(min(head, tail)), after)) if head and tail else after


def tail_start(reach: Reach, chunk_tokens: int, unit_tokens: int) -> int:
    """The token of its chunk with which the tail of every point of the grid begins, down to whole rows of
    `unit_tokens`; 0 if that is a chunk's first, or differs from point to point."""
    if not reach.per_token or reach.span is None:
        return 0
    far = (reach.span // chunk_tokens + 2) * chunk_tokens
    tail = int(reach.tail(far))
    moves_along = int(reach.tail(far + chunk_tokens)) - tail == chunk_tokens
    return tail % chunk_tokens // unit_tokens * unit_tokens if moves_along else 0

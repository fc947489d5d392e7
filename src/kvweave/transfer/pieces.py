"""Pieces: a copy plan split into steps, so that copies overlap, their memory is bounded, and a transfer can be
cancelled.

by size      chunk after chunk, group after group; a page larger than a piece is split between layers
by layers    some layers of all chunks, then the next layers: engines compute one while the next is copied
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple

import numpy as np

from kvweave.transfer.copy_plan import CopyPlan

GROWTH = 8
"""How many times larger a piece may be than the one before: preparing it then takes less than copying that one."""

GRAINS = 8
"""Slices in the smallest piece: the more, the closer pieces come to the sizes asked for."""


class MoveSlice(NamedTuple):
    """Entries [first, last) of a move, and of their pages the layers [low, high), counted within the group."""

    move: int
    first: int
    last: int
    low: int
    high: int


class Piece(NamedTuple):
    """Slices that are moved together. After it, all of the model's layers below `layers` have been moved."""

    parts: tuple[MoveSlice, ...]
    num_bytes: int
    layers: int


def split_by_size(copies: CopyPlan, small: int, large: int, *, rising: bool) -> Iterator[Piece]:
    """Pieces in the order of the chunks' bytes. Sizes rise from `small` to `large` (or fall, without `rising`): the
    piece at the start (or end) of a pipeline is small, since nothing else overlaps with it."""
    parts = list(_grains(copies, small))
    sizes = chain(_ramp(small, large), repeat(large))
    left = copies.num_bytes
    for some, num_bytes in _packed(copies, parts, sizes, from_the_end=not rising):
        left -= num_bytes
        yield Piece(some, num_bytes, 0 if left else num_layers(copies))


def _ramp(small: int, large: int) -> Iterator[int]:
    while small < large:
        yield small
        small *= GROWTH


def split_by_layers(copies: CopyPlan, layers: int, size: int) -> Iterator[Piece]:
    """Pieces of `layers` layers of the model at a time, none much larger than `size`."""
    for start in range(0, num_layers(copies), layers):
        end = start + layers
        parts = [part for number in range(len(copies.moves)) for part in _between(copies, number, start, end, size)]
        pieces = list(_packed(copies, parts, repeat(size)))
        for number, (some, num_bytes) in enumerate(pieces, 1):
            yield Piece(some, num_bytes, end if number == len(pieces) else start)


def num_layers(copies: CopyPlan) -> int:
    """One past the last layer that the chunks hold."""
    return max((part.group.layers[-1] + 1 for part in copies.layout.groups), default=0)


def part_bytes(copies: CopyPlan, part: MoveSlice) -> int:
    group = copies.layout.group(copies.moves[part.move].tag)
    return (part.last - part.first) * (part.high - part.low) * group.layer_bytes * group.kernel_blocks


def _packed(
    copies: CopyPlan, parts: list[MoveSlice], sizes: Iterator[int], *, from_the_end: bool = False
) -> Iterator[tuple[tuple[MoveSlice, ...], int]]:
    """Slices combined until they reach each size in turn, from the last slice backwards if so asked; yielded in
    their order."""
    weights = [part_bytes(copies, part) for part in parts]
    order = -1 if from_the_end else 1
    first = 0
    for last in accumulate(list(_counts(weights[::order], sizes))[::order]):
        yield tuple(_joined(parts[first:last])), sum(weights[first:last])
        first = last


def _counts(weights: Iterable[int], sizes: Iterator[int]) -> Iterator[int]:
    """How many consecutive weights sum to at most each size; at least one."""
    count, total, size = 0, 0, next(sizes)
    for weight in weights:
        if count and total + weight > size:
            yield count
            count, total, size = 0, 0, next(sizes)
        count, total = count + 1, total + weight
    if count:
        yield count


def _joined(parts: Iterable[MoveSlice]) -> list[MoveSlice]:
    """The same slices, with those merged that continue one another."""
    joined: list[MoveSlice] = []
    for two in parts:
        one = joined[-1] if joined else None
        if one and (one.move, one.last, one.low, one.high) == (two.move, two.first, two.low, two.high):
            joined[-1] = one._replace(last=two.last)
        elif one and (one.move, one.first, one.last, one.high) == (two.move, two.first, two.last, two.low):
            joined[-1] = one._replace(high=two.high)
        else:
            joined.append(two)
    return joined


def _grains(copies: CopyPlan, small: int) -> Iterator[MoveSlice]:
    """The smallest slices, in the order of the chunks' bytes: some pages of a chunk, or some layers of a page larger
    than `small`."""
    grain = small // GRAINS
    for number, start, end in _stretches(copies):
        group = copies.layout.group(copies.moves[number].tag)
        pages, layers = max(1, grain // group.block_bytes), group.num_layers
        if group.block_bytes > small:
            layers = max(1, grain * layers // group.block_bytes)
        for first in range(start, end, pages):
            for low in range(0, group.num_layers, layers):
                yield MoveSlice(number, first, min(first + pages, end), low, min(low + layers, group.num_layers))


def _stretches(copies: CopyPlan) -> list[tuple[int, int, int]]:
    """(move, first, last) of the entries in one chunk, chunk by chunk, groups in the chunk's order."""
    order = {part.tag: number for number, part in enumerate(copies.layout.groups)}
    found = []
    for number, move in enumerate(copies.moves):
        bounds = [0, *(np.flatnonzero(move.chunks[1:] != move.chunks[:-1]) + 1).tolist(), len(move)]
        for first, last in pairwise(bounds):
            found.append((int(move.chunks[first]), order[move.tag], number, first, last))
    return [stretch[2:] for stretch in sorted(found)]


def _between(copies: CopyPlan, number: int, start: int, end: int, size: int) -> Iterator[MoveSlice]:
    """The slices of a move for the layers [start, end) of the model."""
    group = copies.layout.group(copies.moves[number].tag)
    low, high = (bisect_left(group.group.layers, layer) for layer in (start, end))
    if low == high:
        return
    count = max(1, size // ((high - low) * group.layer_bytes * group.kernel_blocks))
    for first in range(0, len(copies.moves[number]), count):
        yield MoveSlice(number, first, min(first + count, len(copies.moves[number])), low, high)

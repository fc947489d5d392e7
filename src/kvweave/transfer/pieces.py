"""Pieces: a copy plan cut into steps, so that copies overlap, memory for them stays bounded, and cancelling works.

by size      chunk after chunk, group after group; a page too large for a piece is cut between layers
by layers    some layers of everything, then the next, for engines that compute one while the next arrives
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise, repeat
from typing import NamedTuple

import numpy as np

from kvweave.transfer.copies import CopyPlan

GROWTH = 8
"""How much larger a piece may be than the one before: to make it ready takes less than to copy that one."""


class Part(NamedTuple):
    """Entries [first, last) of a move, and of their pages the layers [low, high), counted within the group."""

    move: int
    first: int
    last: int
    low: int
    high: int


class Piece(NamedTuple):
    """Parts that are moved together. With it, everything of the model's layers below `layers` has been moved."""

    parts: tuple[Part, ...]
    num_bytes: int
    layers: int


def ramp(num_bytes: int, small: int, large: int, *, rising: bool) -> Iterator[int]:
    """Sizes from `small` to `large` and on, or the other way round: small where nothing else goes on to hide behind."""
    sizes, total, size = [], 0, small
    while total < num_bytes:
        sizes.append(size)
        total, size = total + size, min(GROWTH * size, large)
    if rising or not sizes:
        return chain(sizes, repeat(large))
    sizes[-1] -= total - num_bytes
    return chain(reversed(sizes), repeat(small))


def cut(copies: CopyPlan, sizes: Iterator[int], small: int) -> Iterator[Piece]:
    """Pieces of about those sizes, in the order of the chunks' bytes, made of grains of at most about `small` bytes."""
    left = copies.num_bytes
    for parts, num_bytes in _packed(copies, _grains(copies, small), sizes):
        left -= num_bytes
        yield Piece(parts, num_bytes, 0 if left else num_layers(copies))


def cut_layers(copies: CopyPlan, layers: int, size: int) -> Iterator[Piece]:
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


def part_bytes(copies: CopyPlan, part: Part) -> int:
    group = copies.layout.group(copies.moves[part.move].tag)
    return (part.last - part.first) * (part.high - part.low) * group.layer_bytes * group.kernel_blocks


def _packed(copies: CopyPlan, parts: Iterable[Part], sizes: Iterator[int]) -> Iterator[tuple[tuple[Part, ...], int]]:
    """Parts put together up to each size in turn; those that continue one another become one."""
    some: list[Part] = []
    num_bytes, size = 0, next(sizes)
    for part in parts:
        more = part_bytes(copies, part)
        if some and num_bytes + more > size:
            yield tuple(some), num_bytes
            some, num_bytes, size = [], 0, next(sizes)
        some[-1:] = _joined(some[-1], part) if some else [part]
        num_bytes += more
    if some:
        yield tuple(some), num_bytes


def _joined(one: Part, two: Part) -> list[Part]:
    if (one.move, one.last, one.low, one.high) == (two.move, two.first, two.low, two.high):
        return [one._replace(last=two.last)]
    if (one.move, one.first, one.last, one.high) == (two.move, two.first, two.last, two.low):
        return [one._replace(high=two.high)]
    return [one, two]


def _grains(copies: CopyPlan, small: int) -> Iterator[Part]:
    """The smallest parts: some pages of a chunk, or some layers of a page, in the order of the chunks' bytes."""
    for number, start, end in _stretches(copies):
        group = copies.layout.group(copies.moves[number].tag)
        count = group.num_layers
        pages, layers = max(1, small // group.block_bytes), max(1, small * count // group.block_bytes)
        for first in range(start, end, pages):
            for low in range(0, count, layers):
                yield Part(number, first, min(first + pages, end), low, min(low + layers, count))


def _stretches(copies: CopyPlan) -> list[tuple[int, int, int]]:
    """(move, first, last) of the entries in one chunk, chunk by chunk, groups in the chunk's order."""
    order = {part.tag: number for number, part in enumerate(copies.layout.groups)}
    found = []
    for number, move in enumerate(copies.moves):
        bounds = [0, *(np.flatnonzero(move.chunks[1:] != move.chunks[:-1]) + 1).tolist(), len(move)]
        for first, last in pairwise(bounds):
            found.append((int(move.chunks[first]), order[move.tag], number, first, last))
    return [stretch[2:] for stretch in sorted(found)]


def _between(copies: CopyPlan, number: int, start: int, end: int, size: int) -> Iterator[Part]:
    """A move's share of the layers [start, end) of the model."""
    group = copies.layout.group(copies.moves[number].tag)
    low, high = (bisect_left(group.group.layers, layer) for layer in (start, end))
    if low == high:
        return
    count = max(1, size // ((high - low) * group.layer_bytes * group.kernel_blocks))
    for first in range(0, len(copies.moves[number]), count):
        yield Part(number, first, min(first + count, len(copies.moves[number])), low, high)

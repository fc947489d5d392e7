"""Checks of a copy before its first byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvweave.errors import BadCopy
from kvweave.plan import Plan
from kvweave.pool import NULL
from kvweave.transfer.copy_plan import CopyPlan, Numbers
from kvweave.transfer.layout import ChunkLayout


class MemoryRange(NamedTuple):
    """The memory of a buffer: bytes [start, start + num_bytes) on one device."""

    device: str
    start: int
    num_bytes: int


def check_layout(layout: ChunkLayout, plan: Plan) -> None:
    """Check that the chunk's groups are those of the plan; their pools may differ."""
    for part in layout.groups:
        placed = plan.group(part.tag)
        own = replace(
            placed,
            pool="",
            lane_layers=part.group.lane_layers,
            pages_per_superpage=1,
            kernel_stride=part.group.kernel_stride,
        )
        if own != part.group:
            raise BadCopy(
                f"chunks of layout {layout.digest[:12]} keep {part.tag!r} as {_words(part.group)}, the plan as"
                f" {_words(placed)}; make the layout from this plan"
            )


def _words(group: object) -> str:
    names = ("layers", "block_tokens", "kernel_tokens", "context_shards", "layer_bytes")
    return ", ".join(f"{name}={_short(getattr(group, name))}" for name in names)


def _short(value: object) -> object:
    return f"{len(value)} of them" if isinstance(value, tuple) else value


def check_places(copies: CopyPlan, *, fills_chunks: bool) -> None:
    """Check that every block exists in its chunk and none is filled twice. The result is the same for all plans of a
    shape."""
    for move in copies.moves:
        part = copies.layout.group(move.tag)
        if (wrong := _outside(move.chunks, 0, len(copies.chunks))) is not None:
            raise BadCopy(f"chunk {wrong} of {move.tag!r} is not among the plan's {len(copies.chunks)}")
        if (wrong := _outside(move.blocks, part.first_block, part.end_block)) is not None:
            raise BadCopy(
                f"block {wrong} of {move.tag!r} is not in a chunk: it holds {part.first_block} to {part.end_block - 1}"
            )
        same = (move.chunks[1:] == move.chunks[:-1]) & (move.blocks[1:] == move.blocks[:-1])
        if fills_chunks and same.any():
            at = int(np.flatnonzero(same)[0])
            raise BadCopy(f"block {move.blocks[at]} of {move.tag!r} would be filled twice in chunk {move.chunks[at]}")


def check_buffers(copies: CopyPlan, extents: Sequence[MemoryRange], *, fills_chunks: bool) -> None:
    """Check that each chunk has a buffer that is large enough, and that no filled buffer overlaps another."""
    if len(extents) != len(copies.chunks):
        raise BadCopy(f"{len(extents)} buffers for {len(copies.chunks)} chunks")
    size = copies.layout.num_bytes
    for number, extent in zip(copies.chunks, extents, strict=True):
        if extent.num_bytes < size:
            raise BadCopy(f"the buffer of chunk {number} has {extent.num_bytes} bytes; a chunk takes {size}")
    if fills_chunks:
        placed = sorted((extent, number) for extent, number in zip(extents, copies.chunks, strict=True))
        for (one, a), (two, b) in pairwise(placed):
            if one.device == two.device and two.start < one.start + size:
                raise BadCopy(f"the buffers of chunks {a} and {b} overlap")


def check_pages(copies: CopyPlan, plan: Plan, *, fills_pages: bool) -> None:
    """Check that pages are neither NULL nor beyond the pool, and that none is filled twice."""
    for move in copies.moves:
        first = plan.group(move.tag).pages_per_superpage
        past = plan.num_pages(move.tag) + first
        if (wrong := _outside(move.pages, first, past)) is not None:
            null = " (the NULL page)" if wrong == NULL else ""
            raise BadCopy(f"page {wrong}{null} of {move.tag!r} is out of range: its pages are {first} to {past - 1}")
    if fills_pages:
        _check_apart(copies, plan)


def _outside(numbers: Numbers, first: int, past: int) -> int | None:
    """The first number outside of [first, past), or None."""
    if not len(numbers) or (np.minimum.reduce(numbers) >= first and np.maximum.reduce(numbers) < past):
        return None
    return int(numbers[(numbers < first) | (numbers >= past)][0])


def _check_apart(copies: CopyPlan, plan: Plan) -> None:
    """Check that no page is filled twice, and no super-page by two groups."""
    taken: dict[str, Numbers] = {}
    for number, move in enumerate(copies.moves, 1):
        group = plan.group(move.tag)
        pages = np.sort(move.pages)
        if (same := pages[1:] == pages[:-1]).any():
            raise BadCopy(f"page {pages[1:][same][0]} of {move.tag!r} would be filled twice")
        if len(plan.pool(group.pool).tags) == 1:
            continue
        supers = pages // group.pages_per_superpage
        owners = taken.setdefault(group.pool, np.zeros(plan.pool(group.pool).num_superpages, np.int64))
        if (others := owners[supers]).any():
            at = int(np.flatnonzero(others)[0])
            tag = copies.moves[others[at] - 1].tag
            raise BadCopy(f"pages of {tag!r} and {move.tag!r} are in super-page {supers[at]}, which only one can own")
        owners[supers] = number

"""Payloads of pages: read from a rank's pools and written back, for any block size, kernel layout and share of the
heads.

A pool is bytes; `Plan.view` says where a role of a layer lies in it. Arrays over pool and payload are made with the row
axis first, and of each segment of heads the entries that both have are copied. The layout is computed once for each
shard (`_Runs`); a chunk only adds the pages of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvweave.copying import StridedBlocks, copy_blocks
from kvweave.errors import StoreError
from kvweave.plan import Plan
from kvweave.plan.group import Group
from kvweave.plan.view import View
from kvweave.spec import Role
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes
from kvweave.store.shards import AxisSlice, Schema, Shard, axis_slices

Source = Callable[[Shard, int], Bytes]
"""Returns the payload of a shard's chunk; its bytes must not change until every tier has them. The checksum of a
read-only array is computed on its way to a tier; that of a writable one at once, so that a change made too early is
detected."""
Sink = Callable[[Shard, int, Bytes], None]
"""Takes the payload of a shard's chunk, which is valid during the call only."""
Table = Mapping[str, NDArray[np.int32]]
"""By tag, the page of each block of a sequence; for states, the page of the snapshot at the block's end."""

Numbers = NDArray[np.int64]
_ITEMS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class PagePayloads:
    """The pools of one rank, as bytes by name, with their plan."""

    def __init__(self, schema: Schema, plan: Plan, pools: Mapping[str, Bytes]) -> None:
        self._plan, self._pools = plan, pools
        ranks, rank = plan.parallel.tp, plan.parallel.tp_rank
        for shard in schema.shards:
            _check(shard, plan.group(shard.tag))
        self._known: dict[bytes, list[_Runs]] = {}
        self._views = {(view.layer, view.tag, view.role): view for view in plan.views()}
        self.writes = schema.written_by(ranks, rank)
        self.reads = schema.read_by(ranks, rank)

    def source(self, table: Table) -> Source:
        """The payloads of a sequence's chunks; the source also implements `FillableSource`."""
        return _Gather(self, table)

    def sink(self, table: Table) -> Sink:
        """A sink that writes payloads into the pages of a sequence."""

        def write(shard: Shard, chunk: int, payload: Bytes) -> None:
            self._copy(shard, chunk, table, payload, inward=True)

        return write

    def _copy(self, shard: Shard, chunk: int, table: Table, payload: Bytes, *, inward: bool) -> None:
        blocks = _kernel_blocks(shard, self._plan.group(shard.tag), chunk, table[shard.tag])
        for runs in self._runs(shard, len(blocks)):
            held = StridedBlocks([runs.pool], _starts(runs.held, blocks * runs.held_block), runs.held_strides)
            order = np.arange(len(blocks)) * runs.kept_block
            kept = StridedBlocks([payload], _starts(runs.kept, order), runs.kept_strides)
            copy_blocks(*((held, kept) if inward else (kept, held)), runs.shape)

    def _check_whole(self, shard: Shard, chunk: int, table: Table) -> None:
        pages = _pages(shard, self._plan.group(shard.tag), chunk, table[shard.tag])
        if np.count_nonzero(pages) < len(pages):
            missing = len(pages) - np.count_nonzero(pages)
            raise StoreError(
                f"group {shard.tag!r}: {missing} of the {len(pages)} pages of chunk {chunk} are not there (NULL);"
                " keep windows in whole chunks, and states at their ends, or do not store it"
            )

    def _runs(self, shard: Shard, num_blocks: int) -> list[_Runs]:
        """The layout of a shard in the pools and in a payload; computed at the first use."""
        if shard.id not in self._known:
            self._known[shard.id] = self._found(shard, num_blocks)
        return self._known[shard.id]

    def _found(self, shard: Shard, num_blocks: int) -> list[_Runs]:
        payload, alike = np.empty(shard.payload_bytes, np.uint8), dict[_Shape, list[tuple[int, int]]]()
        for name, held, kept in self._pairs(shard, payload, num_blocks):
            shape = _Shape(name, held.shape[1:], held.strides, kept.strides, held.itemsize)
            at = (_address(held) - _address(self._pools[name]), _address(kept) - _address(payload))
            alike.setdefault(shape, []).append(at)
        return [shape.runs(self._pools[shape.pool], np.array(starts)) for shape, starts in alike.items()]

    def _pairs(
        self, shard: Shard, payload: Bytes, num_blocks: int
    ) -> Iterator[tuple[str, NDArray[np.generic], NDArray[np.generic]]]:
        """Pairs of arrays `[kernel blocks, rows, ...]`, over a pool (all its blocks) and over the payload, that
        shall be equal."""
        parallel = self._plan.parallel
        for layer, role, where in shard.fields():
            if where.start == where.stop:  # a role of width 0, as the rope of some latents
                continue
            held_slices = axis_slices(role, parallel.tp, parallel.tp_rank)
            view = self._views[layer, shard.tag, role.name]
            for held, kept in self._fields(view, role, shard, payload[where], num_blocks):
                for mine, theirs in zip(held_slices, shard.axis_slices(role), strict=True):
                    both = _scaled(mine, role).within(_scaled(theirs, role))
                    if both and role.parts:
                        yield view.pool, held, kept
                    elif both:
                        yield view.pool, held[:, :, both[0]], kept[:, :, both[1]]

    def _fields(
        self, view: View, role: Role, shard: Shard, payload: Bytes, blocks: int
    ) -> Iterator[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        """The rows of a role in pool and payload; of a packed role, each field by itself, since kernels may store
        fields in planes."""
        if not role.parts:
            held = self._array(view)
            held = np.moveaxis(held, role.token_axis + 1, 1) if shard.reach.per_token else held[:, None]
            yield held, payload.view(held.dtype).reshape(blocks, *held.shape[1:2], -1, *held.shape[3:])
            return
        rows, start = payload.reshape(blocks, -1, role.shape[0]), 0
        for part, plane in zip(role.parts, view.parts, strict=True):
            array = self._array(plane)
            field = rows[:, :, start : start + part.num_bytes]
            shape, strides = (blocks, *array.shape[1:]), (*field.strides[:2], *_tight(array))
            yield array, np.ndarray(shape, array.dtype, rows, start, strides)
            start += part.num_bytes

    def _array(self, view: View) -> NDArray[np.generic]:
        item = _ITEMS[view.dtype.align_bytes]
        return np.ndarray(view.shape, item, self._pools[view.pool], view.offset, view.strides)


@runtime_checkable
class FillableSource(Protocol):
    """A source that can write payloads into given memory, from several threads at once."""

    def fill(self, shard: Shard, chunk: int, out: Bytes) -> None: ...


class _Gather:
    """The payloads of the chunks of one sequence."""

    def __init__(self, pages: PagePayloads, table: Table) -> None:
        self._pages, self._table = pages, table

    def __call__(self, shard: Shard, chunk: int) -> Bytes:
        out = aligned(shard.payload_bytes)
        self.fill(shard, chunk, out)
        out.flags.writeable = False
        return out

    def fill(self, shard: Shard, chunk: int, out: Bytes) -> None:
        """Only complete chunks: an incomplete one would be taken for complete by a prompt that ends earlier."""
        self._pages._check_whole(shard, chunk, self._table)
        self._pages._copy(shard, chunk, self._table, out, inward=False)


class _Runs(NamedTuple):
    """Fields of a shard with the same layout: where each starts in pool and payload, and the shape and strides of a
    block."""

    pool: Bytes
    held: Numbers
    kept: Numbers
    held_block: int
    kept_block: int
    held_strides: tuple[int, int]
    kept_strides: tuple[int, int]
    shape: tuple[int, int, int]


class _Shape(NamedTuple):
    """What fields must have in common to be copied together; blocks are the first axis of the strides."""

    pool: str
    shape: tuple[int, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    item_bytes: int

    def runs(self, pool: Bytes, starts: Numbers) -> _Runs:
        """Inner axes that are contiguous on both sides become one run, the next two its strides, all others separate
        starts."""
        axes = [*zip(self.shape, self.held[1:], self.kept[1:], strict=True)]
        size = self.item_bytes
        while axes and (axes[-1][0] == 1 or axes[-1][1:] == (size, size)):
            size *= axes.pop()[0]
        loops = [axis for axis in axes if axis[0] > 1]
        (planes, *plane), (rows, *row) = [(1, 0, 0), (1, 0, 0), *loops][-2:]
        for count, *strides in loops[:-2]:
            starts = (starts[:, None] + np.arange(count)[None, :, None] * strides).reshape(-1, 2)
        held, kept = np.ascontiguousarray(starts.T)
        here, there = (plane[0], row[0]), (plane[1], row[1])
        return _Runs(pool, held, kept, self.held[0], self.kept[0], here, there, (planes, rows, size))


def _starts(fields: Numbers, blocks: Numbers) -> Numbers:
    return (fields[:, None] + blocks).ravel()


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def _kernel_blocks(shard: Shard, group: Group, chunk: int, pages: NDArray[np.int32]) -> NDArray[np.int64]:
    """The kernel blocks of a chunk, in order."""
    own = _pages(shard, group, chunk, pages).astype(np.int64)
    if not shard.reach.per_token:
        return own
    return (own[:, None] * group.kernel_blocks + np.arange(group.kernel_blocks)).ravel()


def _pages(shard: Shard, group: Group, chunk: int, pages: NDArray[np.int32]) -> NDArray[np.int32]:
    """The pages of a chunk, in order; for states, the page at the chunk's end."""
    size, end = group.block_tokens, (chunk + 1) * shard.chunk_tokens
    if shard.reach.per_token:
        return pages[end // size - shard.chunk_tokens // size : end // size]
    if end % size:
        raise StoreError(f"group {shard.tag!r}: no snapshot at {end}, its blocks are of {size} tokens")
    return pages[end // size - 1 : end // size]


def _check(shard: Shard, group: Group) -> None:
    if group.context_shards > 1:
        raise StoreError(f"group {shard.tag!r} is divided among context-parallel ranks: not storable")
    if shard.layers != group.layers:
        raise StoreError(f"group {shard.tag!r}: the store's schema is of other layers than the plan's")
    if shard.reach.per_token and shard.chunk_tokens % group.block_tokens:
        raise StoreError(
            f"group {shard.tag!r}: blocks of {group.block_tokens} tokens do not divide chunks of {shard.chunk_tokens}"
        )


def _scaled(axis_slice: AxisSlice, role: Role) -> AxisSlice:
    """The slice in items of its view: of 4-bit roles with one axis, bytes."""
    if role.dtype.bits >= 8 or len(role.shape) > 1:
        return axis_slice
    return AxisSlice(
        *(entries * role.dtype.bits // 8 for entries in (axis_slice.start, axis_slice.stop, axis_slice.at))
    )


def _tight(array: NDArray[np.generic]) -> tuple[int, ...]:
    """Strides after the first two axes of `[blocks, rows, ...]`, for contiguous rows."""
    shape, item = array.shape[2:], array.dtype.itemsize
    return tuple(item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))

"""Pages: payloads out of a rank's pools and back, whatever its blocks, kernel layout and share of the heads.

A pool is bytes; `Plan.view` says where a role of a layer lies in it. A chunk's blocks are gathered by their page ids,
the rows' axis is put first, and of each segment of heads the entries that both sides hold are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import StoreError
from kvweave.plan import Plan
from kvweave.plan.group import Group
from kvweave.plan.view import View
from kvweave.spec import Role
from kvweave.store.files import aligned
from kvweave.store.keys import Bytes
from kvweave.store.rows import Cut, Row, Schema, cuts

Source = Callable[[Row, int], Bytes]
"""The payload of a row's chunk."""
Sink = Callable[[Row, int, Bytes], None]
"""Takes a row's chunk; the payload is the sink's for the time of the call."""
Table = Mapping[str, NDArray[np.int32]]
"""By tag: the page of each block of a sequence; for states, of the snapshot at the block's end."""

_ITEMS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class Pages:
    """One rank's pools, as bytes by name, with the plan that cuts them."""

    def __init__(self, schema: Schema, plan: Plan, pools: Mapping[str, Bytes]) -> None:
        self._plan, self._pools = plan, pools
        ranks, rank = plan.parallel.tp, plan.parallel.tp_rank
        for row in schema.rows:
            _check(row, plan.group(row.tag))
        self._views = {(view.layer, view.tag, view.role): view for view in plan.views()}
        self.writes = schema.written_by(ranks, rank)
        self.reads = schema.read_by(ranks, rank)

    def source(self, table: Table) -> Source:
        """Payloads of a sequence's chunks."""

        def payload(row: Row, chunk: int) -> Bytes:
            out = aligned(row.payload_bytes)
            for held, kept, blocks in self._pairs(row, chunk, table, out):
                kept[...] = held[blocks]
            return out

        return payload

    def sink(self, table: Table) -> Sink:
        """Writes what is loaded into a sequence's pages."""

        def write(row: Row, chunk: int, payload: Bytes) -> None:
            for held, kept, blocks in self._pairs(row, chunk, table, payload):
                held[blocks] = kept

        return write

    def _pairs(
        self, row: Row, chunk: int, table: Table, payload: Bytes
    ) -> Iterator[tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.int64]]]:
        """Arrays `[kernel blocks, rows, ...]` over pool and payload that shall be equal, and the pool's blocks."""
        group = self._plan.group(row.tag)
        blocks = _kernel_blocks(row, group, chunk, table[row.tag])
        parallel = self._plan.parallel
        for layer, role, where in row.fields():
            held_cuts = cuts(role, parallel.tp, parallel.tp_rank)
            view = self._views[layer, row.tag, role.name]
            for held, kept in self._fields(view, role, row, payload[where], len(blocks)):
                for mine, theirs in zip(held_cuts, row.cuts(role), strict=True):
                    both = _scaled(mine, role).within(_scaled(theirs, role))
                    if both and role.parts:
                        yield held, kept, blocks
                    elif both:
                        yield held[:, :, both[0]], kept[:, :, both[1]], blocks

    def _fields(
        self, view: View, role: Role, row: Row, payload: Bytes, blocks: int
    ) -> Iterator[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        """A role's rows here and there; of a packed role, each field, since kernels may want them in planes."""
        if not role.parts:
            held = self._array(view)
            held = np.moveaxis(held, role.token_axis + 1, 1) if row.reach.per_token else held[:, None]
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


def _kernel_blocks(row: Row, group: Group, chunk: int, pages: NDArray[np.int32]) -> NDArray[np.int64]:
    """The kernel blocks of a chunk, in order."""
    size, end = group.block_tokens, (chunk + 1) * row.chunk_tokens
    if not row.reach.per_token:
        if end % size:
            raise StoreError(f"group {row.tag!r}: no snapshot at {end}, its blocks are of {size} tokens")
        return pages[end // size - 1 : end // size].astype(np.int64)
    own = pages[end // size - row.chunk_tokens // size : end // size].astype(np.int64)
    return (own[:, None] * group.kernel_blocks + np.arange(group.kernel_blocks)).ravel()


def _check(row: Row, group: Group) -> None:
    if group.context_shards > 1:
        raise StoreError(f"group {row.tag!r} is divided among context-parallel ranks: not storable")
    if row.layers != group.layers:
        raise StoreError(f"group {row.tag!r}: the store's schema is of other layers than the plan's")
    if row.reach.per_token and row.chunk_tokens % group.block_tokens:
        raise StoreError(
            f"group {row.tag!r}: blocks of {group.block_tokens} tokens do not divide chunks of {row.chunk_tokens}"
        )


def _scaled(cut: Cut, role: Role) -> Cut:
    """A cut in the items of its view: packed nibbles of a row with one axis count in bytes."""
    if role.dtype.bits >= 8 or len(role.shape) > 1:
        return cut
    return Cut(*(entries * role.dtype.bits // 8 for entries in (cut.start, cut.stop, cut.at)))


def _tight(array: NDArray[np.generic]) -> tuple[int, ...]:
    """Strides of `[blocks, rows, ...]` behind the first two axes, as if nothing lay between."""
    shape, item = array.shape[2:], array.dtype.itemsize
    return tuple(item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))

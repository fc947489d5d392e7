"""An engine's memory, allocated by kvweave or by the engine: where each role of each layer lies, and which block table
leads to it.

    engine's tensor    [blocks, 2, tokens, heads, dim]      [blocks, heads, dim, tokens]      [pages, bytes]
    its view           [blocks, tokens, heads, dim], by strides                               [pages, *state]

A view names the axes in one order, whatever their order in memory: blocks, rows, then a row's own. Keys that lie as
`[dim, tokens]`, keys and values side by side, and pages with padding differ in strides only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from kvweave.errors import StoreError
from kvweave.plan import Parallel, Plan, View
from kvweave.plan.view import as_bytes, contiguous
from kvweave.pool import NULL
from kvweave.spec import DType, Role

_ITEMS = {1: DType.UINT8, 2: DType.FLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64}


@dataclass(frozen=True, slots=True)
class TableUse:
    """Which of the engine's block tables leads to a layer's pages, and how many tokens one of its pages holds.

    For states `block_tokens` is the distance of snapshots: entry i of the table is the page of the one taken at
    `(i + 1) * block_tokens`, or the NULL page. An engine with states at any point gives a table with an entry a chunk.
    """

    name: str
    block_tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise StoreError(f"table {self.name!r}: block_tokens must be at least 1, got {self.block_tokens}")


@dataclass(frozen=True)
class EngineMemory:
    """The tensors of one rank. `views` have the axes blocks, rows (not for states), and those of a row as the spec has
    them; a page of a table is as many of a view's blocks, one after the other, as hold its tokens."""

    views: tuple[View, ...]
    tables: Mapping[tuple[int, str], TableUse]
    """By layer and tag. Layers of one tag may have different tables."""
    pools: Mapping[str, Any]
    """The memory that views lie in: arrays of bytes, or tensors of bytes on a device."""
    parallel: Parallel = field(default_factory=Parallel)
    null: int = NULL
    """The page number that means: no page. It is never written."""

    def __post_init__(self) -> None:
        for view in self.views:
            if (view.layer, view.tag) not in self.tables:
                raise StoreError(f"layer {view.layer} of group {view.tag!r} has views, but no block table")
            if view.pool not in self.pools:
                raise StoreError(f"layer {view.layer}, {view.role!r}: its pool {view.pool!r} is not given")

    @classmethod
    def of_plan(cls, plan: Plan, pools: Mapping[str, Any]) -> EngineMemory:
        """The pools of a plan; tables are named by tags."""
        for group in plan.groups:
            if group.context_shards > 1:
                raise StoreError(f"group {group.tag!r} is divided among context-parallel ranks: not storable")
        tables = {(layer, g.tag): TableUse(g.tag, g.block_tokens) for g in plan.groups for layer in g.layers}
        return cls(tuple(_planned(plan, view) for view in plan.views()), tables, pools, plan.parallel)

    @classmethod
    def of_tensors(
        cls,
        tensors: Mapping[tuple[int, str, str], Any],
        tables: Mapping[tuple[int, str], TableUse],
        *,
        parallel: Parallel | None = None,
        null: int = NULL,
    ) -> EngineMemory:
        """Arrays or torch tensors by layer, tag and role, permuted (not copied) to the order of axes that views have.

        Fields of a packed role that lie in planes are given one by one, as `indexer.values` and `indexer.scale`.
        """
        pools: dict[str, Any] = {}
        views: dict[tuple[int, str, str], View] = {}
        for (layer, tag, name), tensor in tensors.items():
            view = _view(layer, tag, name, tensor, pools)
            role = (layer, tag, name.partition(".")[0])
            if name == role[2]:
                views[role] = view
            else:
                first = views.get(role, replace(view, role=role[2]))
                views[role] = replace(first, parts=(*first.parts, view))
        return cls(tuple(views.values()), tables, pools, parallel or Parallel(), null)


def region_view(
    layer: int,
    tag: str,
    role: Role,
    *,
    pool: str,
    base: int,
    stride: int,
    slots: int,
    size: int,
    num_rows: int | None,
    token_axis: int | None = None,
) -> View:
    """A view of slots that start at `base + stride * slot` of a pool, each with `size` bytes of `num_rows` rows of a
    rank's role (None: a state) without gaps; `token_axis` is where the rows' axis lies in a slot (default: the role's).
    """
    row, dtype = as_bytes(role.shape, role.dtype)
    axis = role.token_axis if token_axis is None else token_axis
    shape = row if num_rows is None else (*row[:axis], num_rows, *row[axis:])
    if prod(shape) * dtype.align_bytes != size:
        raise StoreError(
            f"layer {layer}, {role.name!r}: {shape} of {dtype} are {prod(shape) * dtype.align_bytes} bytes, but the"
            f" region's slots have {size}; does another rank's share, or another role, lie there?"
        )
    strides = (stride, *contiguous(shape, dtype.align_bytes))
    view = View(layer, tag, role.name, pool, dtype, base, (slots, *shape), strides)
    return view if num_rows is None else _rows_second(view, axis + 1)


def _planned(plan: Plan, view: View) -> View:
    cache = plan.group(view.tag).cache
    role = cache.role(view.role)
    if not cache.reach.per_token:
        return replace(view, parts=tuple(_without_rows(part) for part in view.parts))
    return view if role.parts else _rows_second(view, role.token_axis + 1)


def _without_rows(view: View) -> View:
    """A field of a state: plans give it an axis of one row."""
    return replace(view, shape=(view.shape[0], *view.shape[2:]), strides=(view.strides[0], *view.strides[2:]))


def _rows_second(view: View, axis: int) -> View:
    """The same with the rows' axis behind that of the blocks."""
    order = [0, axis, *(other for other in range(1, len(view.shape)) if other != axis)]
    return replace(view, shape=tuple(view.shape[i] for i in order), strides=tuple(view.strides[i] for i in order))


def _view(layer: int, tag: str, name: str, tensor: Any, pools: dict[str, Any]) -> View:
    """A view of a tensor; the memory behind it joins the pools."""
    if isinstance(tensor, np.ndarray):
        item, strides, at = tensor.itemsize, tensor.strides, tensor.ctypes.data
        if item not in _ITEMS or tensor.dtype.hasobject:
            raise StoreError(f"layer {layer}, {name!r}: items of {tensor.dtype}; give views of 1, 2, 4 or 8 bytes each")
        pool: Any = _host_bytes(tensor)
        start, dtype = pool.ctypes.data, _ITEMS[item]
    else:
        item, at = tensor.element_size(), tensor.data_ptr()
        strides = tuple(step * item for step in tensor.stride())
        pool, dtype = _storage_bytes(tensor), DType.parse(tensor.dtype)
        start = tensor.untyped_storage().data_ptr()
    known = pools.setdefault(f"{start:#x}", pool)
    if known.nbytes < pool.nbytes:  # that was an array over the beginning of the same memory
        pools[f"{start:#x}"] = pool
    return View(layer, tag, name, f"{start:#x}", dtype, at - start, tuple(tensor.shape), tuple(strides))


def _host_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """All bytes of the memory that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    whole = array if array.flags.c_contiguous else array.T
    if not whole.flags.c_contiguous:
        raise StoreError(f"an array of strides {array.strides} is not one run of memory: give views of one that is")
    return np.ndarray(whole.nbytes, np.uint8, whole)


def _storage_bytes(tensor: Any) -> Any:
    """All bytes behind a torch tensor: an array on the host, else a tensor."""
    torch = sys.modules["torch"]
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.numpy() if flat.device.type == "cpu" else flat

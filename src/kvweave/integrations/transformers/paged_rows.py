"""Rows of a layer for a whole batch: written at the slots of a step, and read as attention needs them.

A page holds `[heads, tokens, dim]`, so a read of any tokens of any rows is one index operation, and comes out as
`[batch, heads, tokens, dim]` with each head's tokens in a run.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kvweave.tensor import LayerView, RoleView


class RowSlots(NamedTuple):
    """Single rows at any slots: pages and offsets in them, `[batch, tokens]` each."""

    pages: torch.Tensor
    offsets: torch.Tensor

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Those rows of `[heads, pages, tokens, dim]`, as `[heads, batch, tokens, dim]`."""
        return rows[:, self.pages, self.offsets]


class BlockRun(NamedTuple):
    """Rows in whole blocks, `[batch, blocks]`: of each `num_rows` rows after the first `skip`. Longer copies."""

    pages: torch.Tensor
    skip: int
    num_rows: int

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, self.pages].flatten(2, 3)[:, :, self.skip : self.skip + self.num_rows]


WIDTHS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8)
"""Elements that rows are copied as: the wider, the fewer."""


class PagedRows:
    """Rows `[pages, tokens, heads, dim]` of one layer; rows without heads are `[batch, tokens, dim]` for callers."""

    def __init__(self, cells: torch.Tensor) -> None:
        self.cells, self.dtype = cells, cells.dtype
        self.has_heads = cells.dim() == 4
        self.is_empty = 0 in cells.shape
        self._wide = widest(cells if self.has_heads else cells.unsqueeze(2)).permute(2, 0, 1, 3)

    def write(self, places: RowSlots, rows: torch.Tensor) -> None:
        """Write `rows`, `[batch, heads, tokens, dim]`."""
        if not self.is_empty:
            rows = rows.to(self.dtype)
            self.cells[places.pages, places.offsets] = rows.transpose(1, 2) if self.has_heads else rows

    def read(self, places: RowSlots | BlockRun) -> torch.Tensor:
        """The rows at these slots, `[batch, heads, tokens, dim]`. A copy."""
        found = places.read(self._wide).view(self.dtype).transpose(0, 1)
        return found if self.has_heads else found.squeeze(1)


def widest(cells: torch.Tensor) -> torch.Tensor:
    """The same memory in the widest elements that divide its rows."""
    size = cells.element_size()
    runs = [cells.storage_offset() * size, cells.shape[-1] * size, *(stride * size for stride in cells.stride()[:-1])]
    for dtype in WIDTHS:
        if dtype.itemsize <= size:
            break
        if all(run % dtype.itemsize == 0 for run in runs):
            return cells.view(dtype)
    return cells


# ---- keys and values: in one move where they lie side by side

Both = tuple[torch.Tensor, torch.Tensor]


class KVRows(Protocol):
    def write(self, places: RowSlots, keys: torch.Tensor, values: torch.Tensor) -> None: ...
    def read(self, places: RowSlots | BlockRun) -> Both: ...


class AdjacentKV:
    """Keys and values of one shape and adjacent in memory: the heads of the values follow those of the keys."""

    def __init__(self, rows: PagedRows) -> None:
        self.rows = rows

    def write(self, places: RowSlots, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows.write(places, torch.cat([keys, values], dim=1))

    def read(self, places: RowSlots | BlockRun) -> Both:
        keys, values = self.rows.read(places).chunk(2, dim=1)
        return keys, values


class SeparateKV:
    """Keys and values of different widths: a latent and its rope."""

    def __init__(self, keys: PagedRows, values: PagedRows) -> None:
        self.keys, self.values = keys, values

    def write(self, places: RowSlots, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.write(places, keys)
        self.values.write(places, values)

    def read(self, places: RowSlots | BlockRun) -> Both:
        return self.keys.read(places), self.values.read(places)


class SharedKV:
    """Keys and values that are the same rows."""

    def __init__(self, rows: PagedRows) -> None:
        self.rows = rows

    def write(self, places: RowSlots, keys: torch.Tensor, values: torch.Tensor) -> None:  # noqa: ARG002
        self.rows.write(places, keys)

    def read(self, places: RowSlots | BlockRun) -> Both:
        rows = self.rows.read(places)
        return rows, rows


def keys_and_values(layer: LayerView) -> KVRows:
    """The keys and values of a layer, by their layout in memory."""
    key, value = layer.roles.values()
    if value.role.alias_of:
        return SharedKV(rows_of(key))
    kv = layer.kv
    if kv is None or kv.stride(1) != kv.shape[2] * kv.stride(2):
        return SeparateKV(rows_of(key), rows_of(value))
    return AdjacentKV(PagedRows(kv.flatten(1, 2).transpose(1, 2)))


def rows_of(view: RoleView) -> PagedRows:
    return PagedRows(view.planes[0].tensor)

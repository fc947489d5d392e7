"""Writing and reading rows: tokens by slot, states by page.

A slot is what `Cache.slots` returns: page * block_tokens + the token's offset in its block. Where several tokens share
a row, the slot of any of them names that row. The slot of a state is its page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.errors import BadRows
from kvweave.pool import NULL
from kvweave.tensor.layer import Plane, RoleView
from kvweave.tensor.torch_dtypes import flat_bytes, shaped, torch_dtype, whole_bytes

Slots: TypeAlias = "NDArray[np.integer] | torch.Tensor"
Rows: TypeAlias = "torch.Tensor | Mapping[str, torch.Tensor]"


def write_rows(view: RoleView, slots: Slots, rows: Rows) -> None:
    """Write `rows[i]` at `slots[i]`; a slot of -1 is skipped. Rows are `[n, *row shape]`, whatever their layout in
    memory.

    Packed rows are bytes `[n, row_bytes]`, or a mapping from part names to rows. Checking slots on a CUDA device would
    synchronise, so they are not checked there; dropping -1 does synchronise: in a captured graph give padding tokens
    slot 0 (the NULL page) instead.
    """
    write_all([(view, rows)], slots)


def write_all(wanted: Iterable[tuple[RoleView, Rows]], slots: Slots) -> None:
    """Write rows of several roles at the same slots; a row of the wrong shape is an error before any row is written."""
    for view, index, planes in [_prepared(view, slots, rows) for view, rows in wanted]:
        kept = index >= 0
        skips = not bool(kept.all())
        blocks, offsets = _cells(view, index[kept] if skips else index)
        for plane, stored in planes:
            plane.tensor.view(whole_bytes(plane.tensor.dtype))[blocks, offsets] = stored[kept] if skips else stored


def _prepared(
    view: RoleView, slots: Slots, rows: Rows
) -> tuple[RoleView, torch.Tensor, list[tuple[Plane, torch.Tensor]]]:
    index = _index(view, slots, least=-1)
    return view, index, [(plane, _stored(view, plane, len(index), given)) for plane, given in _by_plane(view, rows)]


def read_rows(view: RoleView, slots: Slots) -> torch.Tensor:
    """The rows at `slots`, `[n, *row shape]`; packed ones as bytes. A copy."""
    planes = read_planes(view, slots)
    if not view.role.parts:
        return next(iter(planes.values()))
    sizes = [part.num_bytes for part in view.role.parts]
    flat = [flat_bytes(rows).view(len(rows), size) for rows, size in zip(planes.values(), sizes, strict=True)]
    return torch.cat(flat, dim=1)


def read_planes(view: RoleView, slots: Slots) -> dict[str, torch.Tensor]:
    """The rows at `slots`, by part; a role that is not packed has one part, of its own name."""
    blocks, offsets = _cells(view, _index(view, slots, least=0))
    return {plane.name: _shown(plane, blocks, offsets) for plane in view.planes}


def gather_rows(view: RoleView, table_row: object, start: int, end: int) -> torch.Tensor:
    """The rows of the tokens [start, end) of a sequence, in order; `table_row` is its row of `Cache.table`.

    Only complete rows, and under context parallelism only those of this rank.
    """
    return read_rows(view, token_slots(view, table_row, start, end))


def token_slots(view: RoleView, table_row: object, start: int, end: int) -> NDArray[np.int64]:
    """The slot of each of those rows. A token whose page was freed is an error, never zeros."""
    group, tokens = view.group, view.role.tokens_per_row
    if not group.cache.reach.per_token:
        raise BadRows(f"{group.tag!r} holds states, not tokens: read them by page")
    pages = np.asarray(table_row, np.int64)
    positions = np.arange(-(-start // tokens), end // tokens) * tokens
    mine = positions[positions // group.block_tokens % group.context_shards == view.cp_rank % group.context_shards]
    columns = mine // (group.block_tokens * group.context_shards)
    if start < 0 or (len(columns) and columns[-1] >= len(pages)):
        raise BadRows(f"tokens {start} to {end} of {group.tag!r} are outside a table row of {len(pages)} pages")
    if (gone := mine[pages[columns] == NULL]).size:
        raise BadRows(f"token {gone[0]} of {group.tag!r} has no page: its window has passed, or it was never written")
    slots: NDArray[np.int64] = pages[columns] * group.block_tokens + mine % group.block_tokens
    return slots


def row_slots(slots: NDArray[np.int64], tokens_per_row: int) -> NDArray[np.int64]:
    """Of the slots of tokens, those of tokens that complete a row of `tokens_per_row`: where such rows are written."""
    ending: NDArray[np.int64] = slots[(slots >= 0) & (slots % tokens_per_row == tokens_per_row - 1)]
    return ending


# ---- where


def _index(view: RoleView, slots: Slots, least: int) -> torch.Tensor:
    index = torch.as_tensor(slots, dtype=torch.int64).reshape(-1)
    if index.device.type == "cpu":
        wrong = index[(index < least) | (index >= view.num_slots)]
        if len(wrong):
            raise BadRows(f"slot {int(wrong[0])} is not among the {view.num_slots} of {view.name}")
    return index.to(view.tensor.device)


def _cells(view: RoleView, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel block, and the row in it, for each slot."""
    rows = index // view.role.tokens_per_row
    return rows // view.rows_per_block, rows % view.rows_per_block


# ---- what


def _by_plane(view: RoleView, rows: Rows) -> list[tuple[Plane, torch.Tensor]]:
    if isinstance(rows, Mapping):
        names = {plane.name for plane in view.planes}
        if set(rows) != names:
            raise BadRows(f"{view.name} has the parts {', '.join(sorted(names))}, not {', '.join(sorted(rows))}")
        return [(plane, rows[plane.name]) for plane in view.planes]
    if not view.role.parts:
        return [(view.planes[0], rows)]
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != view.role.shape[0]:
        raise BadRows(f"{view.name} takes packed rows of {view.role.shape[0]} bytes, not {_kind(rows)}")
    sizes = [part.num_bytes for part in view.role.parts]
    return [(plane, _typed(plane, piece)) for plane, piece in zip(view.planes, rows.split(sizes, dim=1), strict=True)]


def _typed(plane: Plane, flat: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, bytes]` as the rows of a plane."""
    return shaped(
        flat.clone(memory_format=torch.contiguous_format), torch_dtype(plane.dtype), (len(flat), *plane.shape)
    )


def _stored(view: RoleView, plane: Plane, num_rows: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows as integers of the same width, which every device can index."""
    dtype = torch_dtype(plane.dtype)
    if tuple(rows.shape) != (num_rows, *plane.shape) or rows.dtype != dtype:
        wanted = f"[{num_rows}, {', '.join(map(str, plane.shape))}] {dtype}"
        raise BadRows(f"{view.name} takes rows {wanted}, not {_kind(rows)}; cast or quantise them before")
    rows = rows.detach().to(plane.tensor.device)
    if plane.tensor.dim() > rows.dim() + 1:
        rows = flat_bytes(rows).view(*rows.shape, dtype.itemsize)
    return rows.view(whole_bytes(rows.dtype))


def _shown(plane: Plane, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    cells = plane.tensor.view(whole_bytes(plane.tensor.dtype))[blocks, offsets]
    if plane.tensor.dim() > len(plane.shape) + 2:
        return shaped(cells.view(torch.uint8), torch_dtype(plane.dtype), (len(blocks), *plane.shape))
    return cells.view(plane.tensor.dtype)


def _kind(rows: torch.Tensor) -> str:
    return f"{list(rows.shape)} {rows.dtype}"

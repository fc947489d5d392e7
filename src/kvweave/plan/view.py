"""Views: where one role of one layer lies in its pool, as offset, shape and strides in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvweave.plan.group import Group
from kvweave.plan.pool import Pool
from kvweave.spec import DType
from kvweave.spec.role import Part, Role


@dataclass(frozen=True, slots=True)
class View:
    """A strided tensor over a pool's bytes. The first axis is the kernel block (the page, for states).

    Elements narrower than a byte are shown as bytes. A packed role is bytes as a whole, and has its `parts` beside.
    """

    layer: int
    tag: str
    role: str
    pool: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[View, ...] = ()


def role_view(group: Group, pool: Pool, layer: int, role: Role) -> View:
    lane, slot = divmod(group.layers.index(layer), group.lane_layers)
    offset = (
        lane * pool.num_superpages * pool.superpage_bytes + slot * group.layer_bytes + group.role_offsets[role.name]
    )
    blocks = pool.num_superpages * group.pages_per_superpage * group.kernel_blocks
    rows = group.num_rows(role)

    def view(name: str, dtype: DType, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
        return View(
            layer, group.tag, name, pool.name, dtype, offset + start, (blocks, *shape), (group.kernel_stride, *strides)
        )

    if role.parts:
        parts = tuple(view(f"{role.name}.{part.name}", *plane) for part, plane in _planes(role, rows))
        row_bytes = role.shape[0]
        whole = (rows * row_bytes,) if role.planar else (rows, row_bytes)
        return replace(view(role.name, DType.UINT8, 0, whole, contiguous(whole, 1)), parts=parts)
    row, dtype = as_bytes(role.shape, role.dtype)
    shape = (*row[: role.token_axis], rows, *row[role.token_axis :]) if group.cache.reach.per_token else row
    return view(role.name, dtype, 0, shape, contiguous(shape, dtype.align_bytes))


def _planes(role: Role, rows: int) -> list[tuple[Part, tuple[DType, int, tuple[int, ...], tuple[int, ...]]]]:
    """Each part's dtype, start, shape and strides within a kernel block."""
    planes, start = [], 0
    for part in role.parts:
        shape, dtype = as_bytes(part.shape, part.dtype)
        row_stride = part.num_bytes if role.planar else role.shape[0]
        planes.append((part, (dtype, start, (rows, *shape), (row_stride, *contiguous(shape, dtype.align_bytes)))))
        start += part.num_bytes * rows if role.planar else part.num_bytes
    return planes


def as_bytes(shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], DType]:
    """Shape and dtype as views show them: elements narrower than a byte as bytes."""
    return (shape, dtype) if dtype.bits >= 8 else ((*shape[:-1], shape[-1] * dtype.bits // 8), DType.UINT8)


def contiguous(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

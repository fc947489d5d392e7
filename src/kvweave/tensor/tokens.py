"""Reading and writing numbers, whatever a layer stores: plain, cast, quantised with scales, or packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from kvweave.spec import Role
from kvweave.spec.layer_caches import SCALE_BLOCK
from kvweave.tensor.layer import LayerView
from kvweave.tensor.quant import LARGEST, Quantiser, pack, unpack
from kvweave.tensor.rows import Rows, Slots, read_planes, token_slots, write_all
from kvweave.tensor.torch_dtypes import torch_dtype


def write_tokens(
    layer: LayerView, slots: Slots, rows: Mapping[str, torch.Tensor], *, power_of_two: bool = False
) -> None:
    """Write float rows `[n, *row shape]` by role. A role with scales is quantised and its scales are written too; 8-bit
    roles without scales (the model has them) are cast, and clamped to the range of their type."""
    wanted: list[tuple[str, Rows]] = []
    for name, given in rows.items():
        role = layer.role(name).role
        if role.parts:
            wanted.append((name, pack(role, given, power_of_two=power_of_two)))
        elif scale := _scale_of(layer, name):
            values, scales = _quantiser(role, scale, power_of_two).quantise(given)
            wanted += [(name, values), (scale.name, scales.view(len(given), *scale.shape))]
        else:
            wanted.append((name, _cast(role, given)))
    write_all([(layer.role(name), stored) for name, stored in wanted], slots)


def gather_tokens(layer: LayerView, table_row: object, start: int, end: int) -> dict[str, torch.Tensor]:
    """The tokens [start, end) of a sequence as numbers, by role; scales are applied and left out of the result."""
    return {name: _numbers(layer, name, token_slots(layer.role(name), table_row, start, end)) for name in _named(layer)}


def read_tokens(layer: LayerView, slots: Slots, names: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """The rows at `slots` as numbers, by role: of the roles named, or of all."""
    return {name: _numbers(layer, name, slots) for name in names or _named(layer)}


def _named(layer: LayerView) -> list[str]:
    """The roles that are no scales of others."""
    scales = {scale.name for name in layer.roles if (scale := _scale_of(layer, name))}
    return [name for name in layer.roles if name not in scales]


def _numbers(layer: LayerView, name: str, slots: Slots) -> torch.Tensor:
    view = layer.role(name)
    planes = read_planes(view, slots)
    if view.role.parts:
        return unpack(view.role, planes)
    scale = _scale_of(layer, name)
    if scale is None:
        return planes[name]
    scales = read_planes(layer.role(scale.name), slots)[scale.name]
    per_head = scales if len(scale.shape) == len(view.role.shape) else scales.unsqueeze(-1)
    return _quantiser(view.role, scale).dequantise(planes[name], per_head)


def _scale_of(layer: LayerView, name: str) -> Role | None:
    view = layer.roles.get(f"{name}_scale")
    return view.role if view else None


def _quantiser(role: Role, scale: Role, power_of_two: bool = False) -> Quantiser:
    """Whether there is one scale a head or one for each block of a head: the shape of the scales decides."""
    return Quantiser(role.dtype, SCALE_BLOCK if len(scale.shape) == len(role.shape) else None, power_of_two)


def _cast(role: Role, rows: torch.Tensor) -> torch.Tensor:
    if role.dtype in LARGEST and rows.dtype != torch_dtype(role.dtype):
        rows = rows.float().clamp(-LARGEST[role.dtype], LARGEST[role.dtype])
    return rows.to(torch_dtype(role.dtype))

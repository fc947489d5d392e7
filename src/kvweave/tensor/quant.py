"""Quantisation of rows when they are written: values in a narrow type beside their scales, as the roles of the layer
declare.

A scale is the largest magnitude in its block divided by the largest number of the type, so that nothing overflows; the
scale of zeros is 1. fp8 keeps 3 bits of mantissa (a relative error of at most 1/16), int8 and int4 round to half a
step. `SCALE_BLOCK` says how many values share a scale; the last block may be shorter.

Two layouts are bytes with scales of a byte, which are powers of two (ue8m0):
    V4 row    448 fp8, 64 bfloat16; a scale for 64, and one byte of padding      576 + 8 bytes
    mxfp4     128 numbers of 4 bits (e2m1), the first in the low half; a scale for 32    64 + 4 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from kvweave.errors import BadRows
from kvweave.spec import DType, Role
from kvweave.spec.layer_caches import SCALE_BLOCK
from kvweave.tensor.torch_dtypes import torch_dtype

V4_ROPE, V4_BLOCK = 64, 64
MX_BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes that the lower three bits of an e2m1 number stand for; the fourth bit is the sign."""
BIAS = 127
"""Bias of the exponent in a ue8m0 byte."""
LARGEST = {DType.FLOAT8_E4M3: 448.0, DType.FLOAT8_E5M2: 57344.0, DType.INT8: 127.0, DType.INT4: 7.0}


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Quantises to `dtype` and back, with one scale for each `block` values of the last axis (None: for the whole
    axis)."""

    dtype: DType
    block: int | None = None
    power_of_two: bool = False
    """Whether scales are rounded up to powers of two, as kernels with ue8m0 scales need."""

    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored values (int4: two in a byte, the first in the low half), and float32 scales `[..., blocks]`."""
        blocks = self._blocks(rows.float())
        scales = blocks.abs().amax(-1) / LARGEST[self.dtype]
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        if self.power_of_two:
            scales = _powers(scales)
        scaled = (blocks / scales.unsqueeze(-1)).flatten(-2)[..., : rows.shape[-1]]
        return self._narrow(scaled.clamp(-LARGEST[self.dtype], LARGEST[self.dtype])), scales

    def dequantise(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 rows."""
        wide = self._widen(values)
        return (self._blocks(wide) * scales.float().unsqueeze(-1)).flatten(-2)[..., : wide.shape[-1]]

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., dim]` as `[..., blocks, block]`, the last block padded with zeros."""
        dim = rows.shape[-1]
        block = self.block or dim
        padded = torch.nn.functional.pad(rows, (0, -dim % block))
        blocks: torch.Tensor = padded.unflatten(-1, (-1, block))
        return blocks

    def _narrow(self, scaled: torch.Tensor) -> torch.Tensor:
        if self.dtype not in (DType.INT8, DType.INT4):
            return scaled.to(torch_dtype(self.dtype))
        whole = scaled.round().to(torch.int8)
        if self.dtype is DType.INT8:
            return whole
        low, high = (whole[..., half::2].to(torch.uint8) & 0xF for half in (0, 1))
        return low | high << 4

    def _widen(self, values: torch.Tensor) -> torch.Tensor:
        if self.dtype is not DType.INT4:
            return values.float()
        halves = torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2).to(torch.int8)
        return torch.where(halves > 7, halves - 16, halves).float()


def pack(role: Role, rows: torch.Tensor, *, power_of_two: bool = False) -> dict[str, torch.Tensor]:
    """Float rows `[n, width]` as the parts of a packed role: its fp8 part with scales, the others cast.

    Columns go to the parts in order, scales excepted: 512 + 64 for an MLA row of 656 bytes, 128 for an indexer's 132.
    """
    if rows.dim() != 2 or rows.shape[1] != packed_width(role):
        raise BadRows(f"role {role.name!r} packs rows of {packed_width(role)} numbers, not {list(rows.shape)}")
    if layout := _bytewise(role):
        return layout.pack(rows.float())
    widths, parts = _widths(role), {}
    for part, columns in zip(widths, rows.split(list(widths.values()), dim=1), strict=True):
        dtype = next(p.dtype for p in role.parts if p.name == part)
        if dtype in LARGEST:
            quantiser = Quantiser(dtype, SCALE_BLOCK, power_of_two)
            parts[part], parts["scale"] = quantiser.quantise(columns)
        else:
            parts[part] = columns.to(torch_dtype(dtype))
    return parts


def packed_width(role: Role) -> int:
    """How many numbers a packed row stands for."""
    layout = _bytewise(role)
    return layout.width if layout else sum(_widths(role).values())


def unpack(role: Role, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rows that `pack` was given, as float32, within the error of the format."""
    if layout := _bytewise(role):
        return layout.unpack(parts)
    columns = []
    for name in _widths(role):
        dtype = next(part.dtype for part in role.parts if part.name == name)
        wide = parts[name].float()
        columns.append(Quantiser(dtype, SCALE_BLOCK).dequantise(wide, parts["scale"]) if dtype in LARGEST else wide)
    return torch.cat(columns, dim=1)


@dataclass(frozen=True, slots=True)
class _V4Row:
    """Rows of `width` numbers, the last 64 of them rope."""

    width: int
    quantiser: ClassVar[Quantiser] = Quantiser(DType.FLOAT8_E4M3, V4_BLOCK, power_of_two=True)

    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scales = self.quantiser.quantise(rows[:, :-V4_ROPE])
        rope = rows[:, -V4_ROPE:].to(torch.bfloat16).contiguous()
        data = torch.cat([values.contiguous().view(torch.uint8), rope.view(torch.uint8)], dim=1)
        padding = (0, scales.shape[1] % 2)
        return {"data": data, "scale": torch.nn.functional.pad(_exponents(scales), padding)}

    def unpack(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        nope, rope = parts["data"].split([self.width - V4_ROPE, 2 * V4_ROPE], dim=1)
        scales = _scales(parts["scale"][:, : -(-nope.shape[1] // V4_BLOCK)])
        values = self.quantiser.dequantise(nope.contiguous().view(torch.float8_e4m3fn), scales)
        return torch.cat([values, rope.contiguous().view(torch.bfloat16).float()], dim=1)


@dataclass(frozen=True, slots=True)
class _MXFP4Row:
    """Rows of `width` numbers of 4 bits."""

    width: int

    def pack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = rows.unflatten(-1, (-1, MX_BLOCK))
        scales = _powers(blocks.abs().amax(-1) / E2M1[-1])
        scaled = (blocks / scales.unsqueeze(-1)).flatten(-2)
        between = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=rows.device)
        nibbles = torch.bucketize(scaled.abs(), between).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
        return {"values": nibbles[:, ::2] | nibbles[:, 1::2] << 4, "scale": _exponents(scales)}

    def unpack(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        nibbles = torch.stack((parts["values"] & 0xF, parts["values"] >> 4), dim=-1).flatten(-2).long()
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=nibbles.device)[nibbles]
        blocks: torch.Tensor = numbers.unflatten(-1, (-1, MX_BLOCK))
        return (blocks * _scales(parts["scale"]).unsqueeze(-1)).flatten(-2)


def _bytewise(role: Role) -> _V4Row | _MXFP4Row | None:
    """The layout of a role whose parts are bytes, if it is one of those above."""
    shapes = {part.name: part.shape[0] for part in role.parts if part.dtype is DType.UINT8}
    if len(shapes) != len(role.parts) or "scale" not in shapes:
        return None
    width = shapes.get("data", 0) - V4_ROPE
    scales = -(-(width - V4_ROPE) // V4_BLOCK)
    if width > V4_ROPE and shapes["scale"] == scales + scales % 2:
        return _V4Row(width)
    if shapes.get("values", 0) * 2 == shapes["scale"] * MX_BLOCK:
        return _MXFP4Row(2 * shapes["values"])
    return None


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Scales rounded up to powers of two that a ue8m0 byte can hold; 1 for a block of zeros."""
    wanted = torch.where(scales > 0, scales, torch.ones_like(scales))
    return torch.exp2(torch.ceil(torch.log2(wanted)).clamp(-BIAS, BIAS))


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    return (torch.log2(scales).round() + BIAS).to(torch.uint8)


def _scales(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - BIAS)


def _widths(role: Role) -> dict[str, int]:
    """The number of columns of each part, scales excepted. `pack` handles one fp8 part with scales and refuses other
    layouts."""
    narrow = [part for part in role.parts if part.dtype in LARGEST]
    scale = next((part for part in role.parts if part.name == "scale"), None)
    if len(narrow) != 1 or scale is None or scale.shape != (-(-narrow[0].shape[0] // SCALE_BLOCK),):
        layout = ", ".join(f"{part.name} {part.shape} {part.dtype}" for part in role.parts) or "not packed"
        raise BadRows(f"role {role.name!r} ({layout}) has a layout of its own: write its bytes with write_rows")
    return {part.name: part.shape[0] for part in role.parts if part is not scale}

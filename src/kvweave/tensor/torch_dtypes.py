"""Our element types in torch's words."""

from __future__ import annotations

import torch

from kvweave.spec import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's type of that name; bytes where torch has none, or where elements are narrower than a byte."""
    known = getattr(torch, str(dtype), torch.uint8)
    return known if dtype.bits >= 8 else torch.uint8


def whole_bytes(dtype: torch.dtype) -> torch.dtype:
    """The integers as wide as `dtype`: what rows are moved as, since torch indexes every integer type, exactly."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def flat_bytes(rows: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in a row, copied where they do not lie so."""
    return rows.contiguous().reshape(-1).view(torch.uint8)


def shaped(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as elements: the other way round."""
    return flat.contiguous().reshape(-1).view(dtype).view(shape)

"""Element types of specs as torch dtypes."""

from __future__ import annotations

import torch

from kvweave.spec import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of that name; uint8 where torch has none, or where elements are narrower than a byte."""
    known = getattr(torch, str(dtype), torch.uint8)
    return known if dtype.bits >= 8 else torch.uint8


def whole_bytes(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype as wide as `dtype`: rows are moved as integers, since torch indexes those on every device, bit
    for bit."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def flat_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, contiguous; copied if they were not."""
    return rows.contiguous().reshape(-1).view(torch.uint8)


def shaped(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as elements: the inverse of `flat_bytes`."""
    return flat.contiguous().reshape(-1).view(dtype).view(shape)

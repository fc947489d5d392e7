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

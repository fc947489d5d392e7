"""How the Triton kernels are cut, by what was measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is cut: rows and tokens of a tile, warps, tiles of context under way."""

    rows: int
    tokens: int
    warps: int
    stages: int

    def smaller(self) -> Tile:
        """For rows so wide that this one does not fit the memory on the chip; of as many rows."""
        return replace(self, stages=self.stages - 1) if self.stages > 1 else replace(self, tokens=self.tokens // 2)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles for decodes and for chunks; `waves`: decodes are split into this many programs for each multiprocessor."""

    decode: Tile
    chunk: Tile
    waves: float = 4


FEW = 16
"""Sequences times KV heads that are few: their programs read little each, and wait for memory."""


def tuning_of(width: int, item_bytes: int, group: int, programs: int, dtype: torch.dtype) -> Tuning:
    """For rows of `width` columns (key or value) of `item_bytes`, `group` query heads to a KV head, and `programs` that
    a step of decodes has before it is split. By what was measured on an H200."""
    if dtype == torch.float32:
        return Tuning(Tile(16, 32, 4, 2), Tile(32, 32, 4, 1))
    if width > 256:
        decode = Tile(64, 64, 8, 2) if group > 32 else Tile(32, 128, 8, 1) if group > 16 else Tile(16, 32, 4, 2)
        return Tuning(decode, Tile(64, 64, 8, 2), waves=1)
    if width > 128:
        few = programs <= FEW
        return Tuning(Tile(16, 32, 4, 2) if few else Tile(16, 64, 4, 3), Tile(128, 64, 8, 2), waves=3 if few else 2)
    if item_bytes == 1:
        return Tuning(Tile(16, 128, 4, 2), Tile(128, 32, 4, 2), waves=2)
    return Tuning(Tile(16, 64, 4, 2), Tile(128, 32, 4, 2))

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
    """Tiles for decodes and for chunks; `waves`: decodes are split until so many programs come to a multiprocessor."""

    decode: Tile
    chunk: Tile
    waves: float = 4


def tuning_of(key_dim: int, value_dim: int, rows: int, dtype: torch.dtype) -> Tuning:
    """By what was measured on an H200; `rows`: query heads that share a KV head."""
    if dtype == torch.float32:
        return Tuning(Tile(16, 32, 4, 2), Tile(32, 32, 4, 1))
    widest = max(key_dim, value_dim)
    if widest > 256:
        return Tuning(Tile(64, 64, 8, 2) if rows > 16 else Tile(16, 32, 4, 2), Tile(64, 64, 8, 2), waves=1)
    if widest > 128:
        return Tuning(Tile(16, 64, 4, 3), Tile(128, 64, 8, 2), waves=2)
    return Tuning(Tile(16, 64, 4, 2), Tile(128, 32, 4, 2))

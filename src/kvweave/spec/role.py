"""Roles: the tensors that a layer keeps, down to the byte.

A role's rows in one kernel block of 4 tokens, tokens_per_row = 1, parts a (values) and b (scales):

    rows in a row    planar = False    a0 b0 a1 b1 a2 b2 a3 b3
    plane by plane   planar = True     a0 a1 a2 a3 b0 b1 b2 b3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvweave.errors import SpecError
from kvweave.spec.dtypes import DType

PRIORITY = (
    "key",
    "value",
    "key_scale",
    "value_scale",
    "latent",
    "rope",
    "compressed",
    "indexer",
    "conv_state",
    "ssm_state",
)
"""The order of roles within a layer is a contract: these first, then any other by name."""


def role_order(name: str) -> tuple[int, str]:
    return (PRIORITY.index(name) if name in PRIORITY else len(PRIORITY), name)


def align_up(num_bytes: int, align: int) -> int:
    return -(-num_bytes // align) * align


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a packed row: `shape` elements of `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_bytes(self) -> int:
        return _whole_bytes(self.shape, self.dtype, f"part {self.name!r}")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run along a row's first axis: `units` heads (groups, channels) of `width` entries, divided among ranks."""

    units: int
    width: int = 1

    def shard(self, ranks: int) -> Segment:
        """Units that do not divide are replicated: 8 heads on 16 ranks are 1 head each, 12 on 8 ranks 3 each."""
        return replace(self, units=self.units // math.gcd(self.units, ranks))


@dataclass(frozen=True, slots=True)
class Role:
    """One tensor that a layer keeps: its rows, and how they lie in a page.

    `shape` and `dtype` describe one row: of one token, of `tokens_per_row` tokens, or of one snapshot (states).
    A packed row (quantised values beside their scales) lists its `parts`, and is bytes to everyone else; `planar`
    puts each part in a plane of its own within the kernel block. `token_axis` is where the axis of rows goes among
    the row's own: 0 for `[rows, heads, dim]`, 1 for `[heads, rows, dim]`. `align` is the multiple of bytes at which
    the role starts and ends in a kernel block. `alias_of` names the role whose storage this one shares. `split`
    describes the first axis for tensor parallelism; without it every rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    tokens_per_row: int = 1
    token_axis: int = 0
    parts: tuple[Part, ...] = ()
    planar: bool = False
    align: int = 1
    alias_of: str | None = None
    split: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        if not self.name:
            raise SpecError("a role needs a name")
        where = f"role {self.name!r}"
        if not self.shape or any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise SpecError(f"{where}: shape must be whole numbers, got {self.shape}")
        for field in ("tokens_per_row", "align"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise SpecError(f"{where}: {field} must be a whole number of at least 1, got {getattr(self, field)!r}")
        if not isinstance(self.token_axis, int) or not 0 <= self.token_axis <= len(self.shape):
            raise SpecError(f"{where}: token_axis {self.token_axis} is outside the row's {len(self.shape)} axes")
        if self.parts:
            self._check_parts(where)
        elif self.planar:
            raise SpecError(f"{where}: planar needs parts to put in planes")
        if self.split and sum(s.units * s.width for s in self.split) != self.shape[0]:
            sizes = " + ".join(f"{s.units} x {s.width}" for s in self.split)
            raise SpecError(f"{where}: split covers {sizes} entries of the first axis, which has {self.shape[0]}")
        _whole_bytes(self.shape, self.dtype, where)
        if self.dtype.bits < 8:
            _whole_bytes(self.shape[-1:], self.dtype, f"{where}: last axis")

    def _check_parts(self, where: str) -> None:
        total = sum(part.num_bytes for part in self.parts)
        if (self.shape, self.dtype) != ((total,), DType.UINT8):
            raise SpecError(f"{where}: parts hold {total} bytes, but the row is {self.shape} of {self.dtype}")
        if self.split or self.token_axis:
            raise SpecError(f"{where}: packed rows are whole: no split, token_axis 0")

    @classmethod
    def packed(
        cls, name: str, parts: Sequence[Part], *, planar: bool = False, align: int = 1, tokens_per_row: int = 1
    ) -> Role:
        """A row of several fields, e.g. 512 fp8 values, 4 float32 scales and 64 bfloat16 (656 bytes)."""
        shape = (sum(part.num_bytes for part in parts),)
        return cls(name, shape, DType.UINT8, tokens_per_row, parts=tuple(parts), planar=planar, align=align)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; an alias stores none of its own."""
        return 0 if self.alias_of else _whole_bytes(self.shape, self.dtype, f"role {self.name!r}")

    @property
    def start_align(self) -> int:
        """Where the role may start in a kernel block: on its elements, and on its declared alignment."""
        elements = [self.dtype, *(part.dtype for part in self.parts)]
        return math.lcm(self.align, *(dtype.align_bytes for dtype in elements))

    def block_bytes(self, num_rows: int) -> int:
        """Bytes of `num_rows` rows in one kernel block."""
        return align_up(self.row_bytes * num_rows, self.align)

    def shard(self, ranks: int) -> Role:
        """What one of `ranks` tensor-parallel ranks keeps of this role."""
        if not self.split:
            return self
        split = tuple(segment.shard(ranks) for segment in self.split)
        return replace(self, split=split, shape=(sum(s.units * s.width for s in split), *self.shape[1:]))


def _whole_bytes(shape: tuple[int, ...], dtype: DType, where: str) -> int:
    bits = math.prod(shape) * dtype.bits
    if bits % 8:
        raise SpecError(f"{where}: {math.prod(shape)} elements of {dtype} are {bits} bits, not whole bytes")
    return bits // 8

"""Attention on a CPU, in C: pages are read where they lie, decodes by dot products, chunks by matrix products."""

from __future__ import annotations

import struct
from typing import ClassVar

import torch

from kvweave.attention.base import Attention
from kvweave.attention.kv_planes import KVPlane, paged_kv
from kvweave.attention.options import AttentionOptions
from kvweave.attention.step import Step
from kvweave.errors import BadRows, NoKernel
from kvweave.spec.layer_caches import SCALE_BLOCK
from kvweave.tensor import LayerView

try:
    from kvweave.attention import _native
except ImportError:  # no C compiler was there: the reference stands in
    _native = None  # type: ignore[assignment]

IS_NATIVE = _native is not None
DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
"""As native.c counts them; queries are one of the first three."""
MAX_DIM = 1024


class CPUAttention(Attention):
    """Pages in the memory of the host; float32, float16 and bfloat16 queries, computed in float32."""

    name: ClassVar[str] = "cpu"

    def __init__(self, view: LayerView, options: AttentionOptions) -> None:
        super().__init__(view, options)
        if not IS_NATIVE:
            raise NoKernel("a layer on the CPU", "the part in C was not built; backend 'reference' needs none")
        if self.device.type != "cpu":
            raise NoKernel("a layer on a device", f"its pages are on {self.device}, not in the host's memory")
        self.kv = paged_kv(view, options.value_dim)
        if max(self.key_dim, self.value_dim) > MAX_DIM:
            raise NoKernel(f"a layer with rows of {self.key_dim} numbers", f"{MAX_DIM} are the most")
        self._sinks = None if options.sink_logits is None else options.sink_logits.float().contiguous()
        self._record = self._packed()
        planes = [*self.kv.keys, *([self.kv.values] if self.kv.values else [])]
        self._targets = [] if any(plane.scales is not None for plane in planes) else list(map(CopyTarget, planes))

    def write(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Rows that are kept as they are go by memory copies; all others the way of every backend."""
        given = (keys,) if values is None else (keys, values)
        rows = [tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in given]
        count = slots.shape[0]
        if (
            len(rows) != len(self._targets)
            or slots.dtype != torch.int64
            or slots.device.type != "cpu"
            or not slots.is_contiguous()
            or not all(target.fits(new, count) for target, new in zip(self._targets, rows, strict=True))
        ):
            super().write(keys, values, slots)
            return
        for target, new in zip(self._targets, rows, strict=True):
            if (wrong := target.copy(new, slots.data_ptr(), count)) != -1:
                raise BadRows(f"slot {wrong} is not among the {target.num_slots} of layer {self.view.layer}")

    def _attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        if queries.dtype not in list(DTYPES)[:3] or queries.stride(2) != 1:
            queries = queries.contiguous()
            if queries.dtype not in list(DTYPES)[:3]:
                raise BadRows(f"queries of {queries.dtype}: float32, float16 and bfloat16 are computed with")
        table = step.tables[self.view.tag]
        wrong = _native.attend(
            self._record,
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            DTYPES[queries.dtype],
            out.data_ptr(),
            step.query_starts.data_ptr(),
            step.lengths.data_ptr(),
            table.data_ptr(),
            step.num_rows,
            table.shape[1],
            queries.shape[1],
            torch.get_num_threads(),
        )
        if wrong:
            raise BadRows(f"block {wrong} is not among the {self.kv.keys[0].tensor.shape[0]} of {self.view.tag!r}")

    def _packed(self) -> bytes:
        """The struct `Layer` of native.c."""
        keys, band = self.kv.keys, self.band
        first = keys[0].tensor
        numbers = first.shape[2], first.shape[0], self.kv_heads, len(keys), band.head, band.back, band.step
        planes = b"".join(map(_packed, (keys[0], keys[-1], self.kv.value_plane)))
        sinks = 0 if self._sinks is None else self._sinks.data_ptr()
        floats = self.scale, self.options.softcap or 0.0
        return struct.pack("8q2dq", *numbers, self.options.causal, *floats, sinks) + planes


class CopyTarget:
    """A plane that rows are copied into as they are; what a copy needs to know of it is looked up once."""

    __slots__ = ("block_tokens", "dtype", "itemsize", "num_slots", "shape", "sizes", "where")

    def __init__(self, kv: KVPlane) -> None:
        plane = kv.tensor
        self.dtype, self.itemsize = plane.dtype, plane.element_size()
        self.shape = plane.shape[1], plane.shape[3]
        self.where = plane.data_ptr(), *(stride * self.itemsize for stride in plane.stride()[:3])
        self.sizes = plane.shape[1], plane.shape[3] * self.itemsize
        self.block_tokens = plane.shape[2]
        self.num_slots = plane.shape[0] * plane.shape[2]

    def fits(self, rows: torch.Tensor, count: int) -> bool:
        """Whether rows are what the plane holds, so that their bytes can be copied; others are checked elsewhere."""
        return (
            rows.dtype == self.dtype
            and rows.shape == (count, *self.shape)
            and rows.device.type == "cpu"
            and (rows.stride(2) == 1 or self.shape[1] == 1)
        )

    def copy(self, rows: torch.Tensor, slots: int, count: int) -> int:
        """Returns a slot that is none, or -1."""
        source = rows.data_ptr(), rows.stride(0) * self.itemsize, rows.stride(1) * self.itemsize
        (to, block, head, token), (heads, size) = self.where, self.sizes
        counts = count, self.block_tokens, self.num_slots
        return _native.write_rows(to, block, head, token, *source, heads, size, slots, *counts)


def _packed(plane: KVPlane) -> bytes:
    """The struct `Plane`."""
    tensor, scales = plane.tensor, plane.scales
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    numbers = [tensor.data_ptr(), *strides, plane.dim, DTYPES[tensor.dtype]]
    if scales is None:
        return struct.pack("11q", *numbers, 0, 0, 0, 0, 1)
    per = plane.dim if scales.shape[3] == 1 else SCALE_BLOCK
    return struct.pack("11q", *numbers, scales.data_ptr(), *(stride * 4 for stride in scales.stride()[:3]), per)

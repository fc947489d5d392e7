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
        self._is_plain = all(plane.scales is None for plane in (*self.kv.keys, self.kv.value_plane))

    def write(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Rows that are kept as they are go by memory copies; all others the way of every backend."""
        planes = [*self.kv.keys, *([self.kv.values] if self.kv.values else [])]
        given = [keys, *([values] if values is not None else [])]
        rows = [tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in given]
        if not self._is_plain or len(rows) != len(planes) or not _fit(rows, planes, slots):
            super().write(keys, values, slots)
            return
        for plane, new in zip(planes, rows, strict=True):
            self._write(plane.tensor, new, slots)

    def _write(self, plane: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        size = plane.element_size()
        to = plane.data_ptr(), plane.stride(0) * size, plane.stride(1) * size, plane.stride(2) * size
        source = rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size
        counts = plane.shape[1], plane.shape[3] * size, slots.data_ptr(), len(slots), plane.shape[2]
        num_slots = plane.shape[0] * plane.shape[2]
        if (wrong := _native.write_rows(*to, *source, *counts, num_slots)) != -1:
            raise BadRows(f"slot {wrong} is not among the {num_slots} of layer {self.view.layer}")

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


def _packed(plane: KVPlane) -> bytes:
    """The struct `Plane`."""
    tensor, scales = plane.tensor, plane.scales
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    numbers = [tensor.data_ptr(), *strides, plane.dim, DTYPES[tensor.dtype]]
    if scales is None:
        return struct.pack("11q", *numbers, 0, 0, 0, 0, 1)
    per = plane.dim if scales.shape[3] == 1 else SCALE_BLOCK
    return struct.pack("11q", *numbers, scales.data_ptr(), *(stride * 4 for stride in scales.stride()[:3]), per)


def _fit(rows: list[torch.Tensor], planes: list[KVPlane], slots: torch.Tensor) -> bool:
    """Whether rows are what the planes hold, so that their bytes can be copied; all others are checked elsewhere."""
    if slots.dtype != torch.int64 or slots.device.type != "cpu" or not slots.is_contiguous():
        return False
    return all(
        new.dtype == plane.tensor.dtype
        and new.device.type == "cpu"
        and new.shape == (len(slots), plane.tensor.shape[1], plane.dim)
        and (new.stride(2) == 1 or plane.dim == 1)
        for new, plane in zip(rows, planes, strict=True)
    )

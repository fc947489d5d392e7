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
QUERIES = tuple(DTYPES)[:3]
MAX_DIM = 1024


Layout = tuple[object, ...]


class CPUAttention(Attention):
    """Pages in the memory of the host; float32, float16 and bfloat16 queries, computed in float32.

    Between two layers a CPU's caches are filled with weights, so that every call into torch costs a microsecond or
    more. What follows from the layout of tensors is therefore worked out only when it is not that of the last call.
    """

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
        self._tag = view.tag
        planes = [*self.kv.keys, *([self.kv.values] if self.kv.values else [])]
        self._targets = [] if any(plane.scales is not None for plane in planes) else list(map(CopyTarget, planes))
        self._key_ends = [plane.dim for plane in self.kv.keys[:-1]]
        self._row_layouts: tuple[Layout, ...] = ()
        self._copies: bytes | None = None
        """How rows of these layouts are copied: structs `CopyTarget` of native.c. None: they cannot be."""
        self._query_layout: Layout = ()
        self._query_numbers = (0, 0, 0, 0)
        """The arguments of native.c for queries of this layout."""

    # ---- rows that are kept as they are go by memory copies; all others the way of every backend

    def write(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        if keys.dim() > 3 or not self._copy(keys, values, slots):
            super().write(keys, values, slots)

    def write_batch(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        if not self._copy(keys, values, slots):
            super().write_batch(keys, values, slots)

    def _copy(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> bool:
        """Whether rows could be copied, and were."""
        given = keys.tensor_split(self._key_ends, dim=-1) if values is None else (keys, values)
        layouts = (*map(layout_of, given), layout_of(slots))
        if layouts != self._row_layouts:
            self._row_layouts, self._copies = layouts, self._packed_copies(given, slots)
        if self._copies is None:
            return False
        addresses = given[0].data_ptr(), given[-1].data_ptr(), slots.data_ptr()
        if (wrong := _native.write_rows(self._copies, *addresses, len(slots))) != -1:
            raise BadRows(f"slot {wrong} is not among the {self._targets[0].num_slots} of layer {self.view.layer}")
        return True

    def _packed_copies(self, given: tuple[torch.Tensor, ...], slots: torch.Tensor) -> bytes | None:
        rows = [by_token(tensor) for tensor in given]
        is_plain = slots.dtype == torch.int64 and slots.is_cpu and slots.is_contiguous()
        if not is_plain or len(rows) != len(self._targets):
            return None
        pairs = list(zip(self._targets, rows, strict=True))
        if not all(new is not None and target.fits(new, len(slots)) for target, new in pairs):
            return None
        return b"".join(target.packed(new) for target, new in pairs if new is not None)

    # ---- attention

    def attend_batch(self, queries: torch.Tensor, step: Step) -> torch.Tensor:
        layout = layout_of(queries)
        if layout != self._query_layout:
            rows = by_token(queries)
            if rows is None or not is_readable(rows):
                return super().attend_batch(queries, step)
            self._check(rows, step)
            self._query_layout, self._query_numbers = layout, query_numbers(rows)
        batch, heads, tokens, _ = queries.shape
        out = queries.new_empty((batch, tokens, heads, self.value_dim))
        self._call(queries, self._query_numbers, step, out)
        return out

    def _attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        if queries.dtype not in QUERIES:
            raise BadRows(f"queries of {queries.dtype}: float32, float16 and bfloat16 are computed with")
        queries = queries if is_readable(queries) else queries.contiguous()
        self._call(queries, query_numbers(queries), step, out)

    def _call(self, queries: torch.Tensor, numbers: tuple[int, int, int, int], step: Step, out: torch.Tensor) -> None:
        token, head, dtype, heads = numbers
        to = queries.data_ptr(), token, head, dtype, out.data_ptr()
        wrong = _native.attend(self._record, *to, *step.addresses(self._tag), heads, torch.get_num_threads())
        if wrong:
            raise BadRows(f"block {wrong} is not among the {self.kv.keys[0].tensor.shape[0]} of {self._tag!r}")

    def _packed(self) -> bytes:
        """The struct `Layer` of native.c."""
        keys, band = self.kv.keys, self.band
        first = keys[0].tensor
        numbers = first.shape[2], first.shape[0], self.kv_heads, len(keys), band.head, band.back, band.step
        planes = b"".join(map(_packed, (keys[0], keys[-1], self.kv.value_plane)))
        sinks = 0 if self._sinks is None else self._sinks.data_ptr()
        floats = self.scale, self.options.softcap or 0.0
        return struct.pack("8q2dq", *numbers, self.options.causal, *floats, sinks) + planes


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu


def by_token(rows: torch.Tensor) -> torch.Tensor | None:
    """Rows `[tokens, dim]`, `[tokens, heads, dim]` or `[batch, heads, tokens, dim]` as `[tokens, heads, dim]`: a view,
    if there is one."""
    if rows.dim() < 4:
        return rows if rows.dim() == 3 else rows.unsqueeze(1)
    if rows.shape[0] == 1:
        return rows[0].transpose(0, 1)
    return rows[:, :, 0] if rows.shape[2] == 1 else None


def is_readable(queries: torch.Tensor) -> bool:
    return queries.dtype in QUERIES and queries.is_cpu and queries.stride(2) == 1


def query_numbers(queries: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides of tokens and heads, the dtype, and the number of heads."""
    return queries.stride(0), queries.stride(1), DTYPES[queries.dtype], queries.shape[1]


class CopyTarget:
    """A plane that rows are copied into as they are."""

    __slots__ = ("_dtype", "_plane", "_shape", "num_slots")

    def __init__(self, kv: KVPlane) -> None:
        self._plane = kv.tensor
        self._dtype, self._shape = kv.tensor.dtype, (kv.tensor.shape[1], kv.tensor.shape[3])
        self.num_slots = kv.tensor.shape[0] * kv.tensor.shape[2]

    def fits(self, rows: torch.Tensor, count: int) -> bool:
        """Whether rows are what the plane holds, so that their bytes can be copied; others are checked elsewhere."""
        return (
            rows.dtype == self._dtype
            and rows.shape == (count, *self._shape)
            and rows.is_cpu
            and (rows.stride(2) == 1 or self._shape[1] == 1)
        )

    def packed(self, rows: torch.Tensor) -> bytes:
        """The struct of this name in native.c, for rows of this layout."""
        plane, size = self._plane, self._plane.element_size()
        strides = [stride * size for stride in (*plane.stride()[:3], *rows.stride()[:2])]
        heads, width = self._shape
        return struct.pack("10q", plane.data_ptr(), *strides, heads, width * size, plane.shape[2], self.num_slots)


def _packed(plane: KVPlane) -> bytes:
    """The struct `Plane`."""
    tensor, scales = plane.tensor, plane.scales
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    numbers = [tensor.data_ptr(), *strides, plane.dim, DTYPES[tensor.dtype]]
    if scales is None:
        return struct.pack("11q", *numbers, 0, 0, 0, 0, 1)
    per = plane.dim if scales.shape[3] == 1 else SCALE_BLOCK
    return struct.pack("11q", *numbers, scales.data_ptr(), *(stride * 4 for stride in scales.stride()[:3]), per)

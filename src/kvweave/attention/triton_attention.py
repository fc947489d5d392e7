"""Attention on a GPU by our Triton kernels: pages are read where they lie, and nothing waits for the device."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

from kvweave.attention.base import Attention
from kvweave.attention.kv_planes import KVPlane, paged_kv, rows_by_role
from kvweave.attention.options import AttentionOptions
from kvweave.attention.step import Step
from kvweave.attention.tuning import Tile, Tuning, tuning_of
from kvweave.errors import BadRows, MissingExtra, NoKernel
from kvweave.spec.layer_caches import SCALE_BLOCK
from kvweave.tensor import LayerView
from kvweave.tensor.quant import LARGEST

try:
    import triton

    from kvweave.attention import attend_kernel, write_kernel
except ImportError as error:
    raise MissingExtra("attention by Triton kernels", "torch", error.name) from error

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DECODE_ROWS = 16
"""The least rows that a tensor core multiplies: sequences whose queries and heads fit into them are decodes."""

CHUNK_WAVES = 2
"""Programs of chunks to a multiprocessor until which their context is split: a short question after a long prompt."""

MERGED = 4096
"""Numbers that a program merges: splits times columns."""


class TritonAttention(Attention):
    """Pages on a GPU; queries in float32, float16 or bfloat16."""

    name: ClassVar[str] = "triton"

    def __init__(self, view: LayerView, options: AttentionOptions, tuning: Tuning | None = None) -> None:
        super().__init__(view, options)
        if self.device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise NoKernel("a layer on the CPU", f"its pages are on {self.device}; Triton compiles for GPUs")
        self.kv = paged_kv(view, options.value_dim)
        self.tuning = tuning
        self._fitting: dict[Tile, Tile] = {}
        key, rest, value = self._planes()
        self._pointers = (key.tensor, rest.tensor, value.tensor, _scales(key), _scales(value))
        self._strides = (
            *_strides(key),
            *_strides(rest),
            *_strides(value),
            *_scale_strides(key),
            *_scale_strides(value),
        )
        self._constants = self._made_constants(key, rest, value)

    def _planes(self) -> tuple[KVPlane, KVPlane, KVPlane]:
        """Keys as a power of two of columns and the rest of them, where that saves padding (576 = 512 + 64); values."""
        first, *more = self.kv.keys
        split = 1 << (first.dim.bit_length() - 1)
        rest = first.dim - split
        is_free = self.kv.values is not None or self.kv.value_dim == split
        if not more and first.scales is None and is_free and rest >= 16 and rest & (rest - 1) == 0:
            return KVPlane(first.tensor[..., :split]), KVPlane(first.tensor[..., split:]), self.kv.value_plane
        return first, more[0] if more else KVPlane(first.tensor[..., :0]), self.kv.value_plane

    def _made_constants(self, key: KVPlane, rest: KVPlane, value: KVPlane) -> dict[str, Any]:
        return {
            "TOKENS": self.view.kernel_tokens,
            "KEY_DIM": key.dim,
            "KEY_PAD": _padded(key.dim),
            "REST_DIM": rest.dim,
            "REST_PAD": _padded(rest.dim),
            "VALUE_DIM": value.dim,
            "VALUE_PAD": _padded(value.dim),
            "SHARED": self.kv.values is None and value.dim == key.dim,
            "KEY_SCALES": _num_scales(key),
            "VALUE_SCALES": _num_scales(value),
            "PER_SCALE": SCALE_BLOCK,
            "HEAD": self.band.head,
            "BACK": self.band.back,
            "STEP": self.band.step,
            "CAUSAL": self.options.causal,
            "SOFTCAP": bool(self.options.softcap),
            "SINKS": self.options.sink_logits is not None,
        }

    # ---- attention

    def _attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        if queries.dtype not in FLOATS:
            raise BadRows(f"queries of {queries.dtype}: float32, float16 and bfloat16 are computed with")
        if queries.stride(2) != 1:
            queries = queries.contiguous()
        group = queries.shape[1] // self.kv_heads
        tuning = self.tuning or self._tuning(group, step.num_rows, queries.dtype)
        decode_queries = max(1, DECODE_ROWS // group)
        if step.max_queries > decode_queries:  # before decodes: where chunks are split, all tokens are merged
            self._chunks(queries, step, out, tuning, decode_queries)
        self._decode(queries, step, out, tuning, decode_queries)

    def _tuning(self, group: int, num_rows: int, dtype: torch.dtype) -> Tuning:
        item_bytes = self.kv.keys[0].tensor.element_size()
        return tuning_of(max(self.key_dim, self.value_dim), item_bytes, group, num_rows * self.kv_heads, dtype)

    def _decode(
        self, queries: torch.Tensor, step: Step, out: torch.Tensor, tuning: Tuning, decode_queries: int
    ) -> None:
        heads = queries.shape[1]
        tile = tuning.decode
        tiles = -(-decode_queries * (heads // self.kv_heads) // tile.rows)
        programs = step.num_rows * tiles * self.kv_heads
        splits = self._splits(programs, step, tile, tuning.waves)
        sums, stats = self._split_sums(out, splits, step.num_rows * decode_queries, heads)
        grid = step.num_rows * tiles, self.kv_heads, splits
        self._launch(tile, grid, queries, step, out, sums, stats, decode_queries, True)
        self._merge(sums, stats, out, step, splits, decode_queries)

    def _chunks(
        self, queries: torch.Tensor, step: Step, out: torch.Tensor, tuning: Tuning, decode_queries: int
    ) -> None:
        tokens, heads, _ = queries.shape
        tile = tuning.chunk
        tiles = tokens * (heads // self.kv_heads) // tile.rows + step.num_rows
        splits = self._splits(tiles * self.kv_heads, step, tile, CHUNK_WAVES)
        sums, stats = self._split_sums(out, splits, tokens, heads)
        grid = tiles, self.kv_heads, splits
        self._launch(tile, grid, queries, step, out, sums, stats, decode_queries, False)
        self._merge(sums, stats, out, step, splits, 0)

    def _split_sums(
        self, out: torch.Tensor, splits: int, num_queries: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where splits leave their weighted sums, and their largest scores and totals."""
        if splits == 1:
            return out, out
        shape = splits, num_queries, heads
        sums = torch.empty((*shape, self._constants["VALUE_PAD"]), dtype=torch.float32, device=out.device)
        return sums, torch.empty((*shape, 2), dtype=torch.float32, device=out.device)

    def _merge(
        self,
        sums: torch.Tensor,
        stats: torch.Tensor,
        out: torch.Tensor,
        step: Step,
        splits: int,
        decode_queries: int,
    ) -> None:
        if splits == 1:
            return
        _, num_queries, heads, pad = sums.shape
        most = triton.next_power_of_2(splits)
        columns = max(16, min(pad, MERGED // most))
        attend_kernel.merge[(num_queries, heads, pad // columns)](
            sums,
            stats,
            out,
            step.query_starts,
            self._sinks(out),
            splits,
            HEADS=heads,
            VALUE_DIM=self.value_dim,
            VALUE_PAD=pad,
            SPLITS=most,
            COLUMNS=columns,
            SINKS=self._constants["SINKS"],
            DECODE_QUERIES=decode_queries,
            num_warps=4,
        )

    def _splits(self, programs: int, step: Step, tile: Tile, waves: float) -> int:
        """As many as fill the device, by what the table could hold: the host does not know how long rows are."""
        span = (self.options.reach or self.view.reach).span
        longest = step.tables[self.view.tag].shape[1] * self.view.kernel_tokens
        reach = longest if span is None else min(longest, span + tile.tokens)
        wanted = int(waves * _multiprocessors(self.device) / programs)
        most: int = -(-reach // (2 * tile.tokens))
        return max(1, min(wanted, most, 128))

    def _sinks(self, other: torch.Tensor) -> torch.Tensor:
        return other if self.options.sink_logits is None else self.options.sink_logits

    def _launch(self, tile: Tile, *what: Any) -> None:
        """Launch with the largest tile that fits, which is found at the first launch."""
        while True:
            fitting = self._fitting.get(tile, tile)
            try:
                self._launch_tile(fitting, *what)
                return
            except triton.runtime.errors.OutOfResources:
                if fitting.tokens <= 16:
                    raise
                self._fitting[tile] = fitting.smaller()

    def _launch_tile(
        self,
        tile: Tile,
        grid: tuple[int, int, int],
        queries: torch.Tensor,
        step: Step,
        out: torch.Tensor,
        sums: torch.Tensor,
        stats: torch.Tensor,
        decode_queries: int,
        is_decode: bool,
    ) -> None:
        table = step.tables[self.view.tag]
        attend_kernel.attend[grid](
            queries,
            out,
            sums,
            stats,
            table,
            step.query_starts,
            step.lengths,
            self._sinks(out),
            *self._pointers,
            queries.stride(0),
            queries.stride(1),
            table.shape[1],
            step.num_rows,
            len(queries),
            *self._strides,
            self.scale,
            self.options.softcap or 1.0,
            GROUP=queries.shape[1] // self.kv_heads,
            HEADS=queries.shape[1],
            DECODE_QUERIES=decode_queries,
            IS_DECODE=is_decode,
            IS_SPLIT=grid[2] > 1,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.tokens,
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
            **self._constants,
        )

    # ---- new rows

    def write(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        planes, rows = self._new_rows(keys, values)
        if not len(slots):
            return
        first, *more = zip(planes, rows, strict=True)
        second = more[0] if more else first
        write_kernel.write[(len(slots), self.kv_heads)](
            slots,
            *_write_pointers(*first),
            *_write_pointers(*second),
            *_write_strides(*first),
            *_write_strides(*second),
            self.view.kernel_tokens,
            *_write_sizes(first[0]),
            *(_write_sizes(second[0]) if more else (0, 1, 1, 0.0)),
            first[0].tensor.dtype == torch.int8,
            num_warps=1,
        )

    def _new_rows(self, keys: torch.Tensor, values: torch.Tensor | None) -> tuple[list[KVPlane], list[torch.Tensor]]:
        """Planes and their new rows `[tokens, heads, dim]`."""
        rows_by_role(self.view, keys, values)
        keys = keys if keys.dim() == 3 else keys.unsqueeze(1)
        planes = [*self.kv.keys, *([self.kv.values] if self.kv.values is not None else [])]
        rows = [*keys.split([plane.dim for plane in self.kv.keys], dim=-1), *([values] if values is not None else [])]
        shapes = [(len(keys), self.kv_heads, plane.dim) for plane in planes]
        if [tuple(new.shape) for new in rows] != shapes:
            raise BadRows(f"layer {self.view.layer} takes rows {shapes}, not {[list(new.shape) for new in rows]}")
        return planes, [new if new.stride(-1) == 1 else new.contiguous() for new in rows]


def _strides(plane: KVPlane) -> tuple[int, ...]:
    return tuple(plane.tensor.stride()[:3])


def _scales(plane: KVPlane) -> torch.Tensor:
    return plane.tensor if plane.scales is None else plane.scales


def _scale_strides(plane: KVPlane) -> tuple[int, ...]:
    return (0, 0, 0) if plane.scales is None else tuple(plane.scales.stride()[:3])


def _num_scales(plane: KVPlane) -> int:
    return 0 if plane.scales is None else int(plane.scales.shape[3])


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _write_pointers(plane: KVPlane, rows: torch.Tensor) -> tuple[Any, ...]:
    return rows, plane.tensor, plane.scales


def _write_strides(plane: KVPlane, rows: torch.Tensor) -> tuple[int, ...]:
    return *rows.stride()[:2], *_strides(plane), *_scale_strides(plane)


def _write_sizes(plane: KVPlane) -> tuple[int, int, int, float]:
    """Columns, scale blocks, columns of each, and the largest number of the type if it is narrow."""
    largest = {str(dtype): value for dtype, value in LARGEST.items()}.get(
        str(plane.tensor.dtype).partition(".")[2], 0.0
    )
    if _num_scales(plane) > 1:
        return plane.dim, triton.next_power_of_2(_num_scales(plane)), SCALE_BLOCK, largest
    return plane.dim, 1, _padded(plane.dim), largest


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4

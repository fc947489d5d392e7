"""Attention on a GPU by FlashInfer's kernels, which read our pages where they lie, whatever their strides.

FlashInfer plans each step on the host: the first layer of a step waits for the device, reads tables and lengths, and
plans; the layers after it that attend alike run by the same plan. A plan holds for the numbers it was made of, so that
these calls cannot be captured: this backend is asked for by name, and `auto` does not take it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.attention.base import Attention
from kvweave.attention.kv_planes import paged_kv
from kvweave.attention.options import FAR, AttentionOptions
from kvweave.attention.step import Step
from kvweave.errors import BadRows, MissingExtra, NoKernel
from kvweave.pool import NULL
from kvweave.tensor import LayerView

Ints = NDArray[np.int32]
DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = (64, 128, 256)
"""Heads that FlashInfer is tested with."""
WORKSPACE_BYTES = 256 << 20
"""Where FlashInfer keeps the sums of a split context, once for each stream."""


class FlashInferAttention(Attention):
    """Keys and values in float16 or bfloat16, with queries of the same type: full attention and windows.

    Waits for the device once a step. Of what no query sees, whole pages are left unread; the tokens of a page that
    begins before a window are multiplied by zero: NaN among them would show.
    """

    name: ClassVar[str] = "flashinfer"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    prompt_kernels: ClassVar[str] = "auto"
    """What FlashInfer is asked for where rows have several queries, with full attention: FA3 where the GPU has it."""

    def __init__(self, view: LayerView, options: AttentionOptions) -> None:
        super().__init__(view, options)
        with MissingExtra.on_import("attention by FlashInfer", "flashinfer"):
            self._wrapper_class = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self.kv = paged_kv(view, options.value_dim)
        if reason := self._why_not():
            raise NoKernel(f"layer {view.layer} under tag {view.tag!r}", reason)
        self._pages = self.kv.keys[0].tensor.transpose(1, 2), self.kv.value_plane.tensor.transpose(1, 2)
        self._window = -1 if self.band.back >= FAR - 1 else self.band.back

    def _why_not(self) -> str | None:
        first = self.kv.keys[0]
        if self.device.type not in self.devices:
            return f"its pages are on {self.device}; FlashInfer computes on GPUs"
        if self.kv.values is None or len(self.kv.keys) > 1:
            return "FlashInfer's kernels for latents are not used here"
        if first.tensor.dtype not in DTYPES or first.scales is not None:
            return f"pages of {first.tensor.dtype}: FlashInfer is given float16 and bfloat16"
        if self.key_dim != self.value_dim or self.key_dim not in WIDTHS:
            return f"keys of {self.key_dim} and values of {self.value_dim} numbers: FlashInfer takes 64, 128 or 256"
        if self.band.head or self.band.step != 1:
            return "FlashInfer knows windows, but neither chunks nor first tokens that stay"
        if self.options.sink_logits is not None:
            return "FlashInfer's plain kernels take no sink logits"
        return None

    def _attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        if queries.dtype != self._pages[0].dtype:
            raise BadRows(f"queries of {queries.dtype} over pages of {self._pages[0].dtype}: FlashInfer takes one type")
        if queries.stride(2) != 1:
            queries = queries.contiguous()
        with _lock:
            plan = self.plan(queries, step)
            plan.wrapper.run(queries, self._pages, out=out)
        for first, last in plan.padding:
            out[first:last] = 0

    def plan(self, queries: torch.Tensor, step: Step) -> PlannedWrapper:
        """The step's plan, made now or by a layer before. Waits for the device if it is made now."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NoKernel("a step that is captured", "FlashInfer plans on the host; backend 'triton' can be captured")
        numbers = step.query_starts, step.lengths, step.tables[self.view.tag]
        plan = self._plan_of(queries.shape[1], is_decode=step.max_queries == 1)
        if not plan.is_of(numbers):
            plan.make(numbers, self._pages_of(*(tensor.cpu().numpy() for tensor in numbers)))
        return plan

    def _plan_of(self, heads: int, is_decode: bool) -> PlannedWrapper:
        """Of layers that attend alike, on one stream. FA2 alone splits the context of decodes; windows and softcap were
        tried with no other."""
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        keys, values = self._pages
        shape = heads, self.kv_heads, self.key_dim, self.view.kernel_tokens
        how: dict[str, Any] = {
            "causal": self.options.causal,
            "sm_scale": self.scale,
            "window_left": self._window,
            "logits_soft_cap": self.options.softcap or 0.0,
            "q_data_type": keys.dtype,
        }
        is_plain = self.options.causal and not self.options.softcap and self._window < 0
        can_choose = is_plain and not is_decode and keys.stride() == values.stride()
        backend = self.prompt_kernels if can_choose else "fa2"
        key = self._wrapper_class, self.device, stream, backend, shape, *how.values()
        if key not in _plans:
            place = self.device, stream
            if place not in _workspaces:
                _workspaces[place] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            _plans[key] = PlannedWrapper(self._wrapper_class(_workspaces[place], "NHD", backend=backend), shape, how)
        return _plans[key]

    def _pages_of(self, starts: Ints, lengths: Ints, table: Ints) -> PageLists:
        return page_lists(starts, lengths, table, self.view.kernel_tokens, self._window)


class PageLists(NamedTuple):
    """Pages of a step's rows, one row after the other: `pages[page_starts[r] : page_starts[r + 1]]` are row r's.

    Rows of padding have as many tokens as queries, all of the NULL page; `padding` are the ranges of their queries,
    whose outputs are cleared.
    """

    query_starts: Ints
    page_starts: Ints
    pages: Ints
    last_tokens: Ints
    padding: list[tuple[int, int]]


def page_lists(starts: Ints, lengths: Ints, table: Ints, tokens: int, window: int) -> PageLists:
    """Of pages with `tokens` tokens, from the first that any query of a row sees. With a window, a query sees that many
    tokens before it; -1 is no window."""
    rows: list[Ints] = []
    for row, length in enumerate(lengths.tolist()):
        count = int(starts[row + 1] - starts[row])
        first = max(0, length - count - window) // tokens if window >= 0 else 0
        last = -(-(length or count) // tokens)
        pages = table[row, first:last] if length else np.full(last, NULL, np.int32)
        if length and not pages.all():
            block = first + int(np.flatnonzero(pages == NULL)[0])
            raise NoKernel(f"row {row}", f"its block {block} is NULL, and seen; backend 'triton' leaves it out")
        rows.append(pages)
    shown = np.where(lengths > 0, lengths, np.diff(starts))
    counts = np.cumsum([0, *map(len, rows)])
    padding = [(int(starts[row]), int(starts[row + 1])) for row in np.flatnonzero(lengths == 0)]
    pages = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    return PageLists(starts, counts.astype(np.int32), pages, ((shown - 1) % tokens + 1).astype(np.int32), padding)


@dataclass(slots=True, eq=False)
class PlannedWrapper:
    """A wrapper of FlashInfer, and the numbers that it was last planned for."""

    wrapper: Any
    shape: tuple[int, ...]
    how: dict[str, Any]
    padding: list[tuple[int, int]] = field(default_factory=list)
    _made_of: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """With their versions: tensors that were written to since are others. Tensors made in inference mode have none."""

    def is_of(self, numbers: tuple[torch.Tensor, ...]) -> bool:
        pairs = zip(numbers, self._made_of, strict=False)
        return bool(self._made_of) and all(tensor is known and tensor._version == at for tensor, (known, at) in pairs)

    def make(self, numbers: tuple[torch.Tensor, ...], lists: PageLists) -> None:
        self._made_of = []
        self.wrapper.plan(*map(torch.from_numpy, lists[:4]), *self.shape, **self.how)
        self.padding = lists.padding
        if not any(tensor.is_inference() for tensor in numbers):
            self._made_of = [(tensor, tensor._version) for tensor in numbers]


_plans: dict[tuple[Any, ...], PlannedWrapper] = {}
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}
_lock = threading.Lock()
"""Of both: a plan is made and run by one thread at a time."""

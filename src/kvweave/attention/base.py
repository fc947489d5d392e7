"""The seam: attention of one layer, whichever kernels carry it out."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvweave.attention.kv_planes import check_layer, key_roles, row_width, rows_by_role, value_width
from kvweave.attention.options import AttentionOptions, Band
from kvweave.attention.step import Step
from kvweave.errors import BadRows, UnknownName
from kvweave.tensor import LayerView, write_tokens


class Attention:
    """Attention of one layer over its pages in place. Made once a layer; a constructor that cannot raises `NoKernel`.

    A query at position p sees the tokens of its row that `options.reach` says, up to itself. Tokens in a NULL block are
    seen by no query, and bytes of tokens that no query of a row sees never influence its output. A query that sees
    nothing gives zeros. Nothing waits for a device (the reference and FlashInfer apart), so on a GPU the calls can be
    captured.
    """

    name: ClassVar[str]

    def __init__(self, view: LayerView, options: AttentionOptions) -> None:
        check_layer(view)
        self.view, self.options = view, options
        self.band = Band.of(options.reach or view.reach)
        roles = [view.role(name).role for name in key_roles(view)]
        self.device = view.role(roles[0].name).tensor.device
        self.kv_heads = roles[0].shape[0] if len(roles[0].shape) == 2 else 1
        self.key_dim = sum(map(row_width, roles))
        self.value_dim = value_width(view, options.value_dim)
        self.scale = self.key_dim**-0.5 if options.scale is None else options.scale

    def write(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Write new rows, keys `[tokens, kv heads, key dim]` and values likewise, at their slots; slots of -1 are
        skipped. Rows are cast, or quantised with their scales, as the layer keeps them. Layers whose value is part of
        the key take `values` None."""
        write_tokens(self.view, slots, rows_by_role(self.view, keys, values))

    def write_batch(self, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        """`write` of rows `[batch, heads, tokens, dim]`, as models give them; slots row by row."""
        self.write(packed(keys), None if values is None else packed(values), slots)

    def attend_batch(self, queries: torch.Tensor, step: Step) -> torch.Tensor:
        """The outputs `[batch, tokens, heads, dim]` of queries `[batch, heads, tokens, dim]`: `attend`."""
        out = self.attend(packed(queries), step)
        return out.view(queries.shape[0], queries.shape[2], *out.shape[1:])

    def attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs `[tokens, heads, value dim]` of queries `[tokens, heads, key dim]`, packed as `step` says.

        The rows of the step's own tokens must have been written.
        """
        self._check(queries, step)
        shape = (*queries.shape[:2], self.value_dim)
        if out is None:
            out = queries.new_empty(shape)
        elif out.shape != shape or out.dtype != queries.dtype or not out.is_contiguous():
            raise BadRows(f"out is {list(out.shape)} of {out.dtype}, not contiguous {list(shape)} of {queries.dtype}")
        if queries.numel():
            self._attend(queries, step, out)
        return out

    def _check(self, queries: torch.Tensor, step: Step) -> None:
        if self.view.tag not in step.tables:
            raise UnknownName("tag of the step", self.view.tag, step.tables)
        if queries.dim() != 3 or queries.shape[2] != self.key_dim or queries.shape[1] % self.kv_heads:
            raise BadRows(f"queries {list(queries.shape)} for keys of {self.kv_heads} heads of {self.key_dim} numbers")
        sinks = self.options.sink_logits
        if sinks is not None and sinks.shape != queries.shape[1:2]:
            raise BadRows(f"{list(sinks.shape)} sink logits for {queries.shape[1]} heads")

    def _attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        raise NotImplementedError


def packed(rows: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` as `[batch * tokens, heads, dim]`; a view for one row, or one token a row."""
    return rows.transpose(1, 2).flatten(0, 1)

"""The reference: rows gathered by the table, one softmax in float64. Reads everything, and is the oracle for others."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvweave.attention.base import Attention
from kvweave.attention.kv_planes import keeps_values, key_roles
from kvweave.attention.step import Step
from kvweave.pool import NULL
from kvweave.tensor.tokens import read_tokens


class ReferenceAttention(Attention):
    """Every layer with keys or latents, on any device; waits for the device."""

    name: ClassVar[str] = "reference"
    dtype: ClassVar[torch.dtype] = torch.float64

    def _attend(self, queries: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        starts, table = step.query_starts.tolist(), step.tables[self.view.tag]
        for row, length in enumerate(step.lengths.tolist()):
            mine = slice(starts[row], starts[row + 1])
            out[mine] = self._row(queries[mine], table[row], length).to(out.dtype)

    def _row(self, queries: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """Of one sequence; `[queries, heads, dim]` in and out."""
        count = len(queries)
        seen = self._seen(count, blocks, length)
        used = seen.any(0).nonzero().squeeze(1)
        keys, values = self._rows(blocks, used)
        group = queries.shape[1] // self.kv_heads
        shown = queries.to(self.dtype).view(count, self.kv_heads, group, queries.shape[-1])
        scores = torch.einsum("qhgd,thd->hgqt", shown, keys) * self.scale
        if self.options.softcap:
            scores = torch.tanh(scores / self.options.softcap) * self.options.softcap
        outputs = torch.einsum("hgqt,thd->qhgd", self._weights(scores, seen[:, used]), values)
        return outputs.reshape(count, queries.shape[1], self.value_dim)

    def _seen(self, count: int, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """`[queries, tokens]`, by the band's definition."""
        band, tokens = self.band, torch.arange(length, device=blocks.device)
        positions = torch.arange(length - count, length, device=blocks.device)[:, None]
        tails = torch.div(positions - band.back, band.step, rounding_mode="floor") * band.step
        seen = (tokens < band.head) | (tokens >= tails)
        if self.options.causal:
            seen &= tokens <= positions
        return seen & (blocks[tokens // self.view.kernel_tokens] != NULL) & (positions >= 0)

    def _rows(self, blocks: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens, `[tokens, heads, dim]`."""
        size = self.view.kernel_tokens
        slots = blocks[used // size].long() * size + used % size
        names = key_roles(self.view)
        found = read_tokens(self.view, slots, [*names, *(["value"] if keeps_values(self.view) else [])])
        shape = (len(used), self.kv_heads, -1) if len(used) else (0, self.kv_heads, self.key_dim)
        keys = torch.cat([found[name].to(self.dtype).reshape(shape) for name in names], dim=-1)
        values = found["value"].to(self.dtype) if "value" in found else keys[..., : self.value_dim]
        return keys, values

    def _weights(self, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The softmax `[kv heads, group, queries, tokens]`; zeros where nothing is seen."""
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = self.options.sink_logits
        if sinks is not None:
            logits = sinks.to(self.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, logits], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : seen.shape[1]]
        return weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)

"""Compressed attention (DeepSeek V4): a window of rows, and beyond it one row for every `rate` tokens.

Until `rate` tokens have come, the inputs of their row are stored as a chunk; where rows overlap, what the last full
chunk passes to the next is a state. The model computes rows; this layer stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvweave.integrations.transformers.layers.attention_layers import AttentionLayer
from kvweave.integrations.transformers.layers.state_layers import LayerState
from kvweave.integrations.transformers.paged_rows import PagedRows

if TYPE_CHECKING:
    from kvweave.integrations.transformers.paged_cache import PagedCache


@dataclass(frozen=True, slots=True)
class Compressor:
    """What one compressor keeps: its rows, the inputs of the next row, and the overlap with it."""

    rows: tuple[str, PagedRows]
    waiting: tuple[str, PagedRows]
    overlap: LayerState | None


class CompressedLayer(AttentionLayer):
    is_croppable = False

    def __init__(self, past: PagedCache, rate: int, compressors: Mapping[str, Compressor], **attention: Any) -> None:
        super().__init__(past, **attention)
        self.compress_rate, self._compressors = rate, compressors
        self.states = [each.overlap for each in compressors.values() if each.overlap]

    def bind(self, live: Mapping[str, list[int]], fresh: list[int], has_past: bool) -> None:  # noqa: ARG002
        for state in self.states:
            state.bind(live[state.tag], fresh)

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store inputs of the compressor; returns all inputs that make complete rows, and the column where they
        start."""
        step, rate = self.past.step, self.compress_rate
        tag, waiting = self._compressors[name].waiting
        waiting.write(step.new(tag), torch.stack([kv, gate], dim=1))
        first = step.start // rate * rate
        if first < step.start:
            kv, gate = waiting.read(step.places(tag, first, step.end)).unbind(1)
        usable = (step.end - first) // rate * rate
        return kv[:, :usable], gate[:, :usable], first

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store new rows `[batch, rows, dim]`; returns all rows."""
        step, rate = self.past.step, self.compress_rate
        tag, rows = self._compressors[name].rows
        have, will = step.start // rate, step.end // rate
        if have < will:
            rows.write(step.cells(tag, have, will, rate), compressed.unsqueeze(1) if rows.has_heads else compressed)
        if not have:
            return compressed
        found = rows.read(step.places(tag, 0, will, rate))
        return found.squeeze(1) if rows.has_heads else found

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The overlap that the last full chunk left, if there was one; replaced by that of this chunk."""
        state = self._compressors[name].overlap
        assert state, "rows of this compressor do not overlap"
        before = state.tensor.clone().unbind(1) if self.past.step.start >= self.compress_rate else (None, None)
        state.tensor[:, 0] = chunk_kv[:, -1, :, :head_dim]
        state.tensor[:, 1] = chunk_gate[:, -1, :, :head_dim]
        return before[0], before[1]

"""Attention over pages: keys and values in full, in a window, or beside an indexer's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvweave.integrations.transformers.paged_forward import LayerAttention
from kvweave.integrations.transformers.paged_rows import KVRows, PagedRows

if TYPE_CHECKING:
    from kvweave.integrations.transformers.paged_cache import PagedCache


class AttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one group, `[batch, heads, tokens, dim]`; their widths may differ (MLA).

    With a `window`, as many tokens are returned as transformers' own layer would hold. Where `attention` reads the
    pages in place, only the new ones are.
    """

    supports_early_init = False
    is_croppable = True

    def __init__(
        self,
        past: PagedCache,
        tag: str = "",
        kept: KVRows | None = None,
        window: int | None = None,
        attention: LayerAttention | None = None,
    ) -> None:
        self.past, self.tag, self.kept, self.attention = past, tag, kept, attention
        self.sliding_window = window
        self.is_sliding = window is not None
        self.is_initialized = True
        self.written: object = None
        """The step that was last written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.kept, "a layer that reads another's rows keeps none"
        step, forward = self.past.step, self.past.forward
        self.written = step
        if forward and self.attention and forward.is_in_place(self.attention):
            forward.write(self.attention, key_states, value_states)
            return key_states, value_states
        self.kept.write(step.new(self.tag), key_states, value_states)
        first = self._first(step.start)
        if first < step.start:
            keys, values = self._read(first, step.end)
            # under autocast the dtype differs from that of the pages
            key_states, value_states = keys.to(key_states.dtype), values.to(value_states.dtype)
        if forward and self.attention:
            forward.watch(self.attention, key_states, value_states)
        return key_states, value_states

    def _read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.kept, "a layer that reads another's rows keeps none"
        return self.kept.read(self.past.step.places(self.tag, first, last))

    def _first(self, length: int) -> int:
        """The first column that the token after `length` others attends to."""
        return 0 if self.sliding_window is None else max(0, length - self.sliding_window + 1)

    # ---- what is held, for models that look into a layer

    @property
    def keys(self) -> torch.Tensor:
        return self._read(self._first(self.get_seq_length()), self.get_seq_length())[0]

    @property
    def values(self) -> torch.Tensor:
        return self._read(self._first(self.get_seq_length()), self.get_seq_length())[1]

    # ---- lengths: before this layer's update those of the past, after it with the new tokens

    def get_seq_length(self) -> Any:
        return self.past.length_after(self.written)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first(self.past.columns)
        return self.past.columns - first + query_length, first

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: the pages exist."""


class IndexedLayer(AttentionLayer):
    """Attention with an indexer's keys, in a group of their own; layers that reuse another layer's selection have none.

    `positions` are those of all tokens, `[axes, batch, tokens]`; one layer may store them for all indexers.
    """

    def __init__(
        self,
        past: PagedCache,
        indexer: tuple[str, PagedRows] | None = None,
        position_ids: tuple[str, PagedRows] | None = None,
        **attention: Any,
    ) -> None:
        super().__init__(past, **attention)
        self._indexer, self._positions = indexer, position_ids

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        assert self._indexer, "a layer that shares a selection has no index keys"
        return self._append(*self._indexer, indexer_key_states)

    update_index = update_indexer

    def _append(self, tag: str, rows: PagedRows, new: torch.Tensor) -> torch.Tensor:
        step = self.past.step
        rows.write(step.new(tag), new)
        return rows.read(step.places(tag, 0, step.end)) if step.start else new

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        if self._positions is None or not self.past.columns:
            return None
        tag, rows = self._positions
        return rows.read(self.past.step.places(tag, 0, self.past.columns)).permute(2, 0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        tag, rows = self._positions or ("", None)
        if rows is not None:
            step = self.past.step
            rows.write(step.new(tag), positions[..., -step.num_tokens :].permute(1, 2, 0))

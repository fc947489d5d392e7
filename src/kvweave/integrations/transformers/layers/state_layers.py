"""Recurrent and convolution states: storage that transformers' own layer code updates in place.

For one row the layer's tensors are views of the row's live page. The pages of several rows are not evenly spaced, so a
batch gets a working tensor, which is written back before the pages are read: for a snapshot, a fork, or at the end. Or,
for models whose states are read and written by functions of ours alone, a tensor that only stands for its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvweave.attention.states import write_pages
from kvweave.integrations.transformers.layers.attention_layers import AttentionLayer
from kvweave.integrations.transformers.paged_forward import StateSlots

if TYPE_CHECKING:
    from kvweave.integrations.transformers.paged_cache import PagedCache
    from kvweave.integrations.transformers.paged_forward import PagedForward

CONV, RECURRENT = "conv_states", "recurrent_states"

PLACES = {
    "conv_state": (CONV, 0),
    "ssm_state": (RECURRENT, 0),
    "delayed_value_state": (RECURRENT, 0),
    "key_conv_state": (CONV, 0),
    "value_conv_state": (CONV, 1),
    "attention_conv_state": (CONV, 2),
    "mlp_conv_state": (CONV, 3),
    "ple_conv_state": (CONV, 1),
    "ngram_state": (CONV, 2),
}
"""The attribute and index under which transformers' layers hold each state of our specs."""


class LayerState:
    """One state of one layer: `pages` holds all of its pages, `tensor` the states of the batch, `[batch, ...]`."""

    def __init__(self, tag: str, name: str, pages: torch.Tensor) -> None:
        self.tag, self.name, self.pages = tag, name, pages
        self.tensor = pages[:0]
        self._live: list[int] = []
        self._slots = pages[:0]

    def bind(self, live: list[int], fresh: list[int]) -> bool:
        """Make `tensor` that of these pages; `fresh` rows start from zeros. Returns False if nothing changed."""
        if live == self._live and not fresh:
            return False
        self._live = live
        if len(live) == 1:
            self.tensor = self.pages[live[0] : live[0] + 1]
        else:
            self.gather(torch.tensor(live, device=self.pages.device))
        for row in fresh:
            self.tensor[row].zero_()
        return True

    def gather(self, slots: torch.Tensor) -> None:
        """Make `tensor` a copy of the states at these pages, `[batch]` on the device, of which the host knows nothing;
        `scatter` writes it back."""
        self._slots = slots
        self.tensor = self.pages.index_select(0, slots)

    def place(self, slots: torch.Tensor) -> StateSlots:
        """Make `tensor` one that stands for the states at these pages. All its numbers are NaN and none can be
        written, so that a model which uses it otherwise is noticed."""
        nan = _nan(self.pages.dtype, self.pages.device)
        self.tensor = nan.expand(len(slots), *self.pages.shape[1:])
        return StateSlots(self.tensor, self.pages, slots)

    def scatter(self) -> None:
        write_pages(self.pages, self.tensor, self._slots)

    def write_back(self) -> None:
        if len(self._live) > 1:
            self.scatter()

    def unbind(self) -> None:
        """Drop the binding, so that the next `bind` reads the pages."""
        self._live = []


class LinearLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A recurrent layer: transformers' own code on our memory."""

    is_compileable = False
    is_croppable = False

    def __init__(self, past: PagedCache, states: list[LayerState]) -> None:
        super().__init__(number_of_states=1 + max((PLACES[state.name][1] for state in states), default=0))
        self.past, self.states = past, states

    def bind(self, live: Mapping[str, list[int]], fresh: list[int], has_past: bool) -> None:
        """Before a step: bind the tensors to these pages; they hold a state if there is a past."""
        for state in self.states:
            if state.bind(live[state.tag], fresh):
                self._show(state)
        for number in self.has_previous_state:
            self.has_previous_state[number] = has_past

    def begin_fixed(self, slots: Mapping[str, torch.Tensor], forward: PagedForward | None) -> None:
        """Before a step at fixed addresses: copy the states from these pages, or place them for a forward whose model
        updates them there."""
        for state in self.states:
            if forward:
                forward.place_state(state.place(slots[state.tag]))
            else:
                state.gather(slots[state.tag])
            self._show(state)
        for number in self.has_previous_state:
            self.has_previous_state[number] = True

    def update_conv_state(self, *state: Any, **named: Any) -> Any:
        assert self.past.step, "there is one, or an error"
        return super().update_conv_state(*state, **named)

    def update_recurrent_state(self, state: torch.Tensor, state_idx: int = 0, **named: Any) -> Any:
        assert self.past.step, "there is one, or an error"
        if state is self.recurrent_states[state_idx]:  # updated in place
            return state
        return super().update_recurrent_state(state, state_idx, **named)

    def _show(self, state: LayerState) -> None:
        """Assign the tensor of a state to the attribute where transformers' code expects it."""
        kind, number = PLACES[state.name]
        getattr(self, kind)[number] = state.tensor
        getattr(self, f"is_{kind}_initialized")[number] = True
        self.dtype, self.device = state.tensor.dtype, state.tensor.device
        if kind == CONV:
            self.conv_kernel_size[number] = state.tensor.shape[-1]


class HybridLayer(LinearLayer, AttentionLayer):
    """Attention and states in one layer."""

    def __init__(self, past: PagedCache, states: list[LayerState], **attention: Any) -> None:
        AttentionLayer.__init__(self, past, **attention)
        LinearLayer.__init__(self, past, states)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the pages exist."""


@cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((1,), torch.nan, dtype=dtype, device=device)

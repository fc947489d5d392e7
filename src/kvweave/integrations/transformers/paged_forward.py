"""A forward whose attention may read pages in place: what the cache gave to the model, and what became of it.

A layer attends in place if the model gives the keys and values of `update` to transformers' attention interface as they
are, with a mask that says no more than the layer's reach. That is found out by watching: the first forward of many
tokens and the first of one token gather, attend in both ways, and compare. From then on `update` writes the new rows
and returns only these; attention reads the rest in the pages. Layers for which it does not hold keep the gather.
Latents that a model expands first are attended to as they are, by other queries (`latents`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch

from kvweave.attention import Attention, AttentionOptions, Step, open_attention
from kvweave.attention.kv_planes import keeps_values
from kvweave.errors import BadCall, NoKernel
from kvweave.integrations.transformers.latents import LatentProjection
from kvweave.spec import Reach
from kvweave.tensor import LayerView

CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far both ways of attending may differ, of the largest output."""

KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position", "logits_to_keep"}
"""Tensors among the options of an attention function that are followed, or change nothing. Others (a bias, a selection
of tokens) may change something only sometimes."""


class LayerAttention:
    """Attention over the pages of one layer, opened for the options that the model calls it with.

    `verdicts`: whether it attends in place, for forwards of one token (True) and of several (False), once known.
    """

    def __init__(self, view: LayerView, reach: Reach) -> None:
        self.view, self.kept_reach = view, reach
        self.reach: Reach | None = None
        """What the model's masks let tokens see, once known; it never changes."""
        self.verdicts: dict[bool, bool] = {}
        self.projection: LatentProjection | None = None
        """Of a layer that was seen to expand its latents."""
        self.keeps_values = keeps_values(view)
        self._opened: dict[tuple[object, ...], Attention] = {}

    def opened(self, options: dict[str, Any]) -> Attention:
        """Raises `NoKernel` if these pages cannot be attended to in place."""
        sinks = options.get("s_aux")
        changes = None if sinks is None else (sinks.data_ptr(), 0 if sinks.is_inference() else sinks._version)
        key = options.get("scaling"), options.get("softcap"), changes
        if key not in self._opened:
            made = AttentionOptions(key[0], self.reach, key[1], None if sinks is None else sinks.detach())
            self._opened[key] = open_attention(self.view, made)
        return self._opened[key]

    def attends(self, is_decode: bool, expands: bool = False) -> bool | None:
        """Whether it attends in place; None if that is not known. `expands`: not if it has latents."""
        verdict, projection = self.verdicts.get(is_decode), self.projection
        return verdict and (projection is None or (projection.is_plain and not expands))

    def attend(self, queries: torch.Tensor, step: Step, options: dict[str, Any]) -> torch.Tensor:
        """Outputs `[batch, tokens, heads, dim]` of queries `[batch, heads, tokens, dim]`."""
        attention, projection = self.opened(options), self.projection
        if projection is None:
            return attention.attend_batch(queries, step)
        return projection.outputs(attention.attend_batch(projection.queries(queries), step))

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        attention = next(iter(self._opened.values()))
        if self.projection:
            keys = torch.cat([keys, values], dim=-1)
        attention.write_batch(keys, values if self.keeps_values else None, slots)


class HandedOut(NamedTuple):
    """The keys and values that a layer returned to the model."""

    layer: LayerAttention
    keys: torch.Tensor
    values: torch.Tensor


class StateSlots(NamedTuple):
    """Where the states are that a tensor, which a layer returned to the model, stands for."""

    tensor: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor


class PagedForward:
    """One forward. `layers` are all layers with keys and values; `expands`: latents are expanded."""

    def __init__(
        self, layers: SequenceOf[LayerAttention], make_step: Callable[[], Step], is_decode: bool, expands: bool = False
    ) -> None:
        self._layers, self._make_step, self._is_decode, self._expands = layers, make_step, is_decode, expands
        verdicts = [layer.attends(is_decode, expands) for layer in layers]
        self.is_learning = None in verdicts
        self.needs_masks = not all(verdicts)
        self.is_useful = self.is_learning or any(verdicts)
        self._handed: dict[int, HandedOut] = {}
        self._masks: dict[int, tuple[torch.Tensor, Reach]] = {}
        self._judged: dict[LayerAttention, bool] = {}
        self.unread: set[LayerAttention] = set()
        """Layers that were given their new rows only, and whose pages nobody has read yet."""
        self._states: dict[int, StateSlots] = {}
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        return self._step or self.prepare()

    def prepare(self) -> Step:
        """Make the step that attention reads; otherwise its first layer does."""
        self._step = self._make_step()
        return self._step

    # ---- the cache's part

    def is_in_place(self, layer: LayerAttention) -> bool:
        if self.is_learning or not self.is_useful:
            return False
        return not self.needs_masks or bool(layer.attends(self._is_decode, self._expands))

    def write(self, layer: LayerAttention, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new rows; attention that is given these tensors will read the layer's pages."""
        layer.write(keys, values, self.step.slots[layer.view.tag])
        self.unread.add(layer)
        self._handed[id(keys)] = HandedOut(layer, keys, values)

    def watch(self, layer: LayerAttention, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the gathered rows of a layer, to see what the model does with them."""
        if self.is_learning and self._is_decode not in layer.verdicts:
            self._handed[id(keys)] = HandedOut(layer, keys, values)

    def note_expansion(
        self, handed: HandedOut, projection: LatentProjection, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """The model has made keys and values of the latents of a layer; it will attend to these."""
        handed.layer.projection = projection
        self._handed[id(keys)] = HandedOut(handed.layer, keys, values)

    def place_state(self, state: StateSlots) -> None:
        """Functions of ours that are given this tensor will update the states in their pages."""
        self._states[id(state.tensor)] = state

    def give_up(self) -> None:
        """The mask of this forward says more than a reach: gather, and learn nothing."""
        self.is_useful = self.is_learning = False

    # ---- the model's part

    def note_mask(self, mask: torch.Tensor | None, reach: Reach) -> None:
        if mask is not None and self.is_learning:
            self._masks[id(mask)] = mask, reach

    def find(self, keys: torch.Tensor, values: torch.Tensor) -> HandedOut | None:
        handed = self._handed.get(id(keys))
        if handed is not None and handed.values is not values:
            if self.is_learning:
                self._judged[handed.layer] = False
                return None
            raise BadCall(f"layer {handed.layer.view.layer} attends to other values than its cache returned")
        return handed

    def states_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states that a tensor stands for, and the slot of each row; itself, if it is none of those."""
        found = self._states.get(id(tensor))
        return (tensor, None) if found is None else (found.pages, found.slots)

    def attend(
        self, handed: HandedOut, queries: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Outputs `[batch, tokens, heads, dim]` of queries `[batch, heads, tokens, dim]`."""
        if mask is not None and not self.needs_masks:
            raise BadCall(f"layer {handed.layer.view.layer} was given a mask by its model, where none was made")
        self.unread.discard(handed.layer)
        return handed.layer.attend(queries, self.step, options)

    def judge(
        self,
        handed: HandedOut,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
        expected: torch.Tensor,
    ) -> None:
        """Compare with what the model's own attention made of the gathered rows."""
        layer = handed.layer
        self._judged[layer] = self._judged.get(layer, True) and self._agrees(handed, queries, mask, options, expected)

    def _agrees(
        self,
        handed: HandedOut,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
        expected: torch.Tensor,
    ) -> bool:
        layer, (_, reach) = handed.layer, self._masks.get(id(mask), (None, None))
        tensors = {name for name, value in options.items() if isinstance(value, torch.Tensor)}
        if reach is None or layer.reach not in (None, reach) or not _keeps(layer.kept_reach, reach):
            return False
        if tensors - KNOWN_TENSORS or options.get("is_causal") is False or options.get("dropout"):
            return False
        layer.reach = reach
        try:
            if layer.opened(options).name == "reference" or (layer.projection and not layer.projection.is_plain):
                return False
            ours = self.attend(handed, queries, mask, options)
        except NoKernel:
            return False
        if ours.shape != expected.shape:
            return False
        allowed = CLOSE.get(expected.dtype, 0.0) * float(expected.abs().max())
        return float((ours - expected).abs().max()) <= allowed

    def conclude(self) -> None:
        """The model has returned: what was seen is how its layers attend."""
        if self.is_learning:
            for layer in self._layers:
                layer.verdicts.setdefault(self._is_decode, self._judged.get(layer, False))


def _keeps(kept: Reach, seen: Reach) -> bool:
    """Whether what one reach keeps is enough to see what the other sees."""
    positions = np.arange(4 * max(kept.span or 1, seen.span or 1))
    return kept.head >= seen.head and bool((kept.tail(positions) <= seen.tail(positions)).all())


_of_thread = threading.local()


def running() -> PagedForward | None:
    """The forward that runs in this thread."""
    found: PagedForward | None = getattr(_of_thread, "forward", None)
    return found


def set_running(forward: PagedForward | None) -> PagedForward | None:
    """Returns the one that ran before."""
    before, _of_thread.forward = running(), forward
    return before

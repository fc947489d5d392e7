"""A cache for forwards over a step at fixed addresses: its lengths are on the device, unknown to Python."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvweave.attention import FixedStep, Step
from kvweave.integrations.transformers.batch_step import BatchStep
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.step_cache import StepCache

UNKNOWN = 1 << 20
"""What such a cache says when a model asks for its length, unless it has lengths on the device."""


class FixedBatchStep(BatchStep):
    """Tokens of which only the device knows where they are."""

    can_gather = False

    def __init__(self, fixed: FixedStep, num_tokens: int) -> None:
        self.fixed = fixed
        self.start, self.end = UNKNOWN, UNKNOWN + num_tokens

    def packed(self) -> Step:
        return self.fixed.step


class LayersByCall:
    """The layers of a cache for a model that asks for one by its number: to `torch.compile` a call, whose outcome it
    does not know. Of a list it would compile the code of each number anew."""

    def __init__(self, layers: SequenceOf[Any]) -> None:
        self._layers = layers

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __getitem__(self, number: int) -> Any:
        return self._layers[number]

    def __len__(self) -> int:
        return len(self._layers)


class FixedCache(StepCache):
    """The rows of one step; all layers attend in place. States are updated in their pages if they `stay`, else copied
    in, and back when the model has returned."""

    def __init__(self, memory: PagedMemory, fixed: FixedStep, states_stay: bool = False) -> None:
        super().__init__(memory, [], [UNKNOWN])
        self._fixed, self._states_stay = fixed, states_stay
        self.layers: Any = LayersByCall(self.layers)

    @property
    def is_open(self) -> bool:
        return True

    def begin(self, inputs: Mapping[str, Any], module: object) -> None:
        self.memory.core_lock.__enter__()
        self._step = FixedBatchStep(self._fixed, inputs["input_ids"].shape[1])
        self._enter(inputs, module)
        for layer in self._states:
            layer.begin_fixed(self._fixed.states, self.forward if self._states_stay else None)

    def _see_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Positions are the step's."""

    def finish(self) -> None:
        are_copies = not (self._states_stay and self.forward)
        self._leave()
        for layer in self._states if are_copies else ():
            for state in layer.states:
                state.scatter()

    @contextmanager
    def unchanged_states(self) -> Iterator[None]:
        """Forwards within this context leave the states of the step's rows as they are."""
        all_states = [state for layer in self._states for state in layer.states]
        before = [state.pages.index_select(0, self._fixed.states[state.tag]) for state in all_states]
        try:
            yield
        finally:
            for state, tensor in zip(all_states, before, strict=True):
                state.pages.index_copy_(0, self._fixed.states[state.tag], tensor)


for _name, _ in inspect.getmembers(TransformersCache, inspect.isfunction):
    if not _name.startswith("_"):  # what is between two calls of the cache is compiled, once for all layers
        setattr(FixedCache, _name, torch.compiler.disable(getattr(FixedCache, _name)))

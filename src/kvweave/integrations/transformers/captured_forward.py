"""The forward of a model whose steps may be graphs: `generate` calls the model as always, and a replay answers.

It takes the place of `model.forward` while a `KVWeave` is open. Calls without a cache of ours, and those that ask for
more than logits, go to the model's own forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvweave.attention import StepSize
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.step_cache import StepCache
from kvweave.integrations.transformers.step_graphs import StepGraphs

FOLLOWED = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "return_dict",
}
"""Inputs that a step follows, or that say what it does anyway: with no others than these, a replay may answer."""


class CapturedForward:
    """A model's forward, put in the place of the model's own until `remove`. A copy of the model has its own again."""

    changes_no_answer = True
    """Marks it for `ModelChanges`, which otherwise takes it for the user's."""

    def __init__(self, model: Any, graphs: StepGraphs, cache_name: str) -> None:
        self._model, self._graphs, self._cache_name = model, graphs, cache_name
        self._own, self._before = model.forward, vars(model).get("forward")
        functools.update_wrapper(self, self._own)
        self.__signature__ = inspect.signature(self._own)
        model.forward = self

    def remove(self) -> None:
        if vars(self._model).get("forward") is self:
            del self._model.forward
            if self._before is not None:
                self._model.forward = self._before

    def __reduce__(self) -> Any:
        return _own_forward, (self._model,)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        past = inputs.get(self._cache_name)
        if not args and isinstance(past, PagedCache) and not isinstance(past, StepCache):
            size = self._size(past, inputs)
            if size is not None:
                return self._replayed(past, inputs["input_ids"], size)
        return self._own(*args, **inputs)

    def _size(self, past: PagedCache, inputs: Mapping[str, Any]) -> StepSize | None:
        """The size of the step, if a graph gives all that is asked for."""
        if any(value is not None and value is not False for name, value in inputs.items() if name not in FOLLOWED):
            return None
        asks_more = self._model.config.output_hidden_states or inputs.get("return_dict") is False
        if asks_more or not past.reads_in_place or past.computed_by is not self._model:
            return None
        rows, count = inputs["input_ids"].shape
        if count > 1 and inputs.get("logits_to_keep") != 1:
            return None
        return self._graphs.size_of([count] * rows, [sequence.length - count for sequence in past.sequences])

    def _replayed(self, past: PagedCache, ids: torch.Tensor, size: StepSize) -> CausalLMOutputWithPast:
        with past.computed_elsewhere():
            counts = [ids.shape[1]] * len(ids)
            logits = self._graphs.run(past.sequences, counts, past.step_ids.ravel(), size)
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=past)


def _own_forward(model: Any) -> Any:
    return MethodType(type(model).forward, model)

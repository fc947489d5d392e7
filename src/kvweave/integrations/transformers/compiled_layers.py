"""Decoder layers compiled by `torch.compile`, for steps at fixed addresses."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


class CompiledLayers:
    """A context in which the decoder layers of a model are compiled by `torch.compile`, for steps at fixed addresses.

    Compiled is what lies between two calls of ours: attention and updates of the cache stay as they are. One code
    serves all layers of a kind, and from the second batch size on all sizes.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        width = model.get_input_embeddings().weight.shape[-1]
        linears = [module for layer in self._layers for module in layer.modules() if type(module) is torch.nn.Linear]
        self._of_one_input = [linear for linear in linears if _alone_reads_its_input(linear, width)]
        self._compiled = [
            torch.compile(layer._call_impl, options={"coordinate_descent_tuning": True}) for layer in self._layers
        ]
        self._config = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64)

    def __enter__(self) -> None:
        self._config.__enter__()
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer._compiled_call_impl = compiled
        for linear in self._of_one_input:
            linear.__class__ = MemoryLinear

    def __exit__(self, *_: object) -> None:
        for linear in self._of_one_input:
            linear.__class__ = torch.nn.Linear
        for layer in self._layers:
            layer._compiled_call_impl = None
        self._config.__exit__(None, None, None)


def _alone_reads_its_input(linear: torch.nn.Linear, width: int) -> bool:
    """Whether its input is likely computed for it alone: an activation, or the norm of a latent query. What is as wide
    as the model is read by several."""
    return linear.in_features > linear.out_features == width or width not in (linear.in_features, linear.out_features)


class MemoryLinear(torch.nn.Linear):
    """Takes one row as it is in memory. `torch.compile` makes a product with one row a sum, and computes what it is of,
    as the activation of a feed-forward layer, once for every number of the result: 29 us instead of 14 on an H200."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(in_memory(hidden) if hidden.numel() == self.in_features else hidden)


@torch.library.custom_op("kvweave::in_memory", mutates_args=())
def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, which no compiler sees through."""
    return tensor.clone()


@in_memory.register_fake
def _in_memory_shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)

"""Models with a cache class of their own (MiniMax): a paged cache that is also an instance of that class."""

from __future__ import annotations

from typing import Any

import torch

from kvweave.integrations.transformers.paged_cache import PagedCache


class LinearCache(PagedCache):
    """Answers `get_linear_cache` and `set_linear_cache` from the recurrent states."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        state: torch.Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def __len__(self) -> int:
        return len(self.layers)


BY_CACHE_CLASS = {"MiniMaxCache": LinearCache}
"""Our classes, by the names of the models' classes."""


def cache_class(own_cache: type | None) -> Any:
    """The cache class for a model; `own_cache` is the only class that the model accepts, if it has one."""
    if own_cache is None:
        return PagedCache
    return type(own_cache.__name__, (BY_CACHE_CLASS[own_cache.__name__], own_cache), {})

"""Models with a cache class of their own (MiniMax): a past that is one of theirs too, and answers to its methods."""

from __future__ import annotations

from typing import Any

import torch

from kvweave.integrations.transformers.paged_cache import PagedCache


class LinearCache(PagedCache):
    """States asked for as `get_linear_cache`, and given back as `set_linear_cache`."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        state: torch.Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def __len__(self) -> int:
        return len(self.layers)


BY_CACHE_CLASS = {"MiniMaxCache": LinearCache}
"""Ours, by the names of theirs."""


def cache_class(own_cache: type | None) -> Any:
    """The class of pasts for a model that takes only caches of its own class."""
    if own_cache is None:
        return PagedCache
    return type(own_cache.__name__, (BY_CACHE_CLASS[own_cache.__name__], own_cache), {})

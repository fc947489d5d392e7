"""Random rows, written as the model's own layers write them: for the proof of layouts (`probe`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.integrations.vllm.engine_groups import EngineGroup, EngineLayer
from kvweave.integrations.vllm.layouts import ATTENTION, latent, state_views
from kvweave.integrations.vllm.step_messages import Pages

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KernelRows:
    """Attention is written by the backend's own kernel, states through the views that their kernels use. Numbers are
    small and whole, so that every dtype has them exactly."""

    def __init__(self, modules: Mapping[str, Any], dtype: torch.dtype, *, channels_first: bool) -> None:
        self._modules, self._dtype, self._channels_first = modules, dtype, channels_first
        self._generator = torch.Generator().manual_seed(16)

    def write(
        self, group: EngineGroup, layer: EngineLayer, pages: Pages, num_tokens: int
    ) -> Mapping[str, NDArray[Any]]:
        if group.is_state:
            return self._write_states(layer, int(pages[0]))
        module, device, cache = self._modules[layer.name], layer.raw.device, layer.raw
        slots = torch.from_numpy(_slots(pages, group.block_tokens, num_tokens)).to(device)
        if ATTENTION[layer.kind] is latent:
            rows, rank = self._random(num_tokens, cache.shape[3]), module.kv_lora_rank
            parts = rows[:, :rank].contiguous().to(device), rows[:, None, rank:].contiguous().to(device)
            module.impl.do_kv_cache_update(*parts, module.kv_cache, slots, module.kv_cache_dtype, module._k_scale)
            return {"latent": _as_stored(rows, cache, module)}
        width, heads = module.head_size, cache.shape[1]
        key, value = (self._random(num_tokens, heads, dim) for dim in (width, cache.shape[3] - width))
        module.impl.do_kv_cache_update(module, key.to(device), value.to(device), module.kv_cache, slots)
        return {"key": _as_stored(key, cache, module), "value": _as_stored(value, cache, module)}

    def _write_states(self, layer: EngineLayer, page: int) -> Mapping[str, NDArray[Any]]:
        states = [self._random(1, *tensor.shape[1:]).to(tensor.dtype) for tensor in layer.tensors]
        for tensor, state in zip(layer.tensors, states, strict=True):
            tensor[page] = state[0].to(tensor.device)
        views = state_views(layer.kind, states, channels_first=self._channels_first) or {}
        return {role: _bits(view) for role, view in views.items()}

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=self._generator).to(self._dtype)


def _slots(pages: Pages, block_tokens: int, num_tokens: int) -> NDArray[np.int64]:
    tokens = np.arange(num_tokens)
    return pages[tokens // block_tokens].astype(np.int64) * block_tokens + tokens % block_tokens


def _as_stored(rows: Any, cache: Any, module: Any) -> NDArray[Any]:
    """What the kernel should have made of them: quantised, where the cache is."""
    return _bits(rows.to(FP8.get(module.kv_cache_dtype, cache.dtype)))


def _bits(tensor: Any) -> NDArray[Any]:
    """As whole numbers of the same size: numpy lacks some of torch's dtypes."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits: NDArray[Any] = tensor.contiguous().view(whole).numpy()
    return bits

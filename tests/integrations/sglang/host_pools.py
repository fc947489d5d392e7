"""SGLang's real classes, and host pools of theirs in memory. There is no engine: SGLang has none for CPUs on PyPI."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

PAGE = 4


def import_sglang() -> Any:
    """Its classes for HiCache; skips where it is not installed. They need no GPU, and of its many requirements few."""
    pytest.importorskip("sglang", reason="SGLang is not installed: make test-all has it beside vLLM")
    from transformers import AutoProcessor  # noqa: F401 - before the stand-ins, which it would take for packages

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules.setdefault(name, MagicMock(__name__=name))  # pictures only; there is none for a CPU's torch
    names: tuple[str, ...] = ("device_pool_info", "hicache_storage", "utils", "radix_cache", "storage")
    names += ("pool_host.mamba", "pool_host.mha", "pool_host.mla")
    modules = [import_module(f"sglang.srt.mem_cache.{name}") for name in names]
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def mha_pool(sgl: Any, layout: str = "layer_first", seed: int = 0) -> Any:
    """24 tokens of three layers with two heads."""
    import torch

    device, layouts = [torch.zeros(8, 2, 8) for _ in range(3)], [*sgl.KVBufferLayout]
    pointers = torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64)
    buffers = sgl.KVBuffers(
        k=tuple(device), v=tuple(device), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=layouts[0]
    )
    info = sgl.MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=2, head_dim=8, v_head_dim=8, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = sgl.MHATokenToKVPoolHost(
        info, 3.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=8, start_layer=0, end_layer=3
    )
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def mla_pool(sgl: Any, layout: str = "page_first", seed: int = 0) -> Any:
    import torch

    info = sgl.MLABufferInfo(
        buffers=tuple(torch.zeros(8, 1, 12, dtype=torch.bfloat16) for _ in range(2)), data_ptrs=torch.zeros(2),
        layer_indices=(0, 1), device_layer_num=2, page_size=PAGE, kv_lora_rank=8, qk_rope_head_dim=4, kv_cache_dim=12,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    pool = sgl.MLATokenToKVPoolHost(
        info, 3.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=8, start_layer=0, end_layer=2,
        target_layer_num=2,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def mamba_pool(sgl: Any, seed: int = 0) -> Any:
    """Slots of two layers' states; the page of such a pool is one slot."""
    import torch

    info = sgl.MambaStateBufferInfo(
        temporal=torch.zeros(2, 8, 2, 4, 4), conv=(torch.zeros(2, 8, 12, 3, dtype=torch.bfloat16),)
    )
    pool = sgl.MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def storage_config(sgl: Any, extra: Any, model: Path | str = "m", **facts: Any) -> Any:
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    return sgl.HiCacheStorageConfig(**{**ranks, **flags, "model_name": str(model), "extra_config": extra, **facts})


def attached(sgl: Any, settings: Any, pools: Any, **facts: Any) -> Any:
    """A backend, made and given its pools as SGLang's controllers do it."""
    extra = {"backend_name": "kvweave", "module_path": "kvweave.integrations.sglang", "class_name": "KVWeaveStorage"}
    config = storage_config(sgl, {**extra, "interface_v1": 1, "kvweave": settings}, **facts)
    backend = sgl.StorageBackendFactory.create_backend("dynamic", config, pools["kv"])
    backend.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, sgl.PoolName(name))
    backend.on_host_pools_registered()
    return backend

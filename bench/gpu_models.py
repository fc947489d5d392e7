"""Models of about three billion random parameters, made on a GPU in bfloat16; what a decode step must read, and how
long work on a GPU takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Qwen3NextConfig

BYTES_PER_SECOND = 4.17e12
"""What a copy on an H200 reaches."""
SIZES: dict[str, Any] = {"vocab_size": 65536, "max_position_embeddings": 65536, "head_dim": 128}


def llama() -> Any:
    """About 3.4 billion parameters, all layers with full attention."""
    return LlamaConfig(
        **SIZES,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=8192,
    )


def gemma() -> Any:
    """About 3.5 billion parameters: windows and full attention."""
    return Gemma3TextConfig(
        **SIZES,
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=10240,
        sliding_window=1024,
        sliding_window_pattern=6,
    )


def qwen() -> Any:
    """About 3 billion parameters: states and full attention, with dense layers for experts."""
    return Qwen3NextConfig(
        **SIZES,
        hidden_size=2560,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=10240,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mlp_only_layers=list(range(24)),
    )


def deepseek() -> Any:
    """About 2.8 billion parameters: latents, with dense layers for experts."""
    return DeepseekV3Config(
        vocab_size=65536,
        max_position_embeddings=65536,
        hidden_size=2560,
        num_hidden_layers=28,
        first_k_dense_replace=28,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


MODELS = {"llama": llama, "gemma-3": gemma, "qwen3-next": qwen, "deepseek-v3": deepseek}


def build(config: Any, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def floor_seconds(model: Any, spec: Any, rows: int, context: int) -> float:
    """The time to read the weights once, and of each row what its layers see; states are read and written."""
    embedding = model.get_input_embeddings().weight
    is_tied = embedding is model.get_output_embeddings().weight
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= 0 if is_tied else embedding.numel() * embedding.element_size()
    kept = sum(cache.bytes_at(context) for _, cache in spec.caches()) + spec.state_bytes()
    return float(weights + rows * kept) / BYTES_PER_SECOND


def timed(act: Callable[[], Any]) -> float:
    """Seconds until all that was started is over."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start

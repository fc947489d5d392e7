"""Models of about three billion random parameters, made on a GPU in bfloat16, and what a decode step must read."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3NextConfig

BYTES_PER_SECOND = 4.17e12
"""What a copy on an H200 reaches."""
SIZES: dict[str, Any] = {"vocab_size": 65536, "max_position_embeddings": 65536, "head_dim": 128}


def llama() -> Any:
    """About 3.4 billion parameters, all layers with full attention."""
    config = LlamaConfig(
        **SIZES,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=8192,
    )
    return _built(transformers.LlamaForCausalLM, config)


def gemma() -> Any:
    """About 3.5 billion parameters: windows and full attention."""
    config = Gemma3TextConfig(
        **SIZES,
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=10240,
        sliding_window=1024,
        sliding_window_pattern=6,
    )
    return _built(transformers.Gemma3ForCausalLM, config)


def qwen() -> Any:
    """About 3 billion parameters: states and full attention, with dense layers for experts."""
    config = Qwen3NextConfig(
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
    return _built(transformers.Qwen3NextForCausalLM, config)


MODELS = {"llama": llama, "gemma-3": gemma, "qwen3-next": qwen}


def _built(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def floor_seconds(model: Any, spec: Any, rows: int, context: int) -> float:
    """The time to read the weights once, and of each row what its layers see; states are read and written."""
    embedding = model.get_input_embeddings().weight
    is_tied = embedding is model.get_output_embeddings().weight
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= 0 if is_tied else embedding.numel() * embedding.element_size()
    kept = sum(cache.bytes_at(context) for _, cache in spec.caches()) + spec.state_bytes()
    return float(weights + rows * kept) / BYTES_PER_SECOND

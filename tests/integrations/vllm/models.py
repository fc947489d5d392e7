"""Tiny seeded checkpoints for a real vLLM engine, with weights so large that outputs depend on KV."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

VOCABULARY = 512
WINDOW = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_hidden_layers": 4}),
    "mistral": ("MistralForCausalLM", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 8,
            "sliding_window": WINDOW,
            "layer_types": ([SLIDING] * 3 + [FULL]) * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2, **EXPERTS},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["chunked_attention"] * 3 + [FULL],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "layer_types": ["conv", FULL] * 2,
            "block_dim": 128,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "conv_dim": 128,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "dtype": "bfloat16",
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
            **EXPERTS,
        },
    ),
}

STATES = ("lfm2", "qwen3_next", "granite_hybrid")
"""Those with recurrent layers."""
WITHOUT_EXPERTS = {"llama4": {"interleave_moe_layer_step": 5}, "granite_hybrid": {"num_local_experts": 0}}
"""What makes a model dense: with adapters, vLLM's experts have Triton kernels only, which a CPU has not."""
NEED_EXPERTS = ("gpt_oss", "qwen3_next")
"""Those that vLLM makes with experts only."""


@cache
def checkpoint(name: str, folder: Path, seed: int = 0, *, dense: bool = False, layers: int = 0) -> Path:
    """The directory of a model that transformers saved; `dense`: without experts, where it can be; `layers`: another
    number of them."""
    class_name, own = CONFIGS[name]
    fields = {**COMMON, **own, **(WITHOUT_EXPERTS.get(name, {}) if dense else {})}
    fields |= {"num_hidden_layers": layers} if layers else {}
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**fields)
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=getattr(torch, fields["dtype"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.uniform_(-0.2, 0.2)
    path = folder / f"{name}-{seed}{'-dense' if dense else ''}{f'-{layers}' if layers else ''}"
    model.save_pretrained(path)
    return path


def adapter(model: Path, path: Path, seed: int) -> Path:
    """A LoRA adapter for the keys of a checkpoint."""
    path.mkdir()
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**facts, "base_model_name_or_path": str(model)}))
    random, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        keys = [name for name in weights.keys() if name.endswith("k_proj.weight")]  # noqa: SIM118 - not a dict
        shapes = {name: weights.get_slice(name).get_shape() for name in keys}
    for name, (rows, columns) in shapes.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = torch.rand((8, columns), generator=random) - 0.5
        tensors[f"{prefix}.lora_B.weight"] = torch.rand((rows, 8), generator=random) - 0.5
    save_file(tensors, path / "adapter_model.safetensors")
    return path

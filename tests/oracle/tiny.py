"""Tiny seeded models of transformers' causal-LM families, and the cache tensors a real forward leaves behind."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LENGTHS = (5, 16, 37, 133)
SHRINK: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "embedding_dim": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dim_ff": 48,
    "dff": 48,
    "n_inner": 48,
    "d_inner": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 48,
    "prefix_dense_intermediate_size": 48,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "num_blocks": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_target_positions": 256,
    "max_source_positions": 256,
    "max_seq_len": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "window_size": 8,
    "local_attention": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "index_head_dim": 40,
    "index_n_heads": 2,
    "index_topk": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_heads": 2,
    "linear_head_dim": 10,
    "mamba_d_state": 14,
    "state_size": 14,
    "ssm_state_size": 14,
    "rotary_dim": 8,
}
OVERRIDES: dict[str, dict[str, Any]] = {}
FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
EXCLUDED: dict[str, str] = {}


def tiny_kwargs(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    kwargs = {name: value for name, value in SHRINK.items() if name in names}
    if "is_decoder" in names:
        kwargs["is_decoder"] = True
    for name, sub in config_class.sub_configs.items():
        if dataclasses.is_dataclass(sub) and sub is not PretrainedConfig and type(sub) is type:
            given = overrides.get(name, {})
            kwargs[name] = tiny_kwargs(sub, given) | {"model_type": sub.model_type}
    return kwargs | {k: v for k, v in overrides.items() if k not in config_class.sub_configs}


def tiny_config(name: str) -> PretrainedConfig:
    model_type = name.partition(":")[0]
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**tiny_kwargs(config_class, OVERRIDES.get(name, {})))


def tiny_model(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(name), dtype=dtype).eval()


def fresh_cache(model: PreTrainedModel, length: int) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(GenerationConfig(use_cache=True), kwargs, GenerationMode.GREEDY_SEARCH, 1, length)
    return kwargs


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}[{key}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}[{index}]")


@torch.no_grad()
def prefill(model, length, steps=0):
    cache = fresh_cache(model, length)
    ids = torch.arange(length).remainder(90)[None] + 3
    out = model(input_ids=ids[:, : length - steps], use_cache=True, **cache)
    for i in range(length - steps, length):
        if not cache:
            raise RuntimeError("no cache kwarg")
        out = model(input_ids=ids[:, i : i + 1], use_cache=True, **cache)
    got = [v for k in ("past_key_values", "cache_params") if (v := out.get(k)) is not None]
    c = got[0] if got else next(iter(cache.values()), None)
    return c


def facts(cache):
    if hasattr(cache, "self_attention_cache"):
        cache = cache.self_attention_cache
    return [{n: (tuple(t.shape), str(t.dtype), t.numel() * t.element_size()) for a, v in vars(l).items() for n, t in tensors(v, a)} for l in cache.layers]

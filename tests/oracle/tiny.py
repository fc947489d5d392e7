"""Tiny seeded models of transformers' causal-LM families, and the tensors a real forward leaves in their caches.

Nothing here knows how a cache is shaped: configs are transformers' own, shrunk by field name, and the facts are read
off the cache object that the model filled. A name is a model type (`gemma2`) or a variant of it (`qwen2:sliding`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTHS = (5, 16, 37, 133)

# Wrappers outside that registry whose text decoder caches what no family in it does.
MORE: tuple[str, ...] = (
    "glm5_next", "inkling_mm_model", "kimi_k25", "minimax_m3_vl", "mistral4", "mistral_large4", "muse_spark", "step3p7",
    "unlimited_ocr",
)  # fmt: skip

EXCLUDED: dict[str, str] = {
    "blt": "transformers cannot make its cache: DynamicCache(config) raises, BltConfig has no num_hidden_layers",
    "gemma4_assistant": "a drafter without a cache of its own: every layer reads the target's keys and values",
    "gemma4_unified_assistant": "a drafter without a cache of its own: every layer reads the target's keys and values",
    "openai-gpt": "no cache at all: forward takes no past and returns none",
    "reformer": "own non-Cache state (ReformerDynamicCache: hidden states and LSH buckets)",
    "rwkv": "own non-Cache state (a list of five tensors named `state`)",
    "xlm": "no cache reaches the caller: forward makes one as `cache`, drops it and ignores past_key_values",
    "xlnet": "own non-Cache state (`mems`: hidden states, permutation LM)",
    "xlstm": "own non-Cache state (xLSTMCache.rnn_state)",
}

# Every field that counts layers; how many is searched for, see `tiny_config`.
LAYER_COUNTS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers",
}  # fmt: skip

# One small value per field name. The sizes differ from one another, so that a mistaken field shows.
SHRINK: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "index_n_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "dff"), 48),
    **dict.fromkeys(("n_inner", "d_inner", "ffn_hidden_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"), 8),
    **dict.fromkeys(("attention_window_size", "index_block_size"), 8),
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_kernel_size", "conv1d_width"), 5),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"), 96),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 14),
    **dict.fromkeys(("n_mamba_heads", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("o_groups", "hc_mult", "hc_count"), 2),
    **dict.fromkeys(("o_lora_rank", "hc_lowrank", "gated_norm_rank", "laurel_rank", "router_hidden_size"), 18),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "head_dim": 24,
    "local_attention": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "index_head_dim": 40,
    "index_topk": 4,
    "index_topk_blocks": 1,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 11,
    "linear_head_dim": 10,
    "rotary_dim": 8,
    "kv_channels": 24,
    "hidden_size_per_layer_input": 10,
    "rel_extent": 32,
    "lru_width": 80,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 48,
    "projector_hidden_size": 48,
    "moe_hidden_size": 56,
    "cca_time0": 3,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_SLIDING = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}

# What the general rule cannot know, by the model type of the (sub-)config. Lists of layer kinds name every kind twice.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 6, "attn_layer_indices": [2, 5], "mamba_d_head": 16},
    "bailing_hybrid": {"head_dim": 10, "layer_group_size": 3, "short_conv_kernel_size": 5},
    "beam": {"num_hidden_layers": 12},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cpmant": {"dim_head": 24, "prompt_length": 3, "prompt_types": 3, "segment_types": 3},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    },
    "flint": {"num_hidden_layers": 10},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_d_head": 12},
    "gemma3n_text": {"num_hidden_layers": 15, "num_kv_shared_layers": 5},
    "gemma4_text": {"num_hidden_layers": 12, "global_head_dim": 40, "num_global_key_value_heads": 1},
    "gemma4_unified_text": {"num_hidden_layers": 12, "global_head_dim": 40, "num_global_key_value_heads": 1},
    "glm_moe_dsa": {"num_hidden_layers": 8, "indexer_types": ["full", "full", "full", "shared"] * 2},
    "glm5_next_text": {
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"] * 2,
        "indexer_types": ["full", "full", "shared", "full"] * 2,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "mamba_d_head": 16,
    },
    "helium": {"head_dim": 16},
    "hy_v4": {"num_hidden_layers": 10},
    "inkling_text": {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 20, "d_rel": 4},
    "inkling_vision": {"patch_size": 2, "num_hidden_layers": 3},
    "lfm2": {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "longcat_flash": {"head_dim": 8},
    "mimo_v2_flash": {"num_hidden_layers": 12, "num_key_value_heads": 1},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    "mistral_large4_text": {
        "num_hidden_layers": 8,
        "indexer_types": ["full", "full", "shared", "full", "shared", "full", "shared", "shared"],
    },
    "mllama_text_model": {"num_hidden_layers": 6, "cross_attention_layers": [1, 4]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 16, 16]},
    "nemotron_h": {"hybrid_override_pattern": "M-M*EM-*E", "mamba_head_dim": 12},
    "phi4_multimodal_audio": {"nemo_conv_channels": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 40,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 6},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 96,
        "shape_embed_dim": 8,
        "shape_vocab_size": 96,
    },
    "step3p5": _SLIDING | {"sliding_window": 8, "num_sliding_attention_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zaya": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 1,
    },
    "gemma4": {"vision_config": None, "audio_config": None},
    "gemma4_unified": {"vision_config": None, "audio_config": None},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text:sliding": _SLIDING
    | {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v4:hub": {"layer_types": None, "compress_ratios": [0, 4, 128, 4, 128, 0, 0]},
    "deepseek_v4:rates": {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 16}},
    "doge:window": {"sliding_window": 8},
    "dots1:sliding": {"max_window_layers": 2},
    "falcon:multi_head": {"multi_query": False, "num_kv_heads": None},
    "falcon:new_architecture": {"new_decoder_architecture": True},
    "falcon_h1:expand": {"mamba_d_ssm": None, "mamba_d_head": "auto"},
    "gemma3_text:bidirectional": {"use_bidirectional_attention": True, "sliding_window": 20},
    "gemma3_text:pattern": {"sliding_window_pattern": 3},
    "gemma4_text:bidirectional": {"use_bidirectional_attention": "all", "sliding_window": 20},
    "gemma4_text:k_eq_v": {"attention_k_eq_v": True},
    "gemma4_text:shared": {"num_kv_shared_layers": 6},
    "glm4_moe:head_dim": {"head_dim": 24},
    "glm_moe_dsa:every_layer": {"indexer_types": None},
    "glm_moe_dsa:frequency": {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 2},
    "glm_moe_dsa:pattern": {"indexer_types": None, "index_topk_pattern": "FFSSFSSS"},
    "gpt_bigcode:multi_head": {"multi_query": False},
    "granitemoehybrid:attention_only": {"num_hidden_layers": 4, "layer_types": ["attention"] * 4},
    "inkling_text:local_ids": {"num_hidden_layers": 4, "local_layer_ids": [0, 2]},
    "jamba:period": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "kimi_linear:hub": {
        "num_hidden_layers": 6,
        "linear_attn_config": {
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
            "num_heads": 3,
            "head_dim": 14,
            "short_conv_kernel_size": 3,
        },
    },
    "laguna:sliding": _SLIDING | {"num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2:indices": {"num_hidden_layers": 4, "layer_types": None, "full_attn_idxs": [1, 3]},
    "llama:multi_head": {"num_key_value_heads": None, "head_dim": None},
    "llama4_text:interval": {"no_rope_layer_interval": 2},
    "mellum:sliding": _SLIDING,
    "mimo_v2_flash:hub": {"sliding_window_size": 8},
    "minimax:seven_to_one": {
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention"] * 7 + ["full_attention"],
    },
    "minimax_m3_vl_text:hub": {
        "layer_types": None,
        "sparse_attention_config": {"sparse_attention_freq": [0, 1, 0, 1], "sparse_index_dim": 36},
    },
    "ministral3:window": {"sliding_window": 8},
    "mistral:no_window": {"sliding_window": None},
    "mistral_large4:shared": {"text_config": {"kv_source_layers": [0, 0, 2, 3, 2, 5, 5, 3]}},
    "mistral_large4:shared_across_rope": {"text_config": {"kv_source_layers": [0, 0, 2, 3, 2, 5, 3, 3]}},
    "mixtral:window": {"sliding_window": 8},
    "modernbert-decoder:every_two": {"global_attn_every_n_layers": 2},
    "modernbert-decoder:stray_heads": {"num_key_value_heads": 2},
    "phi3:window": {"sliding_window": 8},
    "phimoe:window": {"sliding_window": 8},
    "qwen2:head_dim": {"head_dim": 24},
    "qwen2:sliding": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe:sliding": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3:sliding": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe:head_dim": {"head_dim": 24},
    "qwen3_moe:sliding": {"use_sliding_window": True},
    "qwen3_next:interval": {"full_attention_interval": 3},
    "qwen4_exp_text:no_ple": {"ple_layer_ids": None},
    "smollm3:sliding": {"num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 8},
    "starcoder2:window": {"sliding_window": 8},
    "zaya:full": {"layer_types": None, "sliding_window": None},
}
NAMES: tuple[str, ...] = (*(family for family in FAMILIES if family not in EXCLUDED), *MORE, *VARIANTS)

CLASSES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
STAND_INS = {"gemma3n": "Gemma3nForCausalLM"}  # its vision tower needs timm; the text decoder is the same

# The forwards that do not take one row of ids: musicgen reads one row per codebook.
ROWS = {"musicgen": 4, "musicgen_melody": 4}

# Attributes of cache layers that are settings or counters rather than cached state.
SKIPPED = {"_sliding_window_tensor": "the window as a 0-dim tensor, made in __init__"}


class Held(NamedTuple):
    """One tensor of a cache layer. An alias shares the memory of an earlier tensor, so it has no bytes of its own."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    alias: str | None = None


class Seen(NamedTuple):
    """The caches of one model: per prompt length, per cache layer, the tensors by name."""

    config: PreTrainedConfig
    dtype: str
    cache_class: str
    layer_classes: list[str]
    layers: dict[int, list[dict[str, Held]]]


def tiny_config(name: str) -> PreTrainedConfig:
    """The family's config with as few layers as show each of its layer kinds twice."""
    model_type = name.partition(":")[0]
    config_class = CONFIG_MAPPING[model_type]
    given = VARIANTS.get(name, {}) | {"architectures": [CLASSES[model_type]]}
    kinds = set(_kinds(_shrink(config_class, 24, given)))
    for count in range(4, 25):
        config = _shrink(config_class, count, given)
        found = Counter(_kinds(config))
        if all(found[kind] > 1 for kind in kinds):
            return config
    return _shrink(config_class, 4, given)


def _kinds(config: PreTrainedConfig) -> Sequence[str]:
    return getattr(config.get_text_config(decoder=True), "layer_types", None) or ()


def _shrink(config_class: Any, layers: int, given: dict[str, Any]) -> PreTrainedConfig:
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    wanted = SHRINK | dict.fromkeys(LAYER_COUNTS, layers)
    if defaults.get("sliding_window", 0) is None:
        del wanted["sliding_window"]  # a window is a variant where the family has none by default
    if "kv_lora_rank" in defaults:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]  # a latent is expanded for every query head
    wanted = {name: value for name, value in wanted.items() if name in defaults}
    if "is_decoder" in defaults:
        wanted |= {"is_decoder": True, "is_encoder_decoder": False}
    given = copy.deepcopy(OVERRIDES.get(config_class.model_type, {}) | given)  # configs edit what they are given
    for name, sub_class in config_class.sub_configs.items():
        if given.get(name, {}) is not None:
            auto = sub_class is AutoConfig
            actual = CONFIG_MAPPING[config_class.sub_configs_defaults[name].model_type] if auto else sub_class
            given = given | {name: _shrink(actual, layers, given.get(name, {}))}
    config: PreTrainedConfig = config_class(**wanted | given)
    return config


def tiny_model(name: str) -> PreTrainedModel:
    """The model in bfloat16, so that a float32 state shows; its weights are random but always the same."""
    config = tiny_config(name)
    model_class = getattr(transformers, STAND_INS.get(name, CLASSES[name.partition(":")[0]]))
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.bfloat16).eval()
    return model


def tokens(name: str, length: int) -> torch.Tensor:
    return (torch.arange(length) % 90 + 3).expand(ROWS.get(name, 1), -1)


def prefill(name: str, model: Any, length: int) -> Any:
    """The cache after one forward over `length` tokens."""
    given = _fresh_cache(model, length)
    with torch.no_grad():
        out = model(input_ids=tokens(name, length), use_cache=True, **given)
    return out.get("past_key_values") or next(iter(given.values()))


def decode(name: str, model: Any, length: int, steps: int = 3) -> Any:
    """The cache of `length` tokens when the last `steps` came one by one."""
    if name in ROWS:  # its generate() starts from no prompt
        cache = prefill(name, model, length - steps)
        with torch.no_grad():
            for index in range(length - steps, length):
                model(input_ids=tokens(name, length)[:, index : index + 1], use_cache=True, past_key_values=cache)
        return cache
    given = _fresh_cache(model, length)
    how = {"max_new_tokens": steps + 1, "min_new_tokens": steps + 1, "do_sample": False, "pad_token_id": 0}
    out = model.generate(tokens(name, length - steps), return_dict_in_generate=True, use_cache=True, **how, **given)
    return out.get("past_key_values") or next(iter(given.values()))


def _fresh_cache(model: Any, length: int) -> dict[str, Any]:
    """The cache argument exactly as generate() would make it; empty for a model that makes its own."""
    given: dict[str, Any] = {}
    how = GenerationConfig.from_dict({"use_cache": True})
    model._prepare_cache_for_generation(how, given, GenerationMode.GREEDY_SEARCH, 1, length)
    return given


def facts(model: Any, cache: Any) -> list[dict[str, Held]]:
    """Per cache layer, every tensor of the layer object, of the cache's own lists, and of the decoder layer's modules.

    The lists are MiniMax's `linear_cache`; tensors that are neither parameters nor buffers are RecurrentGemma's state.
    """
    found: list[dict[str, Any]] = [vars(layer).copy() for layer in cache.layers]
    for attribute, value in vars(cache).items():
        if attribute != "layers" and isinstance(value, list):
            found += [{} for _ in range(len(found), len(value))]
            for layer, item in zip(found, value, strict=False):
                layer[attribute] = item
    for layer, block in zip(found, getattr(model.base_model, "layers", ()), strict=False):
        for path, module in block.named_modules():
            layer |= {f"{path}.{key}": item for key, item in vars(module).items() if isinstance(item, torch.Tensor)}
    places: dict[tuple[Any, ...], str] = {}
    return [_held(layer, index, places) for index, layer in enumerate(found)]


def _held(attributes: dict[str, Any], layer: int, places: dict[tuple[Any, ...], str]) -> dict[str, Held]:
    held = {}
    for name, tensor in _tensors(attributes):
        owner = own = f"{layer}.{name}"
        if tensor.numel():
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
            owner = places.setdefault(place, own)
        nbytes = tensor.numel() * tensor.element_size() if owner == own else 0
        held[name] = Held(tuple(tensor.shape), _dtype(tensor), nbytes, None if owner == own else owner)
    return held


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in SKIPPED:
                yield from _tensors(item, f"{name}[{key}]" if name else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}[{index}]")
    elif not isinstance(value, bool | int | str | torch.dtype | torch.device | None):
        raise TypeError(f"{name} of a cache layer is a {type(value).__name__}: is that cached state?")


def _dtype(of: torch.Tensor | PreTrainedModel) -> str:
    return str(of.dtype).removeprefix("torch.")


def observe(name: str, lengths: Sequence[int] = LENGTHS) -> Seen:
    """Build the tiny model and read its cache after one fresh prefill per length."""
    model = tiny_model(name)
    layers = {}
    for length in lengths:
        cache = prefill(name, model, length)
        layers[length] = facts(model, cache)
    classes = [type(layer).__name__ for layer in cache.layers]
    return Seen(tiny_config(name), _dtype(model), type(cache).__name__, classes, layers)


def measure(name: str, lengths: Sequence[int] = LENGTHS) -> dict[int, list[dict[str, Held]]]:
    """Per length, per cache layer, the tensors held after one prefill."""
    return observe(name, lengths).layers

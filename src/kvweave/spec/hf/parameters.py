"""How many parameters a model has, estimated from its config: the matrices of its layers, and its embeddings.

Norms, biases, gates and routers are left out: well below a percent of a model in use. Where a family
builds its layers in a way of its own, the estimate is off by a few percent: weights on disk say more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvweave.errors import ConfigError
from kvweave.spec.hf.attention import head_dim, kv_heads
from kvweave.spec.hf.fields import Fields, language_model, load
from kvweave.spec.hf.patterns import CONV, NOTHING, layer_kinds
from kvweave.spec.hf.reader import from_config
from kvweave.spec.layer_spec import Layer, LayerCache, holds_state

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WIDTHS = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "ffn_hidden_size", "ffn_dim")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
_ACTIVATIONS = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function")
_UNGATED = ("relu", "relu2", "gelu", "gelu_new", "gelu_fast")
"""Activations of MLPs with two matrices; others have three."""


_UNCOUNTED = ("longcat_flash", "recurrent_gemma", "zamba", "zamba2")
"""Families whose blocks share weights, have several MLPs, or whose widths mean something else."""


def count_parameters(source: object) -> int:
    """An estimate, for what `from_config` takes.

    Raises `ConfigError` where a config lacks the widths of its MLPs or its vocabulary, for which no default could
    stand, and for families that are built in another way.
    """
    fields = Fields(language_model(load(source)), notes=[])
    kinds, layers = layer_kinds(fields), from_config(source).layers
    mlps = _mlps(kinds, layers)
    if fields.family in _UNCOUNTED:
        raise ConfigError(f"cannot count the parameters of {fields.family}: its layers are not built as others are")
    missing = [] if "vocab_size" in fields.config else ["vocab_size"]
    missing += ["intermediate_size"] if any(mlps) and not _first(fields, (*_WIDTHS, *_EXPERT_WIDTHS)) else []
    if missing:
        raise ConfigError(f"cannot count the parameters of {fields.family}: its config lacks {' and '.join(missing)}")
    mixers = sum(_mixer(fields.layer(index), kind, layers[index]) for index, kind in enumerate(kinds[: len(layers)]))
    return _embeddings(fields, len(layers)) + mixers + sum(_mlp(fields, i) for i, has_one in enumerate(mlps) if has_one)


def _mlps(kinds: list[str], layers: Sequence[Layer]) -> list[bool]:
    """Which layers have an MLP: all; those that are nothing else; none where all layers are a state, as Mamba's."""
    if all(layer.caches and all(not cache.reach.per_token for cache in layer.caches) for layer in layers):
        return [False] * len(layers)
    return [(NOTHING in kinds) == (kind == NOTHING) for kind in kinds[: len(layers)]]


def _embeddings(fields: Fields, num_layers: int) -> int:
    """Of the input and, unless they are one, of the output; of each layer, where layers have their own (Gemma 3n)."""
    config, times = fields.config, 1 if fields.config.get("tie_word_embeddings", True) else 2
    own = (config.get("vocab_size_per_layer_input") or 0) * (config.get("hidden_size_per_layer_input") or 0)
    return times * fields.count("vocab_size") * fields.count("hidden_size") + num_layers * own


def _first(fields: Fields, names: tuple[str, ...], layer: int = 0) -> int:
    """The first of some fields that is there, of one layer where it is a list; 0 where none is."""
    values = (fields.config.get(name) for name in names)
    found: Any = next((value for value in values if value), 0)
    return int(found[layer] if isinstance(found, list) else found)


def _mixer(fields: Fields, kind: str, layer: Layer) -> int:
    """The matrices of attention, of a recurrence, or of both."""
    if kind == CONV:
        return 4 * fields.count("hidden_size") ** 2
    rows = [cache for cache in layer.caches if not holds_state(cache) and cache.tag not in ("indexer", "csa", "hca")]
    states = [cache for cache in layer.caches if not cache.reach.per_token]
    attention = [_attention(fields, cache) for cache in rows] or ([_attention(fields)] if layer.reads else [])
    return sum(attention) + sum(_recurrence(fields, cache) for cache in states)


def _attention(fields: Fields, cache: LayerCache | None = None) -> int:
    """Queries, perhaps through a low rank; what the cache keeps, or a latent and what is made of it; the output."""
    hidden, heads, rank = fields.count("hidden_size"), fields.count("num_attention_heads"), fields.get("q_lora_rank")
    key = next((role.shape for role in cache.roles if role.name == "key"), None) if cache else None
    kept, width = key if key and len(key) == 2 else (kv_heads(fields), head_dim(fields))
    value, made = width, 2 * hidden * kept * width
    if fields.get("kv_lora_rank"):
        latent, rope, plain = (fields.count(name) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        width, value = plain + rope, fields.count("v_head_dim")
        made = hidden * (latent + rope) + latent * heads * (plain + value)
    queries = rank * (hidden + heads * width) if rank else hidden * heads * width
    return int(queries + made + heads * value * hidden)


def _recurrence(fields: Fields, cache: LayerCache) -> int:
    """Projections into the convolution's channels and a gate, and out again; without a convolution, into three."""
    shapes = {role.name: role.shape for role in cache.roles}
    if "ssm_state" not in shapes:
        return 0
    heads, *rest = shapes["ssm_state"]
    inner = heads * (rest[-1 if fields.has("linear_value_head_dim") else 0] if len(rest) > 1 else 1)
    channels = shapes["conv_state"][0] if "conv_state" in shapes else 3 * inner
    return fields.count("hidden_size") * (channels + 2 * inner)


def _mlp(fields: Fields, index: int) -> int:
    """Dense, or all experts of a layer."""
    acts = [fields.config.get(name) for name in _ACTIVATIONS]
    size = fields.count("hidden_size") * (2 if any(act in _UNGATED for act in acts) else 3)
    experts = _first(fields, _EXPERTS)
    if experts < 2 or not _is_sparse(fields, index):
        adjusted = fields.config.get("block_auto_adjust_ff_dim")  # LFM2: two thirds, as one of three matrices is a gate
        return size * _first(fields, _WIDTHS, index) * (2 if adjusted else 3) // 3
    width = _first(fields, _EXPERT_WIDTHS, index)
    shared = _first(fields, _SHARED_WIDTHS) or width * _first(fields, _SHARED_EXPERTS)
    shared = shared or width * ("interleave_moe_layer_step" in fields.config)  # Llama 4 has one, and no field for it
    return size * (experts * width + shared)


def _is_sparse(fields: Fields, index: int) -> bool:
    """Whether the MLP of a layer has experts: by list, by the first dense ones, or by a period."""
    config = fields.config
    for listed in ("mlp_layer_types", "moe_layer_freq", "hybrid_override_pattern", "layers_block_type"):
        if isinstance(kinds := config.get(listed), list | str):
            return kinds[index] not in ("dense", "-", "mlp", 0)
    if index < (config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or ()):
        return False
    if period := config.get("expert_layer_period"):
        return bool(index % period == config.get("expert_layer_offset", 0))
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return bool((index + 1) % step == 0)

"""What a layer of each kind keeps: `build(fields, keep, layer) -> caches`, asked of the fields as that layer sees them.

`KINDS` holds the general answer of each kind; `FAMILIES` the answers of those model types that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from kvweave.errors import ConfigError
from kvweave.spec.dtypes import DType
from kvweave.spec.hf.fields import Fields
from kvweave.spec.hf.keep import Keep
from kvweave.spec.hf.patterns import (
    CHUNKED,
    CONV,
    CSA,
    FULL,
    HCA,
    HYBRID,
    HYBRID_SLIDING,
    INDEXED,
    LINEAR,
    NOTHING,
    SLIDING,
    layer_kinds,
    rope_layers,
)
from kvweave.spec.model import LayerCache
from kvweave.spec.reach import Chunk, Full, Reach, State, Window
from kvweave.spec.role import Part, Role, Segment

Caches = tuple[LayerCache, ...]
Build = Callable[[Fields, Keep, int], Caches]

# ---- attention


def head_dim(fields: Fields) -> int:
    given = fields.get("head_dim")
    return fields.count("head_dim") if given else fields.count("hidden_size") // fields.count("num_attention_heads")


def kv_heads(fields: Fields) -> int:
    if fields.has("num_key_value_heads"):
        return fields.count("num_key_value_heads")
    return 1 if fields.get("multi_query") else fields.count("num_attention_heads")


def window(fields: Fields) -> Reach:
    tokens = fields.count("sliding_window")
    if fields.get("use_bidirectional_attention") in (True, "all"):
        tokens = tokens // 2 + 1
    return Window(tokens)


def rows(fields: Fields, keep: Keep, reach: Reach) -> Caches:
    """Keys and values, or a latent where the model compresses them."""
    if fields.get("kv_lora_rank"):
        return (keep.latent(fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")),)
    return (keep.attention(kv_heads(fields), head_dim(fields), fields.get("v_head_dim"), reach),)


def full(fields: Fields, keep: Keep, _layer: int) -> Caches:
    return rows(fields, keep, Full())


def reference_sliding(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """A window over what is generated, with all of the prompt beside it: as long as the prompt, so planned as full."""
    return rows(fields, keep, Full())


def sliding(fields: Fields, keep: Keep, _layer: int) -> Caches:
    return rows(fields, keep, window(fields))


def chunked(fields: Fields, keep: Keep, _layer: int) -> Caches:
    return rows(fields, keep, keep.chunk(fields.count("attention_chunk_size")))


def nothing(_fields: Fields, _keep: Keep, _layer: int) -> Caches:
    return ()


# ---- sparse attention with an indexer


def owns_indexer(fields: Fields, layer: int) -> bool:
    """Layers may share the selection of an earlier one, and then keep no index keys."""
    types = fields.get("indexer_types") or fields.get("index_topk_pattern")
    if types is not None and layer < max(len(types), fields.num_layers):  # draft layers may be beyond the list
        return types[layer] in ("full", "F")
    every, offset = fields.count("index_topk_freq", 1), fields.count("index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % every == 0


def indexed(fields: Fields, keep: Keep, layer: int) -> Caches:
    if not owns_indexer(fields, layer):
        return full(fields, keep, layer)
    return (*full(fields, keep, layer), keep.indexer(fields.count("index_head_dim")))


def hy_v4(fields: Fields, keep: Keep, layer: int) -> Caches:
    if fields.get("indexer_types") is None and layer and (layer - 1) % 4:
        return full(fields, keep, layer)
    return indexed(fields, keep, layer)


def mistral_large4(fields: Fields, keep: Keep, layer: int) -> Caches:
    """NoPE layers have no rope columns."""
    rope = fields.count("qk_rope_head_dim") if rope_layers(fields)[layer] else 0
    latent = keep.latent(fields.count("kv_lora_rank"), rope)
    return (latent, keep.indexer(fields.count("index_head_dim"))) if owns_indexer(fields, layer) else (latent,)


def glm5_next(fields: Fields, keep: Keep, layer: int) -> Caches:
    """Index keys are pooled over `index_kpool` tokens; until a pool is full, its keys and gates wait."""
    dim, pool = fields.count("index_head_dim"), fields.count("index_kpool", 16)
    if not owns_indexer(fields, layer):
        return full(fields, keep, layer)
    if not keep.engine:
        return (*full(fields, keep, layer), keep.indexer(2 * dim + 1))
    waiting = Role("compressor_state", (2, dim), DType.FLOAT32)
    return (
        *full(fields, keep, layer),
        keep.indexer(dim, pool),
        LayerCache("indexer_state", Chunk(pool), (waiting,), block_tokens=pool),
    )


def minimax_m3_sparse(fields: Fields, keep: Keep, layer: int) -> Caches:
    return (*full(fields, keep, layer), keep.indexer(fields.count("index_head_dim", 128), heads=1))


# ---- DeepSeek V4: one K = V row, a window of them, and compressed rows beyond it


@lru_cache(maxsize=64)
def v4_row(keep: Keep, dim: int, tokens_per_row: int, name: str) -> tuple[Role, int]:
    """The role, and the smallest kernel block of its layout."""
    if not keep.quant:
        return Role(name, (1, dim), keep.dtype, tokens_per_row, token_axis=1), 1
    if not keep.quant.packed:
        raise ConfigError(f"DeepSeek V4 rows have no {keep.quant.dtype} layout; take fp8, or a float dtype")
    # 448 fp8 + 64 bfloat16 = 576 bytes of data, then 7 scales of one byte and one of padding
    rope = 64
    scales = -(-(dim - rope) // 64)
    parts = [Part("data", (dim + rope,), DType.UINT8), Part("scale", (scales + scales % 2,), DType.UINT8)]
    role = Role.packed(name, parts, planar=True, align=576, tokens_per_row=tokens_per_row)
    return role, min(64 * tokens_per_row, 256)  # V4's kernels read 64 rows at once, or those of 256 tokens


def v4_window(fields: Fields, keep: Keep, copies: bool = False) -> LayerCache:
    role, kernel_tokens = v4_row(keep, head_dim(fields), 1, "key")
    value = replace(role, name="value", alias_of=None if copies else "key")
    reach = Window(fields.count("sliding_window"))
    return LayerCache("window", reach, (role, value), kernel_tokens=kernel_tokens)


def v4_sliding(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """transformers keeps two copies of the row here, and one beside a compressor."""
    return (v4_window(fields, keep, copies=not keep.engine),)


def v4_rate(fields: Fields, kind: str) -> int:
    return int(fields.get(f"compress_rates.{kind}", {CSA: 4, HCA: 128}[kind]))


def v4_state(keep: Keep, tag: str, dim: int, rate: int, overlaps: bool) -> Caches:
    """What a compressor remembers of tokens whose row is not written yet."""
    series = 2 if overlaps else 1
    if keep.engine:
        reach: Reach = Window(2 * rate) if overlaps else Chunk(rate)
        role = Role("compressor_state", (series, 2, dim), DType.FLOAT32)
        return (LayerCache(f"{tag}_state", reach, (role,), block_tokens=4 if overlaps else 8),)
    waiting = LayerCache(f"{tag}_state", Chunk(rate), (Role("compressor_state", (2, series * dim), keep.dtype),))
    if not overlaps:
        return (waiting,)
    overlap = LayerCache(f"{tag}_overlap", State(), (Role("overlap_state", (2, rate, dim), keep.dtype),))
    return waiting, overlap


def v4_csa(fields: Fields, keep: Keep, _layer: int) -> Caches:
    rate, dim, index_dim = v4_rate(fields, CSA), head_dim(fields), fields.count("index_head_dim")
    row, kernel_tokens = v4_row(keep, dim, rate, "compressed")
    return (
        v4_window(fields, keep),
        LayerCache("csa", Full(), (row,), kernel_tokens=kernel_tokens, context_split=True),
        keep.indexer(index_dim, rate),
        *v4_state(keep, "csa", dim, rate, overlaps=True),
        *v4_state(keep, "indexer", index_dim, rate, overlaps=True),
    )


def v4_hca(fields: Fields, keep: Keep, _layer: int) -> Caches:
    rate, dim = v4_rate(fields, HCA), head_dim(fields)
    row, kernel_tokens = v4_row(keep, dim, rate, "compressed")
    return (
        v4_window(fields, keep),
        LayerCache("hca", Full(), (row,), kernel_tokens=kernel_tokens, context_split=True),
        *v4_state(keep, "hca", dim, rate, overlaps=False),
    )


# ---- recurrent states


def gated_delta_net(fields: Fields, keep: Keep, _layer: int) -> Caches:
    heads = fields.get("num_attention_heads")
    num_keys, num_values = fields.count("linear_num_key_heads", heads), fields.count("linear_num_value_heads", heads)
    key_dim = fields.get("linear_key_head_dim") or int(0.75 * fields.count("hidden_size") / num_keys)
    value_dim = fields.get("linear_value_head_dim") or 2 * key_dim
    keys = Segment(num_keys, key_dim)
    conv = keep.conv(fields.count("linear_conv_kernel_dim"), [keys, keys, Segment(num_values, value_dim)])
    return (keep.state(conv, keep.ssm((num_values, key_dim, value_dim), ssm_dtype(fields, keep))),)


def kda(fields: Fields, keep: Keep, _layer: int) -> Caches:
    heads, dim = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    conv = keep.conv(fields.count("linear_conv_kernel_dim"), [Segment(heads, dim)] * 3)
    return (keep.state(conv, keep.ssm((heads, dim, dim), ssm_dtype(fields, keep))),)


def bailing_linear(fields: Fields, keep: Keep, layer: int) -> Caches:
    """Ling 2.5 is lightning attention, without a convolution; Ling 3 is KDA, under the same model_type."""
    if fields.config.get("short_conv_kernel_size") or fields.config.get("linear_conv_kernel_dim"):
        return kda(fields, keep, layer)
    heads = fields.get("num_kv_heads_for_linear_attn") or fields.count("num_attention_heads")
    return (keep.state(None, keep.ssm((heads, head_dim(fields), head_dim(fields)))),)


def lightning(fields: Fields, keep: Keep, _layer: int) -> Caches:
    heads, dim = fields.count("num_attention_heads"), head_dim(fields)
    return (keep.state(None, keep.ssm((heads, dim, dim), DType.FLOAT32 if keep.engine else keep.dtype)),)


def mamba2(fields: Fields, keep: Keep, _layer: int) -> Caches:
    heads, groups, state = fields.count("mamba_heads"), fields.count("mamba_groups", 1), fields.count("mamba_state")
    dim = fields.get("mamba_head_dim")
    if not isinstance(dim, int):  # "auto"
        dim = int(fields.get("mamba_d_ssm") or fields.get("mamba_expand") * fields.count("hidden_size")) // heads
    pair = Segment(groups, state)
    conv = keep.conv(fields.count("mamba_conv"), [Segment(heads, dim), pair, pair])
    return (keep.state(conv, keep.ssm((heads, dim, state), ssm_dtype(fields, keep))),)


def mamba1(fields: Fields, keep: Keep, _layer: int) -> Caches:
    width = int(fields.get("mamba_expand") * fields.count("hidden_size"))
    return _mamba1(fields, keep, width)


def mamba1_own_width(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """Mamba and Falcon-Mamba: `intermediate_size` is the inner width, and wins over `expand`."""
    width = fields.config.get("intermediate_size") or fields.get("mamba_expand") * fields.count("hidden_size")
    return _mamba1(fields, keep, int(width))


def _mamba1(fields: Fields, keep: Keep, width: int) -> Caches:
    conv = keep.conv(fields.count("mamba_conv"), [Segment(width)])
    return (keep.state(conv, keep.ssm((width, fields.count("mamba_state")), ssm_dtype(fields, keep))),)


def zamba_mamba(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """Mamba 1 with heads."""
    heads, width = fields.count("n_mamba_heads"), int(fields.get("mamba_expand") * fields.count("hidden_size"))
    conv = keep.conv(fields.count("mamba_conv"), [Segment(width)])
    return (keep.state(conv, keep.ssm((heads, width // heads, fields.count("mamba_state")), ssm_dtype(fields, keep))),)


def rg_lru(fields: Fields, keep: Keep, _layer: int) -> Caches:
    width = fields.count("lru_width" if fields.has("lru_width") else "hidden_size")
    conv = Role("conv_state", (width, fields.count("conv1d_width", 4) - 1), keep.dtype, split=(Segment(width),))
    return (keep.state(conv, keep.ssm((width,))),)


def short_conv(fields: Fields, keep: Keep, _layer: int) -> Caches:
    return (keep.state(keep.conv(fields.count("conv_L_cache"), [Segment(fields.count("hidden_size"))])),)


def linear(fields: Fields, keep: Keep, layer: int) -> Caches:
    """A recurrent layer of a kind that its fields tell."""
    if fields.has("linear_num_value_heads") or fields.has("linear_key_head_dim"):
        return gated_delta_net(fields, keep, layer)
    if fields.has("linear_conv_kernel_dim"):
        return kda(fields, keep, layer)
    if fields.has("mamba_heads") and fields.has("mamba_state"):
        return mamba2(fields, keep, layer)
    if fields.has("mamba_state"):
        return mamba1(fields, keep, layer)
    raise ConfigError(
        f"layer {layer} of model_type {fields.model_type!r} is recurrent, but its state has no shape:"
        " linear_num_value_heads, linear_conv_kernel_dim or mamba_d_state is missing"
    )


def ssm_dtype(fields: Fields, keep: Keep) -> DType:
    """float32 unless the config says otherwise; transformers ignores what it says."""
    named = fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype")
    return DType.parse(named) if named and keep.engine else DType.FLOAT32


# ---- layers with attention and a state


def hybrid(fields: Fields, keep: Keep, layer: int) -> Caches:
    return (*full(fields, keep, layer), *linear(fields, keep, layer))


def zamba_hybrid(fields: Fields, keep: Keep, layer: int) -> Caches:
    """Shared attention sees the input beside the hidden state: heads are twice as wide."""
    state = zamba_mamba if fields.family == "zamba" else mamba2
    width = 2 * fields.count("hidden_size") // fields.count("num_attention_heads")
    dim = fields.get("attention_head_dim") or width
    return (keep.attention(kv_heads(fields), dim), *state(fields, keep, layer))


def zaya(fields: Fields, keep: Keep, reach: Reach) -> Caches:
    """A convolution over queries and keys, and the second half of the value delayed by a token."""
    heads, dim = kv_heads(fields), head_dim(fields)
    columns = fields.count("cca_time0") + fields.count("cca_time1") - 2
    channels = [Segment(fields.count("num_attention_heads"), dim), Segment(heads, dim)]
    conv = Role("conv_state", (sum(s.units * s.width for s in channels), columns), keep.dtype, split=tuple(channels))
    delayed = Role("delayed_value_state", (heads * dim // 2,), keep.dtype)
    return keep.attention(heads, dim, None, reach), keep.state(conv, None, delayed)


def inkling(fields: Fields, keep: Keep, heads: int, dim: int, reach: Reach) -> Caches:
    """Four short convolutions a layer: on keys, values, and the inputs of attention and MLP."""
    kernel, hidden, row = (
        fields.count("conv_kernel_size"),
        [Segment(fields.count("hidden_size"))],
        [Segment(heads, dim)],
    )
    names = {"key_conv_state": row, "value_conv_state": row, "attention_conv_state": hidden, "mlp_conv_state": hidden}
    convs = [keep.conv(kernel, segments, name, DType.FLOAT32) for name, segments in names.items()]
    return keep.attention(heads, dim, None, reach), keep.state(None, None, *convs, tag=f"{reach.kind}_state")


def inkling_full(fields: Fields, keep: Keep, _layer: int) -> Caches:
    return inkling(fields, keep, kv_heads(fields), head_dim(fields), Full())


def inkling_sliding(fields: Fields, keep: Keep, _layer: int) -> Caches:
    heads, dim = fields.count("swa_num_key_value_heads"), fields.count("swa_head_dim")
    return inkling(fields, keep, heads, dim, window(fields))


def qwen4_indexed(fields: Fields, keep: Keep, layer: int) -> Caches:
    """In transformers the first such layer keeps the position ids for all: three axes, 8 bytes each."""
    caches = indexed(fields, keep, layer)
    if keep.engine or layer != min(i for i, kind in enumerate(layer_kinds(fields)) if kind in (FULL, INDEXED)):
        return caches
    return (*caches, LayerCache("positions", Full(), (Role("position_ids", (3,), DType.INT64),)))


def per_layer_embedding(build: Build) -> Build:
    """Qwen4-Exp: some layers (counted from 1) add a convolution over n-grams, and the ids of the last tokens."""

    def with_ple(fields: Fields, keep: Keep, layer: int) -> Caches:
        caches = build(fields, keep, layer)
        if layer + 1 not in (fields.get("ple_layer_ids") or ()):
            return caches
        width, ngram = fields.count("hc_count", 1) * fields.count("hidden_size"), fields.count("ngram_size")
        columns = (fields.count("ple_conv_kernel_size") - 1) * ngram
        conv = Role("ple_conv_state", (width, columns), keep.dtype)
        ids = Role("ngram_state", (ngram - 1,), DType.INT64)
        return (*caches, keep.state(None, None, conv, ids, tag="ple_state"))

    return with_ple


# ---- the rest


def mimo_sliding(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """Windows have heads and widths of their own; configs saved by transformers leave that to the model code."""
    heads = fields.get("swa_num_key_value_heads") or 2 * kv_heads(fields)
    key_dim = fields.get("swa_head_dim") or head_dim(fields)
    value_dim = fields.get("swa_v_head_dim") or fields.get("v_head_dim")
    size = fields.config.get("sliding_window_size")
    reach = Window(size + 1 if size else fields.count("sliding_window"))
    return (keep.attention(heads, key_dim, value_dim, reach),)


def gemma4_full(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """Full layers have a head width of their own, and where keys double as values, a head count too."""
    if fields.config.get("per_layer_config"):
        return full(fields, keep, _layer)
    heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v", True) else None
    return (keep.attention(heads or kv_heads(fields), fields.count("global_head_dim", 512)),)


def searched(fields: Fields, keep: Keep, layer: int) -> Caches:
    """Layers found by architecture search (Nemotron Ultra, DeciLM): each with its own head groups, or none."""
    attention = fields.get("block_configs")[layer]["attention"]
    if not attention.get("n_heads_in_group"):
        return ()
    return (keep.attention(fields.count("num_attention_heads") // attention["n_heads_in_group"], head_dim(fields)),)


def longcat(fields: Fields, keep: Keep, layer: int) -> Caches:
    """Two attention blocks a layer, and so two caches."""
    (latent,) = full(fields, keep, layer)
    return latent, replace(latent, tag="second_latent")


def falcon(fields: Fields, keep: Keep, _layer: int) -> Caches:
    """Grouped heads exist in the new decoder only, where transformers repeats them before it caches them."""
    new, heads = fields.get("new_decoder_architecture"), fields.count("num_attention_heads")
    if new:
        heads = kv_heads(fields) if keep.engine else heads
    elif fields.get("multi_query"):
        heads = 1
    return (keep.attention(heads, head_dim(fields)),)


def mllama(fields: Fields, keep: Keep, layer: int) -> Caches:
    """Cross-attention layers keep nothing of the text."""
    return () if layer in fields.get("cross_attention_layers", ()) else full(fields, keep, layer)


def modernbert_sliding(fields: Fields, keep: Keep, _layer: int) -> Caches:
    return rows(fields, keep, Window(fields.count("local_attention") // 2))


def gpt_neo_local(fields: Fields, keep: Keep, layer: int) -> Caches:
    return rows(fields, keep, Window(fields.count("window_size"))) if keep.engine else full(fields, keep, layer)


KINDS: dict[str, Build] = {
    FULL: full,
    SLIDING: sliding,
    CHUNKED: chunked,
    LINEAR: linear,
    INDEXED: indexed,
    CONV: short_conv,
    HYBRID: hybrid,
    HYBRID_SLIDING: lambda fields, keep, layer: (*sliding(fields, keep, layer), *linear(fields, keep, layer)),
    NOTHING: nothing,
    "reference_sliding_attention": reference_sliding,
    "minimax_m3_sparse": minimax_m3_sparse,
    CSA: v4_csa,
    HCA: v4_hca,
}

_GEMMA4: Mapping[str, Build] = {FULL: gemma4_full}

FAMILIES: dict[str, Mapping[str, Build]] = {
    "hy_v4": {INDEXED: hy_v4},
    "mistral_large4_text": {INDEXED: mistral_large4},
    "glm5_next_text": {INDEXED: glm5_next, FULL: glm5_next},
    "deepseek_v4": {SLIDING: v4_sliding},
    "mimo_v2_flash": {SLIDING: mimo_sliding},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"), _GEMMA4),
    "modernbert-decoder": {SLIDING: modernbert_sliding},
    "gpt_neo": {SLIDING: gpt_neo_local},
    "falcon": {FULL: falcon},
    "longcat_flash": {FULL: longcat},
    "nemotron-nas": {FULL: searched},
    "deci": {FULL: searched},
    "mllama_text_model": {FULL: mllama},
    "bailing_hybrid": {LINEAR: bailing_linear},
    "minimax": {LINEAR: lightning},
    "mamba": {LINEAR: mamba1_own_width},
    "falcon_mamba": {LINEAR: mamba1_own_width},
    "mamba2": {LINEAR: mamba2},
    "jamba": {LINEAR: mamba1},
    "zamba": {LINEAR: zamba_mamba, HYBRID: zamba_hybrid},
    "zamba2": {LINEAR: mamba2, HYBRID: zamba_hybrid},
    "recurrent_gemma": {LINEAR: rg_lru},
    "zaya": {
        HYBRID: lambda fields, keep, _: zaya(fields, keep, Full()),
        HYBRID_SLIDING: lambda fields, keep, _: zaya(fields, keep, window(fields)),
    },
    "inkling_text": {HYBRID: inkling_full, HYBRID_SLIDING: inkling_sliding},
    "qwen4_exp_text": {
        LINEAR: per_layer_embedding(linear),
        INDEXED: per_layer_embedding(qwen4_indexed),
        FULL: per_layer_embedding(qwen4_indexed),
    },
}


def build_layer(kind: str, fields: Fields, keep: Keep, layer: int) -> Caches:
    build = FAMILIES.get(fields.family, {}).get(kind) or KINDS.get(kind)
    if build is None:
        known = ", ".join(sorted(KINDS))
        raise ConfigError(
            f"layer {layer} of model_type {fields.model_type!r} is of unknown kind {kind!r}; known: {known}"
        )
    caches = build(fields, keep, layer)
    if "attention" in (fields.get("skip") or ()):  # a pruned layer, by its `per_layer_config`
        return tuple(cache for cache in caches if not cache.reach.per_token)
    return caches

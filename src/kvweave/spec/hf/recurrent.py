"""What recurrent layers keep: convolutions and states, alone or beside attention."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import ConfigError
from kvweave.spec.dtypes import DType
from kvweave.spec.hf.attention import full, head_dim, indexed, kv_heads, window
from kvweave.spec.hf.fields import Fields
from kvweave.spec.hf.patterns import FULL, INDEXED, layer_kinds
from kvweave.spec.layer_caches import CacheBuilder, Caches
from kvweave.spec.layer_spec import LayerCache
from kvweave.spec.reach import Full, Reach
from kvweave.spec.role import Role, Segment

LayerKind = Callable[[Fields, CacheBuilder, int], Caches]


def gated_delta_net(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    heads = fields.get("num_attention_heads")
    num_keys, num_values = fields.count("linear_num_key_heads", heads), fields.count("linear_num_value_heads", heads)
    key_dim = fields.get("linear_key_head_dim") or int(0.75 * fields.count("hidden_size") / num_keys)
    value_dim = fields.get("linear_value_head_dim") or 2 * key_dim
    keys = Segment(num_keys, key_dim)
    conv = build.conv(fields.count("linear_conv_kernel_dim"), [keys, keys, Segment(num_values, value_dim)])
    return (build.state(conv, build.ssm((num_values, key_dim, value_dim), ssm_dtype(fields, build))),)


def kda(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    heads, dim = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    conv = build.conv(fields.count("linear_conv_kernel_dim"), [Segment(heads, dim)] * 3)
    return (build.state(conv, build.ssm((heads, dim, dim), ssm_dtype(fields, build))),)


def bailing_linear(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """Ling 2.5 is lightning attention, without a convolution; Ling 3 is KDA, under the same model_type."""
    if fields.config.get("short_conv_kernel_size") or fields.config.get("linear_conv_kernel_dim"):
        return kda(fields, build, layer)
    heads = fields.get("num_kv_heads_for_linear_attn") or fields.count("num_attention_heads")
    return (build.state(None, build.ssm((heads, head_dim(fields), head_dim(fields)))),)


def lightning(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    heads, dim = fields.count("num_attention_heads"), head_dim(fields)
    return (build.state(None, build.ssm((heads, dim, dim), DType.FLOAT32 if build.engine else build.dtype)),)


def mamba2(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    heads = fields.count("mamba_heads", least=1)
    groups, state = fields.count("mamba_groups", 1), fields.count("mamba_state")
    dim = fields.get("mamba_head_dim")
    if not isinstance(dim, int):  # "auto"
        dim = int(fields.get("mamba_d_ssm") or fields.get("mamba_expand") * fields.count("hidden_size")) // heads
    pair = Segment(groups, state)
    conv = build.conv(fields.count("mamba_conv"), [Segment(heads, dim), pair, pair])
    return (build.state(conv, build.ssm((heads, dim, state), ssm_dtype(fields, build))),)


def mamba1(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    width = int(fields.get("mamba_expand") * fields.count("hidden_size"))
    return _mamba1(fields, build, width)


def mamba1_own_width(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """Mamba and Falcon-Mamba: `intermediate_size` is the inner width, and wins over `expand`."""
    width = fields.config.get("intermediate_size") or fields.get("mamba_expand") * fields.count("hidden_size")
    return _mamba1(fields, build, int(width))


def _mamba1(fields: Fields, build: CacheBuilder, width: int) -> Caches:
    conv = build.conv(fields.count("mamba_conv"), [Segment(width)])
    return (build.state(conv, build.ssm((width, fields.count("mamba_state")), ssm_dtype(fields, build))),)


def zamba_mamba(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """Mamba 1 with heads."""
    heads = fields.count("n_mamba_heads", least=1)
    width = int(fields.get("mamba_expand") * fields.count("hidden_size"))
    conv = build.conv(fields.count("mamba_conv"), [Segment(width)])
    return (
        build.state(conv, build.ssm((heads, width // heads, fields.count("mamba_state")), ssm_dtype(fields, build))),
    )


def rg_lru(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    width = fields.count("lru_width" if fields.has("lru_width") else "hidden_size")
    conv = Role("conv_state", (width, fields.count("conv1d_width", 4) - 1), build.dtype, split=(Segment(width),))
    return (build.state(conv, build.ssm((width,))),)


def short_conv(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    return (build.state(build.conv(fields.count("conv_L_cache"), [Segment(fields.count("hidden_size"))])),)


def linear(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """A recurrent layer of a kind that its fields tell."""
    if fields.has("linear_num_value_heads") or fields.has("linear_key_head_dim"):
        return gated_delta_net(fields, build, layer)
    if fields.has("linear_conv_kernel_dim"):
        return kda(fields, build, layer)
    if fields.has("mamba_heads") and fields.has("mamba_state"):
        return mamba2(fields, build, layer)
    if fields.has("mamba_state"):
        return mamba1(fields, build, layer)
    raise ConfigError(
        f"layer {layer} of model_type {fields.model_type!r} is recurrent, but its state has no shape:"
        " linear_num_value_heads, linear_conv_kernel_dim or mamba_d_state is missing"
    )


def ssm_dtype(fields: Fields, build: CacheBuilder) -> DType:
    """float32 unless the config says otherwise; transformers ignores what it says."""
    named = fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype")
    return DType.parse(named) if named and build.engine else DType.FLOAT32


# ---- layers with attention and a state


def hybrid(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    return (*full(fields, build, layer), *linear(fields, build, layer))


def zamba_hybrid(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """Shared attention sees the input beside the hidden state: heads are twice as wide."""
    state = zamba_mamba if fields.family == "zamba" else mamba2
    width = 2 * fields.count("hidden_size") // fields.count("num_attention_heads", least=1)
    dim = fields.get("attention_head_dim") or width
    return (build.attention(kv_heads(fields), dim), *state(fields, build, layer))


def zaya(fields: Fields, build: CacheBuilder, reach: Reach) -> Caches:
    """A convolution over queries and keys, and the second half of the value delayed by a token."""
    heads, dim = kv_heads(fields), head_dim(fields)
    columns = fields.count("cca_time0") + fields.count("cca_time1") - 2
    channels = [Segment(fields.count("num_attention_heads"), dim), Segment(heads, dim)]
    conv = Role("conv_state", (sum(s.units * s.width for s in channels), columns), build.dtype, split=tuple(channels))
    delayed = Role("delayed_value_state", (heads * dim // 2,), build.dtype)
    return build.attention(heads, dim, None, reach), build.state(conv, None, delayed)


def inkling(fields: Fields, build: CacheBuilder, heads: int, dim: int, reach: Reach) -> Caches:
    """Four short convolutions a layer: on keys, values, and the inputs of attention and MLP."""
    kernel, hidden, row = (
        fields.count("conv_kernel_size"),
        [Segment(fields.count("hidden_size"))],
        [Segment(heads, dim)],
    )
    names = {"key_conv_state": row, "value_conv_state": row, "attention_conv_state": hidden, "mlp_conv_state": hidden}
    convs = [build.conv(kernel, segments, name, DType.FLOAT32) for name, segments in names.items()]
    return build.attention(heads, dim, None, reach), build.state(None, None, *convs, tag=f"{reach.kind}_state")


def inkling_full(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    return inkling(fields, build, kv_heads(fields), head_dim(fields), Full())


def inkling_sliding(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    heads, dim = fields.count("swa_num_key_value_heads"), fields.count("swa_head_dim")
    return inkling(fields, build, heads, dim, window(fields))


def qwen4_indexed(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """In transformers the first such layer keeps the position ids for all: three axes, 8 bytes each."""
    caches = indexed(fields, build, layer)
    if build.engine or layer != min(i for i, kind in enumerate(layer_kinds(fields)) if kind in (FULL, INDEXED)):
        return caches
    return (*caches, LayerCache("positions", Full(), (Role("position_ids", (3,), DType.INT64),)))


def per_layer_embedding(attention: LayerKind) -> LayerKind:
    """Qwen4-Exp: some layers (counted from 1) add a convolution over n-grams, and the ids of the last tokens."""

    def with_ple(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
        caches = attention(fields, build, layer)
        if layer + 1 not in (fields.get("ple_layer_ids") or ()):
            return caches
        width, ngram = fields.count("hc_count", 1) * fields.count("hidden_size"), fields.count("ngram_size")
        columns = (fields.count("ple_conv_kernel_size") - 1) * ngram
        conv = Role("ple_conv_state", (width, columns), build.dtype)
        ids = Role("ngram_state", (ngram - 1,), DType.INT64)
        return (*caches, build.state(None, None, conv, ids, tag="ple_state"))

    return with_ple

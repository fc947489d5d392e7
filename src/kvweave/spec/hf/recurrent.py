"""What recurrent layers keep: convolutions and states, alone or beside attention."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import ConfigError
from kvweave.spec.dtypes import DType
from kvweave.spec.hf.attention import full, head_dim, indexed, kv_heads, window
from kvweave.spec.hf.fields import Fields
from kvweave.spec.hf.patterns import FULL, INDEXED, layer_kinds
from kvweave.spec.layer_caches import Caches, Keep
from kvweave.spec.model import LayerCache
from kvweave.spec.reach import Full, Reach
from kvweave.spec.role import Role, Segment

Build = Callable[[Fields, Keep, int], Caches]


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
    heads = fields.count("mamba_heads", least=1)
    groups, state = fields.count("mamba_groups", 1), fields.count("mamba_state")
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
    heads = fields.count("n_mamba_heads", least=1)
    width = int(fields.get("mamba_expand") * fields.count("hidden_size"))
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
    width = 2 * fields.count("hidden_size") // fields.count("num_attention_heads", least=1)
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

"""What a layer of each kind keeps: functions `(fields, build, layer) -> caches`, with the fields of that layer.

`KINDS` has the function of each kind; `FAMILIES` those of the model types that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvweave.errors import ConfigError
from kvweave.spec.hf.attention import (
    chunked,
    falcon,
    full,
    gemma4_full,
    glm5_next,
    gpt_neo_local,
    hy_v4,
    indexed,
    longcat,
    mimo_sliding,
    minimax_m3_sparse,
    mistral_large4,
    mllama,
    modernbert,
    modernbert_sliding,
    nothing,
    reference_sliding,
    searched,
    sliding,
    window,
)
from kvweave.spec.hf.deepseek_v4 import v4_csa, v4_hca, v4_sliding
from kvweave.spec.hf.fields import Fields
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
)
from kvweave.spec.hf.recurrent import (
    bailing_linear,
    hybrid,
    inkling_full,
    inkling_sliding,
    lightning,
    linear,
    mamba1,
    mamba1_own_width,
    mamba2,
    per_layer_embedding,
    qwen4_indexed,
    rg_lru,
    short_conv,
    zamba_hybrid,
    zamba_mamba,
    zaya,
)
from kvweave.spec.layer_caches import CacheBuilder, Caches
from kvweave.spec.reach import Full

LayerKind = Callable[[Fields, CacheBuilder, int], Caches]

KINDS: dict[str, LayerKind] = {
    FULL: full,
    SLIDING: sliding,
    CHUNKED: chunked,
    LINEAR: linear,
    INDEXED: indexed,
    CONV: short_conv,
    HYBRID: hybrid,
    HYBRID_SLIDING: lambda fields, build, layer: (*sliding(fields, build, layer), *linear(fields, build, layer)),
    NOTHING: nothing,
    "reference_sliding_attention": reference_sliding,
    "minimax_m3_sparse": minimax_m3_sparse,
    CSA: v4_csa,
    HCA: v4_hca,
}

_GEMMA4: Mapping[str, LayerKind] = {FULL: gemma4_full}

FAMILIES: dict[str, Mapping[str, LayerKind]] = {
    "hy_v4": {INDEXED: hy_v4},
    "mistral_large4_text": {INDEXED: mistral_large4},
    "glm5_next_text": {INDEXED: glm5_next, FULL: glm5_next},
    "deepseek_v4": {SLIDING: v4_sliding},
    "mimo_v2_flash": {SLIDING: mimo_sliding},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"), _GEMMA4),
    "modernbert-decoder": {FULL: modernbert, SLIDING: modernbert_sliding},
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
        HYBRID: lambda fields, build, _: zaya(fields, build, Full()),
        HYBRID_SLIDING: lambda fields, build, _: zaya(fields, build, window(fields)),
    },
    "inkling_text": {HYBRID: inkling_full, HYBRID_SLIDING: inkling_sliding},
    "qwen4_exp_text": {
        LINEAR: per_layer_embedding(linear),
        INDEXED: per_layer_embedding(qwen4_indexed),
        FULL: per_layer_embedding(qwen4_indexed),
    },
}


def build_layer(kind: str, fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    layer_kind = FAMILIES.get(fields.family, {}).get(kind) or KINDS.get(kind)
    if layer_kind is None:
        known = ", ".join(sorted(KINDS))
        raise ConfigError(
            f"layer {layer} of model_type {fields.model_type!r} is of unknown kind {kind!r}; known: {known}"
        )
    caches = layer_kind(fields, build, layer)
    if "attention" in (fields.get("skip") or ()):  # a pruned layer, by its `per_layer_config`
        return tuple(cache for cache in caches if not cache.reach.per_token)
    return caches

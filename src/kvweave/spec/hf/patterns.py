"""Which kind each layer is, where a config gives a rule rather than a list: `pattern(fields) -> kinds`.

Kinds are transformers' layer types. Hub configs often hold only the rule's parameters (an interval, a string of
letters, a list of indices); configs saved by transformers hold the finished list, which is taken before any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvweave.errors import ConfigError
from kvweave.spec.hf.fields import Fields, as_list

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, INDEXED, CONV = "linear_attention", "indexed_attention", "conv"
HYBRID, HYBRID_SLIDING, NOTHING = "hybrid", "hybrid_sliding", "mlp"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"

Pattern = Callable[[Fields], list[str]]

LEGACY = {
    "attention": FULL,
    "full": FULL,
    "global": FULL,
    "global_attention": FULL,
    "sliding": SLIDING,
    "local": SLIDING,
    "local_attention": SLIDING,
    "swa": SLIDING,
    "chunked": CHUNKED,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "linear": LINEAR,
    "gated_deltanet": LINEAR,
    "kda": LINEAR,
    "recurrent": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    "moe": NOTHING,
    "M": LINEAR,
    "*": FULL,
    "-": NOTHING,
    "E": NOTHING,
}
"""Older and shorter names of kinds."""


def choose(indices: Iterable[int], rule: Callable[[int], Any], yes: str, no: str) -> list[str]:
    return [yes if rule(i) else no for i in indices]


def plain(fields: Fields) -> list[str]:
    """The general rule: windows where a layer has one and it is not switched off, chunks likewise, else full."""
    return [_plain(fields.layer(i)) for i in range(fields.num_layers)]


def _plain(fields: Fields) -> str:
    if fields.get("use_sliding_window") is not False and fields.get("sliding_window"):
        return SLIDING
    return CHUNKED if fields.get("attention_chunk_size") else FULL


def all_of(kind: str) -> Pattern:
    return lambda fields: [kind] * fields.num_layers


def full_every(default: int, *names: str, other: str = SLIDING, full: str = FULL) -> Pattern:
    """Every n-th layer is full, n being a field's or the default; a string such as "LLLG" is repeated."""

    def pattern(fields: Fields) -> list[str]:
        every = next((value for name in names if (value := fields.get(name)) is not None), default)
        if isinstance(every, str):
            return choose(range(fields.num_layers), lambda i: every[i % len(every)] == "G", full, other)
        if other == SLIDING and not fields.get("sliding_window"):
            return [full] * fields.num_layers
        return choose(range(fields.num_layers), lambda i: every and (i + 1) % every == 0, full, other)

    return pattern


def last_is_full(pattern: Pattern) -> Pattern:
    return lambda fields: [*pattern(fields)[:-1], FULL]


def first_of_four_full(fields: Fields) -> list[str]:
    return choose(range(fields.num_layers), lambda i: i % 4 == 0, FULL, SLIDING)


def full_from_the_end(fields: Fields) -> list[str]:
    return choose(range(fields.num_layers), lambda i: (fields.num_layers - 1 - i) % 4 == 0, FULL, SLIDING)


def window_from_layer(fields: Fields) -> list[str]:
    """Qwen: layers from `max_window_layers` on are windows, if windows are used at all."""
    if not fields.get("use_sliding_window", False) or not fields.get("sliding_window"):
        return [FULL] * fields.num_layers
    first = fields.count("max_window_layers")
    return choose(range(fields.num_layers), lambda i: i >= first, SLIDING, FULL)


def dots(fields: Fields) -> list[str]:
    first = fields.count("max_window_layers", 0)
    windows = bool(fields.get("sliding_window"))
    return choose(range(fields.num_layers), lambda i: windows and i >= first, SLIDING, FULL)


def qwen2_moe(fields: Fields) -> list[str]:
    """As transformers has it: even layers below `max_window_layers`."""
    used, first = fields.get("use_sliding_window", False), fields.get("max_window_layers", 0)
    return choose(range(fields.num_layers), lambda i: used and (i + 1) % 2 and i < first, SLIDING, FULL)


def rope_layers(fields: Fields) -> list[bool]:
    """Which layers rotate; the others are NoPE. In `no_rope_layers` 1 means rope."""
    given = fields.get("no_rope_layers")
    if given:
        return [bool(entry) for entry in given[: fields.num_layers]]
    interval = fields.count("no_rope_layer_interval", 4, least=1)
    return [(i + 1) % interval != 0 for i in range(fields.num_layers)]


def llama4(fields: Fields) -> list[str]:
    return [CHUNKED if rope else FULL for rope in rope_layers(fields)]


def smollm3(fields: Fields) -> list[str]:
    windows = fields.get("use_sliding_window", False) and fields.get("sliding_window")
    return [SLIDING if windows and not rope else FULL for rope in rope_layers(fields)]


def cohere2_moe(fields: Fields) -> list[str]:
    num_dense = fields.count("first_k_dense_replace", 0)
    dense = fields.count("prefix_dense_sliding_window_pattern", 1, least=1)
    rest = fields.count("sliding_window_pattern", 4, least=1)
    return choose(range(num_dense), lambda i: (i + 1) % dense, SLIDING, FULL) + choose(
        range(fields.num_layers - num_dense), lambda i: (i + 1) % rest, SLIDING, FULL
    )


def flint(fields: Fields) -> list[str]:
    last = fields.num_layers - 1
    return choose(range(fields.num_layers), lambda i: i < 2 or i % 4 == 1 or i == last, FULL, SLIDING)


def modernbert_decoder(fields: Fields) -> list[str]:
    every = fields.count("global_attn_every_n_layers", 3, least=1)
    return choose(range(fields.num_layers), lambda i: i % every, SLIDING, FULL)


def mimo(fields: Fields) -> list[str]:
    if fields.has("hybrid_layer_pattern"):
        return [SLIDING if entry else FULL for entry in fields.get("hybrid_layer_pattern")]
    return choose(range(fields.num_layers), lambda i: i == 0 or (i + 1) % 6 == 0, FULL, SLIDING)


def kimi_linear(fields: Fields) -> list[str]:
    """The checkpoint counts its layers from 1."""
    full = fields.get("linear_attn_config.full_attn_layers")
    if full is None:
        return choose(range(fields.num_layers), lambda i: i and i % 4 == 0, FULL, LINEAR)
    return choose(range(fields.num_layers), lambda i: i + 1 in full, FULL, LINEAR)


def bailing_hybrid(fields: Fields) -> list[str]:
    size = fields.count("layer_group_size", least=1)
    return choose(range(fields.num_layers), lambda i: (i + 1) % size == 0, FULL, LINEAR)


def olmo_hybrid(fields: Fields) -> list[str]:
    kinds = choose(range(fields.num_layers), lambda i: i % 4 == 3, FULL, LINEAR)
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def minimax(fields: Fields) -> list[str]:
    """In `attn_type_list` 1 is softmax attention, 0 lightning."""
    given = fields.get("attn_type_list")
    if given is not None:
        return [FULL if entry == 1 else LINEAR for entry in given]
    return choose(range(fields.num_layers), lambda i: i % 2 == 0, FULL, LINEAR)


def minimax_m3(fields: Fields) -> list[str]:
    given = fields.get("sparse_attention_config.sparse_attention_freq")
    if given is None:
        return [FULL] * fields.num_layers
    return ["minimax_m3_sparse" if entry else FULL for entry in given]


def jamba(fields: Fields) -> list[str]:
    period, offset = fields.count("attn_layer_period", least=1), fields.count("attn_layer_offset")
    return choose(range(fields.num_layers), lambda i: i % period == offset, FULL, LINEAR)


def zamba(fields: Fields) -> list[str]:
    period, offset = fields.count("attn_layer_period", least=1), fields.count("attn_layer_offset")
    rest = choose(range(fields.num_layers - 3), lambda i: i % period == offset, HYBRID, LINEAR)
    return [LINEAR, LINEAR, HYBRID, *rest]


def zamba2(fields: Fields) -> list[str]:
    ids = fields.get("hybrid_layer_ids")
    if ids is None:
        raise ConfigError("config of model_type 'zamba2': layers_block_type is missing (or hybrid_layer_ids)")
    return choose(range(fields.num_layers), lambda i: i in ids, HYBRID, LINEAR)


def bamba(fields: Fields) -> list[str]:
    full = fields.get("attn_layer_indices") or ()
    return choose(range(fields.num_layers), lambda i: i in full, FULL, LINEAR)


def nemotron_h(fields: Fields) -> list[str]:
    """The pattern's letters are the layers, whatever `num_hidden_layers` says."""
    return [LEGACY[letter] for letter in str(fields.get("hybrid_override_pattern", "ME*-"))]


def lfm2(fields: Fields) -> list[str]:
    full = fields.get("full_attn_idxs")
    return choose(range(fields.num_layers), lambda i: full is None or i in full, FULL, CONV)


def longcat(fields: Fields) -> list[str]:
    """Layers are `num_layers`; `num_hidden_layers`, where it is there, counts their two attention blocks each."""
    return [FULL] * fields.count("num_layers")


def recurrent_gemma(fields: Fields) -> list[str]:
    cycle = as_list(fields.get("block_types", ["recurrent", "recurrent", "attention"]), "block_types")
    return [SLIDING if cycle[i % len(cycle)] == "attention" else LINEAR for i in range(fields.num_layers)]


def deepseek_v4(fields: Fields) -> list[str]:
    ratios = fields.get("compress_ratios")
    if ratios is not None:
        return [{0: SLIDING, 4: CSA, 128: HCA}[ratio] for ratio in ratios]
    rest = choose(range(max(fields.num_layers - 2, 0)), lambda i: i % 2, CSA, HCA)
    return [HCA] * min(fields.num_layers, 2) + rest


def inkling(fields: Fields) -> list[str]:
    local = fields.get("local_layer_ids")
    is_local = (lambda i: (i + 1) % 6) if local is None else (lambda i: i in local)
    return choose(range(fields.num_layers), is_local, HYBRID_SLIDING, HYBRID)


def gpt_neo(fields: Fields) -> list[str]:
    """`attention_types` such as [[["global", "local"], 12]]: each list repeated."""
    given = fields.get("attention_layers")
    if given is None:
        given = [kind for kinds, times in fields.get("attention_types", ()) for kind in list(kinds) * times]
    return [LEGACY[kind] for kind in given]


PATTERNS: dict[str, Pattern] = {
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), full_every(2)),
    **dict.fromkeys(("gemma3_text", "gemma3"), full_every(6, "sliding_window_pattern", "_sliding_window_pattern")),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "beam", "embedding_gemma2_text"), last_is_full(full_every(6))
    ),
    "gemma3n_text": full_every(5),
    "kolibri1": full_every(5),
    "olmo3": full_every(4),
    **dict.fromkeys(("cohere2", "exaone4", "exaone_moe"), full_every(4, "sliding_window_pattern")),
    "afmoe": full_every(4, "global_attn_every_n_layers"),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), first_of_four_full),
    **dict.fromkeys(("muse_spark_text", "muse_glimmer_text"), full_from_the_end),
    **dict.fromkeys(("laguna", "mellum", "cohere_compass_text", "step3p7_text"), all_of(FULL)),
    "cohere2_moe": cohere2_moe,
    "flint": flint,
    "modernbert-decoder": modernbert_decoder,
    "dots1": dots,
    **dict.fromkeys(("qwen2", "qwen3"), window_from_layer),
    "qwen2_moe": qwen2_moe,
    "llama4_text": llama4,
    "smollm3": smollm3,
    "mimo_v2_flash": mimo,
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        full_every(4, "full_attention_interval", other=LINEAR),
    ),
    "qwen4_exp_text": full_every(4, "full_attention_interval", other=LINEAR, full=INDEXED),
    "olmo_hybrid": olmo_hybrid,
    "kimi_linear": kimi_linear,
    "bailing_hybrid": bailing_hybrid,
    "glm5_next_text": full_every(4, other=LINEAR, full=INDEXED),
    "minimax": minimax,
    "minimax_m3_vl_text": minimax_m3,
    **dict.fromkeys(("deepseek_v32", "axk2", "glm_moe_dsa", "hy_v4", "mistral_large4_text"), all_of(INDEXED)),
    "deepseek_v4": deepseek_v4,
    "jamba": jamba,
    "zamba": zamba,
    "zamba2": zamba2,
    "bamba": bamba,
    "nemotron_h": nemotron_h,
    "granitemoehybrid": all_of(LINEAR),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), all_of(LINEAR)),
    **dict.fromkeys(("falcon_h1", "zaya"), all_of(HYBRID)),
    **dict.fromkeys(("lfm2", "lfm2_moe"), lfm2),
    "recurrent_gemma": recurrent_gemma,
    "longcat_flash": longcat,
    "inkling_text": inkling,
    "gpt_neo": gpt_neo,
}


def layer_kinds(fields: Fields) -> list[str]:
    """The kind of every layer; a list may be longer than the model (a draft tail)."""
    given = fields.get("layer_types")
    if given is not None:
        return [LEGACY.get(kind, kind) for kind in as_list(given, "layer_types")]
    return PATTERNS.get(fields.family, plain)(fields)

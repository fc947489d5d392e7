"""What attention layers keep: keys and values, latents, index keys."""

from __future__ import annotations

from dataclasses import replace

from kvweave.spec.dtypes import DType
from kvweave.spec.hf.fields import Fields
from kvweave.spec.hf.patterns import rope_layers
from kvweave.spec.layer_caches import CacheBuilder, Caches
from kvweave.spec.layer_spec import LayerCache
from kvweave.spec.reach import Chunk, Full, Reach, Window
from kvweave.spec.role import Role


def head_dim(fields: Fields) -> int:
    if fields.get("head_dim"):
        return fields.count("head_dim")
    return fields.count("hidden_size") // fields.count("num_attention_heads", least=1)


def kv_heads(fields: Fields) -> int:
    if fields.has("num_key_value_heads"):
        return fields.count("num_key_value_heads")
    return 1 if fields.get("multi_query") else fields.count("num_attention_heads")


def window(fields: Fields) -> Reach:
    tokens = fields.count("sliding_window")
    if fields.get("use_bidirectional_attention") in (True, "all"):
        tokens = tokens // 2 + 1
    return Window(tokens)


def rows(fields: Fields, build: CacheBuilder, reach: Reach) -> Caches:
    """Keys and values, or a latent where the model compresses them."""
    if fields.get("kv_lora_rank"):
        return (build.latent(fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")),)
    return (build.attention(kv_heads(fields), head_dim(fields), fields.get("v_head_dim"), reach),)


def full(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    return rows(fields, build, Full())


def reference_sliding(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """A window over what is generated, with all of the prompt beside it: as long as the prompt, so planned as full."""
    return rows(fields, build, Full())


def sliding(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    return rows(fields, build, window(fields))


def chunked(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    return rows(fields, build, build.chunk(fields.count("attention_chunk_size")))


def nothing(_fields: Fields, _build: CacheBuilder, _layer: int) -> Caches:
    return ()


# ---- sparse attention with an indexer


def owns_indexer(fields: Fields, layer: int) -> bool:
    """Layers may share the selection of an earlier one, and then keep no index keys."""
    types = fields.get("indexer_types") or fields.get("index_topk_pattern")
    if types is not None and layer < max(len(types), fields.num_layers):  # draft layers may be beyond the list
        return types[layer] in ("full", "F")
    every, offset = fields.count("index_topk_freq", 1, least=1), fields.count("index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % every == 0


def indexed(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    if not owns_indexer(fields, layer):
        return full(fields, build, layer)
    return (*full(fields, build, layer), build.indexer(fields.count("index_head_dim")))


def hy_v4(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    if fields.get("indexer_types") is None and layer and (layer - 1) % 4:
        return full(fields, build, layer)
    return indexed(fields, build, layer)


def mistral_large4(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """NoPE layers have no rope columns."""
    rope = fields.count("qk_rope_head_dim") if rope_layers(fields)[layer] else 0
    latent = build.latent(fields.count("kv_lora_rank"), rope)
    return (latent, build.indexer(fields.count("index_head_dim"))) if owns_indexer(fields, layer) else (latent,)


def glm5_next(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """Index keys are pooled over `index_kpool` tokens; until a pool is full, its keys and gates wait."""
    dim, pool = fields.count("index_head_dim"), fields.count("index_kpool", 16)
    if not owns_indexer(fields, layer):
        return full(fields, build, layer)
    if not build.engine:
        return (*full(fields, build, layer), build.indexer(2 * dim + 1))
    waiting = Role("compressor_state", (2, dim), DType.FLOAT32)
    return (
        *full(fields, build, layer),
        build.indexer(dim, pool),
        LayerCache("indexer_state", Chunk(pool), (waiting,), block_tokens=pool),
    )


def minimax_m3_sparse(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    return (*full(fields, build, layer), build.indexer(fields.count("index_head_dim", 128), heads=1))


def mimo_sliding(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """Windows have heads and widths of their own; transformers leaves that to its code, whatever a config says."""

    def own(name: str) -> int | None:
        return fields.get(name) if build.engine else None

    heads = own("swa_num_key_value_heads") or 2 * kv_heads(fields)
    key_dim = own("swa_head_dim") or head_dim(fields)
    value_dim = own("swa_v_head_dim") or fields.get("v_head_dim")
    size = fields.config.get("sliding_window_size")
    reach = Window(size + 1 if size else fields.count("sliding_window"))
    return (build.attention(heads, key_dim, value_dim, reach),)


def gemma4_full(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """Full layers have a head width of their own, and where keys double as values, a head count too."""
    if fields.config.get("per_layer_config"):
        return full(fields, build, _layer)
    heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v", True) else None
    return (build.attention(heads or kv_heads(fields), fields.count("global_head_dim", 512)),)


def searched(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """Layers found by architecture search (Nemotron Ultra, DeciLM): each with its own head groups, or none."""
    attention = fields.get("block_configs")[layer]["attention"]
    if not attention.get("n_heads_in_group"):
        return ()
    return (build.attention(fields.count("num_attention_heads") // attention["n_heads_in_group"], head_dim(fields)),)


def longcat(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """Two attention blocks a layer, and so two caches."""
    (latent,) = full(fields, build, layer)
    return latent, replace(latent, tag="second_latent")


def falcon(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """Grouped heads exist in the new decoder only, where transformers repeats them before it caches them."""
    new, heads = fields.get("new_decoder_architecture"), fields.count("num_attention_heads")
    if new:
        heads = kv_heads(fields) if build.engine else heads
    elif fields.get("multi_query"):
        heads = 1
    return (build.attention(heads, head_dim(fields)),)


def mllama(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    """Cross-attention layers keep nothing of the text."""
    return () if layer in fields.get("cross_attention_layers", ()) else full(fields, build, layer)


def modernbert(fields: Fields, build: CacheBuilder, _layer: int, reach: Reach | None = None) -> Caches:
    """Every query head has keys of its own, whatever other fields a config carries."""
    heads = fields.count("num_attention_heads", least=1)
    return (build.attention(heads, fields.count("hidden_size") // heads, reach=reach),)


def modernbert_sliding(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    return modernbert(fields, build, layer, Window(fields.count("local_attention") // 2))


def gpt_neo_local(fields: Fields, build: CacheBuilder, layer: int) -> Caches:
    return rows(fields, build, Window(fields.count("window_size"))) if build.engine else full(fields, build, layer)

"""Small models of every kind for the tests of tensors."""

from __future__ import annotations

from typing import Any

from kvweave import from_config, make_plan
from kvweave.plan import Plan, PoolRequest
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Read, Role, State, Window

KEY, VALUE = (Role(name, (2, 8), DType.BFLOAT16, token_axis=1) for name in ("key", "value"))
FULL = LayerCache("full", Full(), (KEY, VALUE))
NEAR = LayerCache("window", Window(24), (KEY, VALUE))
STATE = LayerCache(
    "state",
    State(),
    (Role("conv_state", (12, 3), DType.BFLOAT16), Role("ssm_state", (4, 8, 8), DType.FLOAT32)),
)
HYBRID = ModelSpec(
    "hybrid",
    (Layer((FULL,)), Layer((NEAR,)), Layer((STATE,)), Layer((STATE,)), Layer((FULL,)), Layer(reads=(Read(4, "full"),))),
)
DSA = from_config(
    {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "dtype": "bfloat16",
    },
    dtype="fp8",
)
V4 = from_config(
    {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [0, 4, 128, 4],
        "dtype": "bfloat16",
    },
    dtype="fp8",
)


def pages(spec: ModelSpec, count: int) -> dict[str, PoolRequest]:
    return {
        tag: PoolRequest(pages=count if cache.block_tokens is None else 64 * count)
        for tag, (cache, _) in spec.groups().items()
    }


def lives() -> dict[str, Plan]:
    """Plans for lives of sequences: both layouts, all kinds of pools, kernel blocks smaller than blocks."""
    how: dict[str, tuple[ModelSpec, int, dict[str, Any]]] = {
        "hybrid page_major": (HYBRID, 900_000, {"block_tokens": 8, "kernel_tokens": 4}),
        "hybrid layer_major": (HYBRID, 900_000, {"block_tokens": 8, "layout": "layer_major"}),
        "hybrid independent": (
            HYBRID,
            900_000,
            {"block_tokens": {"full": 4, "window": 8, "state": 8}, "own_pools": pages(HYBRID, 40)},
        ),
        "dsa fp8": (DSA, 6_000_000, {"block_tokens": 64}),
        "dsa fp8 layer_major": (
            DSA,
            6_000_000,
            {"block_tokens": {"latent": 16, "indexer": 128}, "layout": "layer_major"},
        ),
        "v4": (V4, 100_000_000, {"block_tokens": 256, "own_pools": pages(V4, 12)}),
    }
    return {name: make_plan(spec, memory, **wishes) for name, (spec, memory, wishes) in how.items()}

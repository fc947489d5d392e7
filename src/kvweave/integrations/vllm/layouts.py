"""How each of vLLM's kernels lays out its memory, as views that a store can read: blocks, rows, then a row's own axes.

    registered          in memory                          kernels
    [B, H, N, K|V]      as registered                      FlashAttention, FlashInfer, Triton, FlexAttention
    [B, H, N, K|V]      each head: K as [D, N], then V     the CPU's, but for AMX, which packs tiles
    [B, 1, N, C]        as registered                      MLA: one latent for all heads
    [B, *state]         convolutions as [columns, channels] or the other way; delta nets as [heads, value, key], the
                        CPU's as [heads, key, value], whatever is registered

What a view claims is proved when the engine starts (`probe`). A kernel that is not in the tables is not guessed at:
its pages are stored as they are (`binding.opaque_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Views = dict[str, Any]
"""By role: a tensor, permuted, never copied."""


def adjacent(cache: Any, key_dim: int) -> Views:
    """Key and value of a token and head side by side."""
    rows = cache.transpose(1, 2)
    return {"key": rows[..., :key_dim], "value": rows[..., key_dim:]}


def transposed_keys(cache: Any, key_dim: int) -> Views:
    """Of each block and head first all keys, dimension by dimension, then all values, token by token."""
    blocks, heads, tokens, width = cache.shape
    flat = cache.view(blocks, heads, tokens * width)
    keys, values = flat[..., : tokens * key_dim], flat[..., tokens * key_dim :]
    return {
        "key": keys.unflatten(2, (key_dim, tokens)).permute(0, 3, 1, 2),
        "value": values.unflatten(2, (tokens, width - key_dim)).permute(0, 2, 1, 3),
    }


def latent(cache: Any, key_dim: int) -> Views:  # noqa: ARG001 - a row is one piece
    return {"latent": cache.squeeze(1)}


ATTENTION: Mapping[str, Callable[[Any, int], Views]] = {
    "CPU_ATTN vec": transposed_keys,
    "CPU_ATTN vec16": transposed_keys,
    "FLASH_ATTN": adjacent,
    "FLASHINFER": adjacent,
    "TRITON_ATTN": adjacent,
    "FLEX_ATTENTION": adjacent,
    "CPU_MLA": latent,
    "TRITON_MLA": latent,
    "FLASHMLA": latent,
    "FLASH_ATTN_MLA": latent,
    "FLASHINFER_MLA": latent,
    "CUTLASS_MLA": latent,
}
"""By backend and variant. AMX packs tiles of both keys and values: it is not here."""

STATES: Mapping[str, tuple[str, ...]] = {
    "MAMBA1": ("conv_state", "ssm_state"),
    "MAMBA2": ("conv_state", "ssm_state"),
    "GDN_ATTN": ("conv_state", "ssm_state"),
    "SHORT_CONV": ("conv_state",),
    "LINEAR": ("ssm_state",),
}
"""By kind of state: the roles, in vLLM's order."""
VALUE_FIRST = frozenset({"GDN_ATTN"})
"""Kinds whose recurrent state is `[heads, value, key]`; ours is `[heads, key, value]`."""
ON_CPU = " on the CPU"
"""After the kind of a state whose kernels are the CPU's: its delta nets keep `[heads, key, value]`, though registered
the other way round."""


def attention_views(kind: str, cache: Any, key_dim: int) -> Views | None:
    """None: this backend is not in the table, or its tensor is not as the table says."""
    layout = ATTENTION.get(kind)
    if layout is None or cache.ndim != 4 or cache.shape[3] < key_dim:
        return None
    return layout(cache, key_dim)


def state_views(kind: str, states: Sequence[Any], *, channels_first: bool) -> Views | None:
    """`channels_first`: convolutions are `[channels, columns]`, as vLLM's setting says."""
    names = STATES.get(kind.removesuffix(ON_CPU), ())
    if len(names) != len(states):
        return None
    views = dict(zip(names, states, strict=True))
    if "conv_state" in views and not channels_first:
        views["conv_state"] = views["conv_state"].transpose(1, 2)
    if kind in VALUE_FIRST:
        views["ssm_state"] = views["ssm_state"].transpose(2, 3)
    return views

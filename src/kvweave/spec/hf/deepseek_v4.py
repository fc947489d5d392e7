"""DeepSeek V4: one K = V row, a window of them, and compressed rows beyond it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvweave.errors import ConfigError
from kvweave.spec.dtypes import DType
from kvweave.spec.hf.attention import head_dim
from kvweave.spec.hf.fields import Fields
from kvweave.spec.hf.patterns import CSA, HCA
from kvweave.spec.layer_caches import CacheBuilder, Caches
from kvweave.spec.layer_spec import LayerCache
from kvweave.spec.reach import Chunk, Full, Reach, State, Window
from kvweave.spec.role import Part, Role


@lru_cache(maxsize=64)
def v4_row(build: CacheBuilder, dim: int, tokens_per_row: int, name: str) -> tuple[Role, int]:
    """The role, and the smallest kernel block of its layout."""
    if not build.quant:
        return Role(name, (1, dim), build.dtype, tokens_per_row, token_axis=1), 1
    if not build.quant.packed:
        raise ConfigError(f"DeepSeek V4 rows have no {build.quant.dtype} layout; take fp8, or a float dtype")
    # 448 fp8 + 64 bfloat16 = 576 bytes of data, then 7 scales of one byte and one of padding
    rope = 64
    scales = -(-(dim - rope) // 64)
    parts = [Part("data", (dim + rope,), DType.UINT8), Part("scale", (scales + scales % 2,), DType.UINT8)]
    role = Role.packed(name, parts, planar=True, align=576, tokens_per_row=tokens_per_row)
    return role, min(64 * tokens_per_row, 256)  # V4's kernels read 64 rows at once, or those of 256 tokens


def v4_window(fields: Fields, build: CacheBuilder, copies: bool = False) -> LayerCache:
    role, kernel_tokens = v4_row(build, head_dim(fields), 1, "key")
    value = replace(role, name="value", alias_of=None if copies else "key")
    reach = Window(fields.count("sliding_window"))
    return LayerCache("window", reach, (role, value), kernel_tokens=kernel_tokens)


def v4_sliding(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    """transformers keeps two copies of the row here, and one beside a compressor."""
    return (v4_window(fields, build, copies=not build.engine),)


def v4_rate(fields: Fields, kind: str) -> int:
    return int(fields.get(f"compress_rates.{kind}", {CSA: 4, HCA: 128}[kind]))


def v4_state(build: CacheBuilder, tag: str, dim: int, rate: int, overlaps: bool) -> Caches:
    """What a compressor remembers of tokens whose row is not written yet."""
    series = 2 if overlaps else 1
    if build.engine:
        reach: Reach = Window(2 * rate) if overlaps else Chunk(rate)
        role = Role("compressor_state", (series, 2, dim), DType.FLOAT32)
        return (LayerCache(f"{tag}_state", reach, (role,), block_tokens=4 if overlaps else 8),)
    waiting = LayerCache(f"{tag}_state", Chunk(rate), (Role("compressor_state", (2, series * dim), build.dtype),))
    if not overlaps:
        return (waiting,)
    overlap = LayerCache(f"{tag}_overlap", State(), (Role("overlap_state", (2, rate, dim), build.dtype),))
    return waiting, overlap


def v4_csa(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    rate, dim, index_dim = v4_rate(fields, CSA), head_dim(fields), fields.count("index_head_dim")
    row, kernel_tokens = v4_row(build, dim, rate, "compressed")
    return (
        v4_window(fields, build),
        LayerCache("csa", Full(), (row,), kernel_tokens=kernel_tokens, context_split=True),
        build.indexer(index_dim, rate),
        *v4_state(build, "csa", dim, rate, overlaps=True),
        *v4_state(build, "indexer", index_dim, rate, overlaps=True),
    )


def v4_hca(fields: Fields, build: CacheBuilder, _layer: int) -> Caches:
    rate, dim = v4_rate(fields, HCA), head_dim(fields)
    row, kernel_tokens = v4_row(build, dim, rate, "compressed")
    return (
        v4_window(fields, build),
        LayerCache("hca", Full(), (row,), kernel_tokens=kernel_tokens, context_split=True),
        *v4_state(build, "hca", dim, rate, overlaps=False),
    )

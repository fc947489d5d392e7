"""The caches that known kinds of layers keep, in the dtype and the convention asked for.

Two conventions are in use. Serving engines (`store="engine"`) keep what the next token cannot do without: K - 1
columns of a convolution, float32 states, chunks that start afresh. transformers (`store="transformers"`) keeps K
columns, treats a chunk as a window, and takes some states in the model's dtype. Windows need no convention: what
`Window.tail` says is what transformers holds between steps, and one row more is what an engine holds within one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvweave.errors import ConfigError, UnknownName
from kvweave.spec.dtypes import DType
from kvweave.spec.layer_spec import LayerCache
from kvweave.spec.reach import Chunk, Full, Reach, State, Window
from kvweave.spec.role import Part, Role, Segment

Store = Literal["engine", "transformers"]
Caches = tuple[LayerCache, ...]
"""What one layer keeps."""

SCALE_BLOCK = 128
"""Values that share one scale in the packed fp8 rows."""


@dataclass(frozen=True, slots=True)
class Quant:
    """How plain keys and values are quantised; `scales(heads, dim)` is the shape of a token's scales, if any."""

    dtype: DType
    scales: Literal["none", "token_head", "block"] = "none"
    packed: bool = False
    """Whether latents, indexer keys and V4 rows take the engines' packed fp8 layouts."""

    def scale_shape(self, heads: int, dim: int) -> tuple[int, ...]:
        return (heads,) if self.scales == "token_head" else (heads, -(-dim // SCALE_BLOCK))


QUANTS = {
    "fp8": Quant(DType.FLOAT8_E4M3, packed=True),
    "fp8_e5m2": Quant(DType.FLOAT8_E5M2, packed=True),
    "fp8_token_head": Quant(DType.FLOAT8_E4M3, "token_head", packed=True),
    "fp8_block": Quant(DType.FLOAT8_E4M3, "block", packed=True),
    "int8": Quant(DType.INT8, "token_head"),
    "int4": Quant(DType.INT4, "token_head"),
}
FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class CacheBuilder:
    """Makes layer caches. `dtype` is the model's, `quant` what attention rows are quantised to."""

    dtype: DType
    quant: Quant | None = None
    store: Store = "engine"

    @classmethod
    def parse(cls, dtype: str, model_dtype: DType, store: Store) -> CacheBuilder:
        """`dtype` is "auto", a float type, or one of `QUANTS`."""
        if dtype == "auto":
            return cls(model_dtype, None, store)
        if dtype in QUANTS:
            return cls(model_dtype, QUANTS[dtype], store)
        short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
        name = short.get(dtype, dtype)
        if name not in FLOATS:
            raise UnknownName("cache dtype", dtype, ["auto", *FLOATS, *QUANTS])
        return cls(DType(name), None, store)

    @property
    def engine(self) -> bool:
        return self.store == "engine"

    # ---- attention rows

    def attention(
        self, heads: int, key_dim: int, value_dim: int | None = None, reach: Reach | None = None
    ) -> LayerCache:
        """Keys and values of `heads` heads, laid out `[heads, tokens, dim]` in a kernel block."""
        reach = reach or Full()
        dims = {"key": key_dim, "value": key_dim if value_dim is None else value_dim}
        dtype, quant, split = self.dtype, self.quant, (Segment(heads),)
        if quant is not None:
            dtype = quant.dtype
        roles = [Role(name, (heads, dim), dtype, token_axis=1, split=split) for name, dim in dims.items()]
        if quant is not None and quant.scales != "none":
            roles += [
                Role(f"{name}_scale", quant.scale_shape(heads, dim), DType.FLOAT32, token_axis=1, split=split)
                for name, dim in dims.items()
            ]
        return LayerCache(reach.kind, reach, tuple(roles), context_split=reach.span is None)

    def chunk(self, tokens: int) -> Reach:
        return Chunk(tokens) if self.engine else Window(tokens)

    def latent(self, rank: int, rope: int) -> LayerCache:
        """A compressed latent (MLA): one row for all heads, so every tensor-parallel rank holds it whole."""
        roles: tuple[Role, ...]
        if self._packs("MLA latents"):
            parts = [
                Part("nope", (rank,), DType.FLOAT8_E4M3),
                Part("scale", (-(-rank // SCALE_BLOCK),), DType.FLOAT32),
                Part("rope", (rope,), DType.BFLOAT16),
            ]
            roles = (Role.packed("latent", [part for part in parts if part.num_bytes]),)
        elif self.engine:
            roles = (Role("latent", (rank + rope,), self.dtype),)
        else:
            roles = (
                Role("latent", (1, rank), self.dtype, token_axis=1),
                Role("rope", (1, rope), self.dtype, token_axis=1),
            )
        return LayerCache("latent", Full(), roles, context_split=True)

    def indexer(self, dim: int, tokens_per_row: int = 1, heads: int | None = None) -> LayerCache:
        """A sparse-attention indexer's keys. Packed pages are planar: all values, then all scales (132 bytes a row)."""
        if heads is None and self._packs("indexer keys"):
            parts = [Part("values", (dim,), DType.FLOAT8_E4M3), Part("scale", (-(-dim // SCALE_BLOCK),), DType.FLOAT32)]
            role = Role.packed("indexer", parts, planar=True, tokens_per_row=tokens_per_row)
            return LayerCache("indexer", Full(), (role,), kernel_tokens=64 * tokens_per_row)
        shape = (dim,) if heads is None else (heads, dim)
        return LayerCache("indexer", Full(), (Role("indexer", shape, self.dtype, tokens_per_row),))

    def _packs(self, what: str) -> bool:
        if self.quant is None:
            return False
        if not self.quant.packed:
            raise ConfigError(f"{what} have no {self.quant.dtype} layout; take fp8, or a float dtype")
        return True

    # ---- states

    def state(self, conv: Role | None = None, ssm: Role | None = None, *more: Role, tag: str = "state") -> LayerCache:
        """A recurrent layer: one snapshot a page."""
        return LayerCache(tag, State(), tuple(role for role in (conv, ssm, *more) if role is not None))

    def conv(
        self, kernel: int, segments: Sequence[Segment], name: str = "conv_state", dtype: DType | None = None
    ) -> Role:
        """A causal convolution's last columns, channel by channel."""
        channels = sum(segment.units * segment.width for segment in segments)
        columns = kernel - 1 if self.engine else kernel
        return Role(name, (channels, columns), dtype or self.dtype, split=tuple(segments))

    def ssm(self, shape: tuple[int, ...], dtype: DType = DType.FLOAT32, name: str = "ssm_state") -> Role:
        """A recurrent state; its first axis (heads or channels) is what tensor parallelism divides."""
        return Role(name, shape, dtype, split=(Segment(shape[0]),))

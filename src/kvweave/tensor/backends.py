"""Built-in backends: frozen values with the sizes of their kind. They declare the same caches as `from_config` does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvweave.spec import DType, LayerCache, Role, Segment, State
from kvweave.tensor.backend import LayerRequest

Caches = tuple[LayerCache, ...]


def _tagged(cache: LayerCache, request: LayerRequest) -> LayerCache:
    return cache if request.tag is None else replace(cache, tag=request.tag)


@dataclass(frozen=True, slots=True)
class GQA:
    """Keys and values of some heads (MHA: of all), in full or in the request's window; with scales if quantised."""

    not_hosted: ClassVar[str] = ""

    def caches(self, request: LayerRequest) -> Caches:
        made = request.build.attention(request.heads, request.key_dim, request.value_dim, request.reach)
        return (_tagged(made, request),)


@dataclass(frozen=True, slots=True)
class MLA:
    """A latent of `rank` numbers and `rope` rotary ones, shared by all heads; in fp8, packed rows of 656 bytes."""

    rank: int = 512
    rope: int = 64
    not_hosted: ClassVar[str] = ""

    def caches(self, request: LayerRequest) -> Caches:
        return (_tagged(request.build.latent(self.rank, self.rope), request),)


@dataclass(frozen=True, slots=True)
class DSA:
    """MLA and an indexer's keys, in groups of their own; in fp8, planar pages of 132 bytes a row."""

    rank: int = 512
    rope: int = 64
    index_dim: int = 128
    not_hosted: ClassVar[str] = ""

    def caches(self, request: LayerRequest) -> Caches:
        return (request.build.latent(self.rank, self.rope), request.build.indexer(self.index_dim))


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of a linear-attention or Mamba layer: the last columns of a convolution, if any, and a recurrent state.

    `channels` are the convolution's, in segments that tensor parallelism divides one by one (q, k and v of GDN).
    """

    state: tuple[int, ...]
    channels: tuple[Segment, ...] = ()
    conv_kernel: int = 4
    state_dtype: DType = DType.FLOAT32
    not_hosted: ClassVar[str] = ""

    def caches(self, request: LayerRequest) -> Caches:
        build = request.build
        conv = build.conv(self.conv_kernel, self.channels) if self.channels else None
        return (_tagged(build.state(conv, build.ssm(self.state, self.state_dtype)), request),)


@dataclass(frozen=True, slots=True)
class Opaque:
    """`num_bytes` bytes a token (or a state, if the request's reach is one) whose meaning only the kernel knows."""

    num_bytes: int
    align: int = 1
    kernel_tokens: int = 1
    not_hosted: str = ""

    def caches(self, request: LayerRequest) -> Caches:
        tag = "opaque_state" if isinstance(request.reach, State) else "opaque"
        role = Role("opaque", (self.num_bytes,), DType.UINT8, align=self.align)
        return (_tagged(LayerCache(tag, request.reach, (role,), kernel_tokens=self.kernel_tokens), request),)


@dataclass(frozen=True, slots=True)
class NoCache:
    """Keeps nothing: a layer without attention, or one that reads the cache of another layer."""

    not_hosted: ClassVar[str] = ""

    def caches(self, request: LayerRequest) -> Caches:  # noqa: ARG002
        return ()

"""Backends: an attention backend declares what its layer keeps. Allocation, naming and views are the same for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Reach, Read
from kvweave.spec.layer_caches import CacheBuilder
from kvweave.spec.role import role_order


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """A layer of a model, as far as its cache is concerned. `heads` counts KV heads, before tensor parallelism divides
    them.

    `quant` is "auto" (none) or one of fp8, fp8_e5m2, fp8_token_head, fp8_block, int8, int4. `reads` are layers whose
    caches this layer reads. `tag` names the group, where two groups of the model would otherwise have one name.
    """

    layer: int
    heads: int = 1
    key_dim: int = 128
    value_dim: int | None = None
    reach: Reach = Full()  # noqa: RUF009  (frozen)
    dtype: DType = DType.BFLOAT16
    quant: str = "auto"
    reads: tuple[Read, ...] = ()
    draft: bool = False
    tag: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))

    @property
    def build(self) -> CacheBuilder:
        """Makes the caches of known kinds in this layer's dtype and quantisation."""
        return CacheBuilder.parse(self.quant, self.dtype, "engine")


class AttentionBackend(Protocol):
    """Declares what a layer keeps. It allocates nothing and names no tensors; roles may come in any order."""

    @property
    def not_hosted(self) -> str:
        """Why pages of its caches must not be copied to the host; "" where they may be."""
        ...

    def caches(self, request: LayerRequest) -> Iterable[LayerCache]:
        """What a layer keeps: nothing, one cache, or several under different tags."""
        ...


Pairing = tuple[AttentionBackend, LayerRequest]


def assemble(model_type: str, layers: Sequence[Pairing], max_tokens: int | None = None) -> ModelSpec:
    """The model spec made of what the backends declare, each layer at its own number, in whatever order they are given.

    A layer may have several backends (attention beside a state) and keeps what all of them declare. A number without a
    backend is a layer that keeps nothing.
    """
    count = max((request.layer for _, request in layers), default=-1) + 1
    made = [_layer([pairing for pairing in layers if pairing[1].layer == number]) for number in range(count)]
    return ModelSpec(model_type, tuple(made), max_tokens)


def _layer(pairings: Sequence[Pairing]) -> Layer:
    """Sorted by the priority of the first role, then by tag, so that the order of the arguments does not matter."""
    caches = [cache for backend, request in pairings for cache in backend.caches(request)]
    caches.sort(key=lambda cache: (role_order(cache.roles[0].name), cache.tag))
    reads = sorted({read for _, request in pairings for read in request.reads}, key=lambda read: (read.tag, read.layer))
    return Layer(tuple(caches), tuple(reads), any(request.draft for _, request in pairings))


def not_hosted(layers: Sequence[Pairing]) -> dict[str, str]:
    """By tag, why a group cannot be mirrored on the host; one such layer is enough."""
    return {
        cache.tag: backend.not_hosted
        for backend, request in layers
        if backend.not_hosted
        for cache in backend.caches(request)
    }

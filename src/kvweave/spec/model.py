"""Models: what all layers keep, checked against one another; JSON in and out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kvweave.errors import SpecError, UnknownName
from kvweave.spec import codec
from kvweave.spec.layer_spec import Layer, LayerCache, Read, difference, holds_state


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What every layer of a model keeps. Caches with one tag are equal in reach and layout, over all layers.

    `placeholders` are caches that no layer here keeps, but whose groups must exist: those of other pipeline stages, or
    of the target of a draft. `notes` say what a reader assumed on the way (a default, a rule it fell back on).
    """

    model_type: str
    layers: tuple[Layer, ...]
    max_tokens: int | None = None
    placeholders: tuple[LayerCache, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise SpecError(f"model {self.model_type!r} has no layers")
        first: dict[str, tuple[int, LayerCache]] = {}
        for index, cache in self.caches():
            owner, equal = first.setdefault(cache.tag, (index, cache))
            if cache is not equal and cache != equal:
                raise SpecError(
                    f"layers {owner} and {index} both use tag {cache.tag!r}, but differ in {difference(equal, cache)};"
                    " give them different tags"
                )
        self._set_placeholders({tag: cache for tag, (_, cache) in first.items()})
        for index, layer in enumerate(self.layers):
            self._check_reads(index, layer)

    def _set_placeholders(self, kept: Mapping[str, LayerCache]) -> None:
        """Those that no layer keeps after all, each once."""
        others: dict[str, LayerCache] = {}
        for cache in self.placeholders:
            equal = kept.get(cache.tag) or others.setdefault(cache.tag, cache)
            if cache != equal:
                raise SpecError(f"two caches use tag {cache.tag!r}, but differ in {difference(equal, cache)}")
        object.__setattr__(self, "placeholders", tuple(others.values()))

    def _check_reads(self, index: int, layer: Layer) -> None:
        """Every read leads to a cache, and every role of a tag to one place."""
        seen = {(cache.tag, role.name): index for cache in layer.caches for role in cache.roles}
        for read in layer.reads:
            self._check_read(index, read)
            for name in read.roles or [role.name for role in self.layers[read.layer].cache(read.tag).roles]:
                other = seen.setdefault((read.tag, name), read.layer)
                if other != read.layer:
                    both = f"of layer {read.layer} and {'its own' if other == index else f'of layer {other}'}"
                    raise SpecError(f"layer {index} has role {name!r} of tag {read.tag!r} twice: {both}")

    def _check_read(self, index: int, read: Read) -> None:
        where = f"layer {index} reads layer {read.layer}"
        if not 0 <= read.layer < len(self.layers) or read.layer == index:
            raise SpecError(f"{where}, but the model has layers 0 to {len(self.layers) - 1}")
        source = self.layers[read.layer]
        if read.tag not in {cache.tag for cache in source.caches}:
            raise UnknownName(f"tag ({where})", read.tag, [cache.tag for cache in source.caches])
        for name in read.roles:
            source.cache(read.tag).role(name)

    def caches(self) -> Iterator[tuple[int, LayerCache]]:
        """Every (layer, cache), layer by layer."""
        for index, layer in enumerate(self.layers):
            for cache in layer.caches:
                yield index, cache

    def groups(self) -> dict[str, tuple[LayerCache, tuple[int, ...]]]:
        """By tag, in order of first use: the cache, and the layers that keep one (none for placeholders)."""
        members: dict[str, list[int]] = {}
        caches: dict[str, LayerCache] = {}
        for index, cache in self.caches():
            members.setdefault(cache.tag, []).append(index)
            caches.setdefault(cache.tag, cache)
        for cache in self.placeholders:
            caches.setdefault(cache.tag, cache)
        return {tag: (cache, tuple(members.get(tag, ()))) for tag, cache in caches.items()}

    @property
    def num_layers(self) -> int:
        """Layers of the model itself, draft layers apart."""
        return sum(not layer.draft for layer in self.layers)

    def bytes_per_token(self) -> Fraction:
        """Marginal bytes a token, over all layers."""
        return sum((cache.bytes_per_token() for _, cache in self.caches()), Fraction(0))

    def window_bytes(self) -> int:
        """Fixed bytes a sequence keeps in windows and chunks."""
        return sum(cache.fixed_bytes() for _, cache in self.caches() if not holds_state(cache))

    def state_bytes(self) -> int:
        """Fixed bytes a sequence keeps in recurrent, convolution and compressor states."""
        return sum(cache.fixed_bytes() for _, cache in self.caches() if holds_state(cache))

    def map_caches(self, change: Callable[[LayerCache], LayerCache]) -> ModelSpec:
        """The same model with each cache changed; reads follow the tags of what they read."""
        changed: dict[str, LayerCache] = {tag: change(cache) for tag, (cache, _) in self.groups().items()}
        layers = tuple(
            replace(
                layer,
                caches=tuple(changed[cache.tag] for cache in layer.caches),
                reads=tuple(replace(read, tag=changed[read.tag].tag) for read in layer.reads),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, placeholders=tuple(changed[cache.tag] for cache in self.placeholders))

    def retag(self, tags: Mapping[str, str]) -> ModelSpec:
        """The same model with other tags; tags not named stay."""
        return self.map_caches(lambda cache: replace(cache, tag=tags.get(cache.tag, cache.tag)))

    def restrict(self, keep: Container[int]) -> ModelSpec:
        """Some layers of this model, with their numbers: the others are there, but empty, and so are their groups.

        What a pipeline stage keeps, or what a draft model sees of the target that it was merged into.
        """
        for index, layer in enumerate(self.layers):
            for read in layer.reads:
                if index in keep and read.layer not in keep:
                    raise SpecError(f"layer {index} reads the cache of layer {read.layer}, which is not kept with it")
        layers = tuple(layer if i in keep else Layer(draft=layer.draft) for i, layer in enumerate(self.layers))
        used = {cache.tag for layer in layers for cache in layer.caches}
        others = tuple(cache for tag, (cache, _) in self.groups().items() if tag not in used)
        return replace(self, layers=layers, placeholders=others)

    # ---- JSON: each cache once, layers by tag

    def to_dict(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "caches": [codec.to_dict(cache) for cache, _ in self.groups().values()],
            "layers": [
                codec.to_dict(_LayerTags(tuple(cache.tag for cache in layer.caches), layer.reads, layer.draft))
                for layer in self.layers
            ],
            "max_tokens": self.max_tokens,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        read = codec.from_dict(_ModelTags, data, "model spec")
        caches = {cache.tag: cache for cache in read.caches}
        if len(caches) != len(read.caches):
            raise SpecError("model spec.caches: a tag is declared twice")
        layers = []
        for index, layer in enumerate(read.layers):
            for tag in layer.tags:
                if tag not in caches:
                    raise UnknownName(f"tag (model spec.layers[{index}])", tag, caches)
            layers.append(Layer(tuple(caches[tag] for tag in layer.tags), layer.reads, layer.draft))
        used = {tag for layer in read.layers for tag in layer.tags}
        unused = tuple(cache for tag, cache in caches.items() if tag not in used)
        return cls(read.model_type, tuple(layers), read.max_tokens, unused, read.notes)

    def digest(self) -> str:
        """A hash of everything that decides the bytes; equal specs, equal digests."""
        data = {**self.to_dict(), "notes": []}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _LayerTags:
    tags: tuple[str, ...] = ()
    reads: tuple[Read, ...] = ()
    draft: bool = False


@dataclass(frozen=True, slots=True)
class _ModelTags:
    model_type: str
    caches: tuple[LayerCache, ...]
    layers: tuple[_LayerTags, ...]
    max_tokens: int | None = None
    notes: tuple[str, ...] = ()

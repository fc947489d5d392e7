"""Layers and models: roles + reach + tag, for as many layers as there are, each different if need be."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kvweave.errors import SpecError, UnknownName
from kvweave.spec import codec
from kvweave.spec.reach import Reach, tokens_needed
from kvweave.spec.role import Role, role_order


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer keeps under one block table: roles, a reach, and the tag of the group it joins.

    `kernel_tokens` is the smallest kernel block that its kernel can read (64 for planar indexer pages); a page is
    never split below it. `block_tokens` is a wish for the group's block where the plan's default would be a poor
    choice. `context_split` says whether context-parallel ranks divide the blocks among them or all hold them.
    """

    tag: str
    reach: Reach
    roles: tuple[Role, ...]
    kernel_tokens: int = 1
    block_tokens: int | None = None
    context_split: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(sorted(self.roles, key=lambda role: role_order(role.name))))
        where = f"cache {self.tag!r}"
        if not self.tag or not self.roles:
            raise SpecError(f"{where}: a cache needs a tag and at least one role")
        names = [role.name for role in self.roles]
        if twice := {name for name in names if names.count(name) > 1}:
            raise SpecError(f"{where}: roles named twice: {', '.join(sorted(twice))}")
        for role in self.roles:
            self._check_role(role, where)
        if not any(role.row_bytes for role in self.roles):
            shapes = ", ".join(f"{role.name} {role.shape}" for role in self.roles)
            raise SpecError(f"{where}: its rows hold 0 bytes ({shapes}); a layer that keeps nothing has no cache")
        if self.kernel_tokens < 1:
            raise SpecError(f"{where}: kernel_tokens must be at least 1, got {self.kernel_tokens}")
        if self.block_tokens is not None and (self.block_tokens < 1 or self.block_tokens % self.unit_tokens):
            raise SpecError(
                f"{where}: block_tokens {self.block_tokens} is no multiple of {self.unit_tokens},"
                " the tokens that its rows and kernel need"
            )

    def _check_role(self, role: Role, where: str) -> None:
        if not self.reach.per_token and role.tokens_per_row != 1:
            raise SpecError(f"{where}: role {role.name!r} has {role.tokens_per_row} tokens a row, but a state has none")
        if role.alias_of is not None:
            target = next((other for other in self.roles if other.name == role.alias_of), None)
            if target is None:
                raise UnknownName(f"{where}: alias of role", role.alias_of, [other.name for other in self.roles])
            if target.alias_of is not None or replace(role, alias_of=None, name=target.name) != target:
                raise SpecError(f"{where}: role {role.name!r} shares the storage of {target.name!r}, so must equal it")

    @property
    def unit_tokens(self) -> int:
        """The tokens that cannot be divided among blocks: whole rows, and what the kernel reads at once."""
        return math.lcm(self.kernel_tokens, *(role.tokens_per_row for role in self.roles))

    def role(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise UnknownName(f"role of cache {self.tag!r}", name, [role.name for role in self.roles])

    def num_rows(self, role: Role, num_tokens: int) -> int:
        """Rows of `role` in a kernel block of `num_tokens`."""
        return num_tokens // role.tokens_per_row if self.reach.per_token else 1

    def bytes_per_token(self) -> Fraction:
        """Marginal bytes of one more token; a fraction where several tokens share a row."""
        if self.reach.span is not None:
            return Fraction(0)
        return sum((Fraction(role.row_bytes, role.tokens_per_row) for role in self.roles), Fraction(0))

    def bytes_at(self, position: int) -> int:
        """Bytes of the whole rows needed to go on from `position`, block rounding apart."""
        return self._bytes_of(tokens_needed(self.reach, position))

    def fixed_bytes(self) -> int:
        """Bytes a long sequence keeps whatever its length: a window's rows, a state. 0 where rows grow."""
        return self._bytes_of(self.reach.span or 0)

    def _bytes_of(self, num_tokens: int) -> int:
        if not self.reach.per_token:
            return sum(role.row_bytes for role in self.roles) if num_tokens else 0
        return sum(num_tokens // role.tokens_per_row * role.row_bytes for role in self.roles)


@dataclass(frozen=True, slots=True)
class Read:
    """A layer reads the cache `tag` of an earlier layer instead of keeping its own; `roles` = () means all."""

    layer: int
    tag: str
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: the caches it keeps (none, one, several), and those of other layers that it reads."""

    caches: tuple[LayerCache, ...] = ()
    reads: tuple[Read, ...] = ()
    draft: bool = False

    def __post_init__(self) -> None:
        tags = [cache.tag for cache in self.caches]
        if twice := {tag for tag in tags if tags.count(tag) > 1}:
            raise SpecError(f"a layer keeps several caches under one tag: {', '.join(sorted(twice))}")

    def cache(self, tag: str) -> LayerCache:
        for cache in self.caches:
            if cache.tag == tag:
                return cache
        raise UnknownName("tag of this layer", tag, [cache.tag for cache in self.caches])


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


def holds_state(cache: LayerCache) -> bool:
    """A snapshot, or a window of states such as a compressor's, rather than a window of attended rows."""
    return not cache.reach.per_token or all(role.name.endswith("_state") for role in cache.roles)


def difference(one: LayerCache, other: LayerCache) -> str:
    """The first field in which two caches differ, with both values."""
    for name in ("reach", "kernel_tokens", "block_tokens", "context_split"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} ({getattr(one, name)} and {getattr(other, name)})"
    names = [tuple(role.name for role in cache.roles) for cache in (one, other)]
    if names[0] != names[1]:
        return f"roles ({', '.join(names[0])} and {', '.join(names[1])})"
    for a, b in zip(one.roles, other.roles, strict=True):
        for name in Role.__slots__:
            if getattr(a, name) != getattr(b, name):
                return f"role {a.name!r} {name} ({getattr(a, name)} and {getattr(b, name)})"
    return "nothing"

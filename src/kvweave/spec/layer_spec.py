"""Layers: what each keeps under which tag (roles and a reach), and what it reads of other layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from kvweave.errors import SpecError, UnknownName
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
        if not isinstance(self.kernel_tokens, int) or self.kernel_tokens < 1:
            raise SpecError(f"{where}: kernel_tokens must be at least 1, got {self.kernel_tokens!r}")
        block_tokens = self.unit_tokens if self.block_tokens is None else self.block_tokens
        if not isinstance(block_tokens, int) or block_tokens < 1 or block_tokens % self.unit_tokens:
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

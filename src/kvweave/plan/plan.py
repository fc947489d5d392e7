"""The plan: a frozen answer to how memory is cut, from which every other part takes its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kvweave.errors import PlanError, UnknownName
from kvweave.plan.group import Group
from kvweave.plan.parallel import Parallel
from kvweave.plan.pool import Layout, Place, Pool
from kvweave.plan.view import View, role_view
from kvweave.spec import Read, codec
from kvweave.spec.layer_spec import holds_state
from kvweave.units import format_bytes

UNLIMITED = 2**31 - 1
MOST_IDS = 2**31 - 1
"""Pages and kernel blocks have int32 ids in tables."""
TYPICAL_TOKENS = 32_768
"""The length of a typical sequence, by which memory is divided unless the caller names another."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups and pools for one rank. JSON in and out; `views` say where every role of every layer lies."""

    model_type: str
    num_layers: int
    groups: tuple[Group, ...]
    pools: tuple[Pool, ...]
    memory: int
    reads: tuple[tuple[int, Read], ...] = ()
    draft_layers: tuple[int, ...] = ()
    reserve: int = 0
    layout: Layout = Layout.PAGE_MAJOR
    parallel: Parallel = field(default_factory=Parallel)
    digest: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)

    def check(self) -> None:
        """Raise `PlanError` where numbers contradict one another, as those of a file may."""
        names, num_layers = [pool.name for pool in self.pools], self.num_layers + len(self.draft_layers)
        if not self.groups or len({group.tag for group in self.groups}) < len(self.groups):
            raise PlanError(f"a plan needs groups with different tags, got {[group.tag for group in self.groups]}")
        if len(set(names)) < len(names) or {g.pool for g in self.groups if g.layers} - set(names):
            raise PlanError(f"pools {names} are not those of the groups: {[group.pool for group in self.groups]}")
        for group in self.groups:
            group.check(range(num_layers), self.parallel.cp)
        for pool in self.pools:
            pool.check(self._members(pool))
        for group in self.groups:
            count = self.pool(group.pool).num_superpages * group.pages_per_superpage if group.layers else 0
            if (count := count * group.kernel_blocks) > MOST_IDS:
                raise PlanError(
                    f"group {group.tag!r} would have {count:,} kernel blocks in {format_bytes(self.memory)}, and their"
                    f" ids end at {MOST_IDS:,}: plan with less memory or larger blocks"
                )
        if not 0 <= self.reserve <= self.num_bytes <= self.memory:
            raise PlanError(f"pools and a reserve of {self.reserve} bytes take {self.num_bytes} bytes of {self.memory}")
        layers = [*self.draft_layers, *(layer for reader, read in self.reads for layer in (reader, read.layer))]
        if any(layer not in range(num_layers) for layer in layers):
            raise PlanError(f"layers {layers} are read or are a draft's, of {num_layers}")

    # ---- looking up

    def group(self, tag: str) -> Group:
        for group in self.groups:
            if group.tag == tag:
                return group
        raise UnknownName("tag", tag, [group.tag for group in self.groups])

    def pool(self, name: str) -> Pool:
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise UnknownName("pool", name, [pool.name for pool in self.pools])

    def num_pages(self, tag: str) -> int:
        """Pages that a group could have if it had its pool to itself, the NULL page apart."""
        group = self.group(tag)
        return self.pool(group.pool).num_usable * group.pages_per_superpage if group.layers else 0

    def view(self, layer: int, role: str, tag: str | None = None) -> View:
        """Where a role of a layer lies; for a layer that reads another's cache, where that one lies."""
        owners = {group.tag: layer for group in self.groups if layer in group.layers}
        for reader, read in self.reads:
            if reader == layer and (not read.roles or role in read.roles):
                owners[read.tag] = read.layer
        if tag is None and len(owners) != 1:
            raise PlanError(f"layer {layer} has the caches {', '.join(owners) or '(none)'}: say which tag")
        tag = next(iter(owners)) if tag is None else tag
        if tag not in owners:
            raise UnknownName(f"tag of layer {layer}", tag, owners)
        group = self.group(tag)
        return role_view(group, self.pool(group.pool), owners[tag], group.cache.role(role))

    def views(self) -> tuple[View, ...]:
        """Every role of every layer that keeps it: by layer, then by group and role in their declared order."""
        owners = sorted((layer, number) for number, group in enumerate(self.groups) for layer in group.layers)
        return tuple(
            self.view(layer, role.name, self.groups[number].tag)
            for layer, number in owners
            for role in self.groups[number].cache.roles
        )

    # ---- bytes

    @property
    def num_bytes(self) -> int:
        """Device bytes of all pools and the reserve."""
        return self.reserve + sum(pool.num_bytes for pool in self.pools if pool.place is Place.DEVICE)

    @property
    def host_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self.pools if pool.place is not Place.DEVICE)

    @property
    def reuse_tokens(self) -> int:
        """The granularity of prefix reuse: prefixes are found at its multiples, where a block of every group ends."""
        return math.lcm(*(group.block_tokens * group.context_shards for group in self.groups))

    def stride_bytes(self, tag: str) -> int:
        """A page's share of its pool, over all lanes."""
        group = self.group(tag)
        return self.pool(group.pool).unit_bytes // group.pages_per_superpage if group.layers else 0

    def padding_bytes(self, tag: str) -> int:
        """Bytes of a page's share of its pool that hold no row: alignment, and what the super-page leaves over."""
        return self.stride_bytes(tag) - self.group(tag).payload_bytes

    def padding_share(self, num_tokens: int = TYPICAL_TOKENS) -> float:
        """The share of a sequence's pages that is padding."""
        held = {group.tag: group.num_blocks_held(num_tokens) for group in self.groups}
        padding = sum(self.padding_bytes(tag) * pages for tag, pages in held.items())
        return padding / max(1, sum(self.stride_bytes(tag) * pages for tag, pages in held.items()))

    def bytes_per_token(self) -> Fraction:
        """Marginal bytes of one more token on this rank, block rounding apart."""
        return sum(
            (g.cache.bytes_per_token() * len(g.layers) / g.context_shards for g in self.groups), start=Fraction(0)
        )

    def window_bytes(self) -> int:
        """Fixed bytes a sequence keeps in windows and chunks."""
        return sum(g.fixed_bytes for g in self.groups if not holds_state(g.cache))

    def state_bytes(self) -> int:
        """Fixed bytes a sequence keeps in states."""
        return sum(g.fixed_bytes for g in self.groups if holds_state(g.cache))

    # ---- capacity

    def superpages_for(self, pool: Pool, num_tokens: int, sequences: int = 1) -> int:
        """Super-pages of a pool that `sequences` sequences of `num_tokens` fill."""
        held = [(g.num_blocks_held(num_tokens) * sequences, g.pages_per_superpage) for g in self._members(pool)]
        return sum(-(-pages // per_super) for pages, per_super in held)

    def sequences(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens` fit at once, none sharing a prefix with another.

        A rank whose layers keep nothing sets no limit.
        """
        return min((self._fit(pool, num_tokens) for pool in self.pools), default=UNLIMITED)

    def _fit(self, pool: Pool, num_tokens: int) -> int:
        need = [(g.num_blocks_held(num_tokens), g.pages_per_superpage) for g in self._members(pool)]
        low, high = 0, pool.num_usable * max(g.pages_per_superpage for g in self._members(pool)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = sum(-(-pages * middle // per_super) for pages, per_super in need) <= pool.num_usable
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _members(self, pool: Pool) -> list[Group]:
        return [group for group in self.groups if group.pool == pool.name]

    # ---- JSON

    def to_dict(self) -> dict[str, Any]:
        return codec.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        plan = codec.from_dict(cls, data, "plan")
        plan.check()
        return plan

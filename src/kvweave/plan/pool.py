"""Pools: memory cut into super-pages, and how much of the budget each gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from kvweave.errors import PlanError
from kvweave.plan.group import Group
from kvweave.plan.superpage import Slice, search, superpages_needed


class Place(StrEnum):
    """Where a pool's memory is; only device bytes count against the plan's memory."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"


class Layout(StrEnum):
    """Which comes first in memory: all pages of a layer, or all layers of a page."""

    LAYER_MAJOR = "layer_major"
    PAGE_MAJOR = "page_major"


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A pool of its own for a group: its number of pages, without the NULL page, or a share by weight; and its
    place."""

    pages: int | None = None
    weight: float | None = None
    place: Place = Place.DEVICE

    def __post_init__(self) -> None:
        if self.pages is not None and self.weight is not None:
            raise PlanError(f"a pool has pages or a weight, not both: pages={self.pages}, weight={self.weight}")
        if self.pages is not None and (not isinstance(self.pages, int) or self.pages < 1):
            raise PlanError(f"a pool needs at least 1 page, got {self.pages}")
        if self.weight is not None and not self.weight > 0:
            raise PlanError(f"a pool's weight must be more than 0, got {self.weight}")
        if self.place is not Place.DEVICE and self.pages is None:
            raise PlanError(f"a {self.place} pool needs a number of pages: it is not part of the device's memory")


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for the groups `tags`: `lanes` lanes of `num_superpages` super-pages of `superpage_bytes` each.

        lane 0   | super-page 0 | super-page 1 | ...
        lane 1   | super-page 0 | super-page 1 | ...

    One lane is page-major: a page is one run of bytes. As many lanes as layers is layer-major. A super-page is the
    same index in every lane, and belongs to one group at a time. Super-page 0 belongs to no group: its first page is
    the NULL page of every group, which tables name where there is no page, and which any kernel may read and write.
    """

    name: str
    tags: tuple[str, ...]
    lanes: int
    superpage_bytes: int
    num_superpages: int = 0
    place: Place = Place.DEVICE

    def check(self, groups: Sequence[Group]) -> None:
        """Raise `PlanError` where its numbers and those of its groups contradict one another."""
        if min(self.lanes, self.superpage_bytes, self.num_superpages) < 1 or self.tags != tuple(g.tag for g in groups):
            raise PlanError(
                f"pool {self.name!r}: {self.num_superpages} super-pages of {self.superpage_bytes} bytes in {self.lanes}"
                f" lanes for {', '.join(self.tags)}, but it is the pool of {', '.join(g.tag for g in groups) or 'none'}"
            )
        for group in groups:
            stride, least = group.kernel_stride, group.layer_bytes * group.lane_layers
            filled = stride * group.kernel_blocks * group.pages_per_superpage
            if group.lane_layers * self.lanes != len(group.layers) or filled != self.superpage_bytes or stride < least:
                raise PlanError(
                    f"group {group.tag!r}: {group.pages_per_superpage} pages of {group.kernel_blocks} kernel blocks,"
                    f" {stride} bytes apart, of {group.lane_layers} layers with {group.layer_bytes} bytes each, do not"
                    f" fill {self.lanes} lanes of {self.superpage_bytes} bytes with {len(group.layers)} layers"
                )
            if stride % group.layer_align:
                raise PlanError(f"group {group.tag!r}: {stride} bytes are no multiple of {group.layer_align}")

    @property
    def unit_bytes(self) -> int:
        """Bytes of one super-page over all lanes: what the pool grows by."""
        return self.lanes * self.superpage_bytes

    @property
    def num_bytes(self) -> int:
        return self.unit_bytes * self.num_superpages

    @property
    def is_on_device(self) -> bool:
        return self.place is Place.DEVICE

    @property
    def num_usable(self) -> int:
        """Super-pages that groups can have: all but the NULL one."""
        return max(0, self.num_superpages - 1)


def cut(
    name: str,
    groups: Sequence[Group],
    layout: Layout,
    num_tokens: int,
    memory: int = 0,
    place: Place = Place.DEVICE,
) -> tuple[Pool, list[Group], int]:
    """A pool without memory yet for `groups`, of about `memory` bytes if they are several; the groups with their place
    in it; and how many super-pages a sequence of `num_tokens` tokens and NULL take.

    Layer-major lanes are as many as divide every group's layers evenly, so that no lane is wasted.
    """
    lanes = math.gcd(*(len(group.layers) for group in groups)) if layout is Layout.LAYER_MAJOR else 1
    slices = [
        Slice(
            group.layer_bytes * (len(group.layers) // lanes),
            group.kernel_blocks,
            group.layer_align,
            group.num_blocks_held(num_tokens),
            group.moves_before(num_tokens),
        )
        for group in groups
    ]
    superpage_bytes, counts = search(slices, memory // lanes) if len(slices) > 1 else (slices[0].page_bytes, (1,))
    placed = [
        replace(
            group,
            pool=name,
            lane_layers=len(group.layers) // lanes,
            pages_per_superpage=count,
            kernel_stride=superpage_bytes // (count * group.kernel_blocks),
        )
        for group, count in zip(groups, counts, strict=True)
    ]
    needed = int(superpages_needed(slices, [np.array(count) for count in counts]))
    return Pool(name, tuple(group.tag for group in groups), lanes, superpage_bytes, 0, place), placed, needed


def size(
    pools: Sequence[Pool],
    memory: int,
    requests: Mapping[str, PoolRequest],
    demand: Mapping[str, int],
    need: Mapping[str, int],
) -> list[Pool]:
    """Give each pool its super-pages: those with a page count first, the others by weight, to the last byte.

    Weights default to `demand`, the bytes a typical sequence needs of each pool, so that all run full together.
    None gets fewer than `need`, the super-pages of the one sequence that must fit, and of the NULL page.
    """
    counts = {p.name: request.pages + 1 for p in pools if (request := requests.get(p.name)) and request.pages}
    fixed = sum(pool.unit_bytes * counts[pool.name] for pool in pools if pool.name in counts and pool.is_on_device)
    if fixed > memory:
        raise PlanError(f"pools with explicit pages take {fixed} bytes of {memory}; ask for fewer pages or more memory")
    elastic = [pool for pool in pools if pool.name not in counts]
    weights = {pool.name: float(_weight(requests.get(pool.name)) or demand[pool.name]) for pool in elastic}
    counts |= _shares(elastic, memory - fixed, weights, need)
    left = memory - fixed - sum(pool.unit_bytes * counts[pool.name] for pool in elastic)
    while fitting := [pool for pool in elastic if pool.unit_bytes <= left]:
        poorest = min(fitting, key=lambda pool: pool.unit_bytes * counts[pool.name] / weights[pool.name])
        more = max(1, left // (poorest.unit_bytes * len(fitting)))
        counts[poorest.name] += more
        left -= more * poorest.unit_bytes
    return [replace(pool, num_superpages=counts[pool.name]) for pool in pools]


def _shares(
    pools: Sequence[Pool], memory: int, weights: Mapping[str, float], need: Mapping[str, int]
) -> dict[str, int]:
    """Super-pages by weight; a pool whose share is too small gets its need, and the others divide the rest."""
    total = sum(weights[pool.name] for pool in pools)
    shares = {pool.name: int(memory * weights[pool.name] / total) // pool.unit_bytes for pool in pools}
    poor = [pool for pool in pools if shares[pool.name] < need[pool.name]]
    if not poor:
        return shares
    given = {pool.name: need[pool.name] for pool in poor}
    rest = memory - sum(pool.unit_bytes * given[pool.name] for pool in poor)
    return given | _shares([pool for pool in pools if pool not in poor], rest, weights, need)


def _weight(request: PoolRequest | None) -> float | None:
    return request.weight if request else None

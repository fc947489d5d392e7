"""Options with a small language of their own: `16`, `indexer=64`, `full=1000@host`, `state=30%`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvweave.errors import PlanError
from kvweave.plan import Place, PoolRequest
from kvweave.spec import LayerCache, ModelSpec
from kvweave.spec.role import align_up

MOST_TOKENS = 2**20
"""The largest block that is accepted: anything above is a typing error."""


@dataclass(frozen=True, slots=True)
class PerTag:
    """One number for all groups (None: none given), and numbers for some tags."""

    base: int | None
    by_tag: Mapping[str, int]

    @classmethod
    def parse(cls, option: str, texts: Sequence[str]) -> PerTag:
        """`["32", "indexer=64"]`; of several plain numbers the last one counts."""
        base, by_tag = None, {}
        for text in texts:
            tag, equals, number = text.rpartition("=")
            if not re.fullmatch(r"[0-9]{1,9}", number) or not 1 <= int(number) <= MOST_TOKENS or (equals and not tag):
                raise PlanError(f"{option}: expected N or TAG=N, 1 to {MOST_TOKENS} tokens, got {text!r:.80}")
            if equals:
                by_tag[tag] = int(number)
            else:
                base = int(number)
        return cls(base, by_tag)

    def blocks(self, spec: ModelSpec) -> int | dict[str, int]:
        """Blocks as the planner takes them: by tag, groups that were not named are rounded up to whole rows."""
        if self.base is None or not self.by_tag:
            return dict(self.by_tag) if self.by_tag else self.base or 16
        base = self.base
        return {c.tag: align_up(base, _unit(c)) for c in _free(spec)} | dict(self.by_tag)

    def kernels(self, spec: ModelSpec) -> int | dict[str, int] | None:
        """Kernel blocks as the planner takes them; groups that were not named take their own where the base fails."""
        if self.base is None or not self.by_tag:
            return dict(self.by_tag) if self.by_tag else self.base
        base = self.base
        return {c.tag: _unit(c) if base % _unit(c) else base for c in _free(spec)} | dict(self.by_tag)


def _free(spec: ModelSpec) -> list[LayerCache]:
    """Caches that leave their block to the plan."""
    return [cache for cache, _ in spec.groups().values() if cache.block_tokens is None]


def _unit(cache: LayerCache) -> int:
    return cache.unit_tokens if cache.reach.per_token else 1


@dataclass(frozen=True, slots=True)
class PoolOption:
    """A pool of its own for `tag`: a number of pages, or a share of the memory in percent."""

    tag: str
    pages: int | None
    percent: float | None
    place: Place

    @classmethod
    def parse(cls, text: str) -> PoolOption:
        match = re.fullmatch(r"(.+)=(?:([0-9]{1,20})|([0-9]{1,20}(?:\.[0-9]+)?)%)(?:@([a-z]+))?", text)
        if match is None or (match[4] or Place.DEVICE) not in list(Place):
            raise PlanError(f"--pool: expected TAG=PAGES, TAG=30% or TAG=PAGES@host (or @pinned), got {text!r:.80}")
        percent = float(match[3]) if match[3] else None
        if percent is not None and not 0 < percent <= 100:
            raise PlanError(f"--pool: a share is more than 0% and at most 100%, got {text!r}")
        return cls(match[1], int(match[2]) if match[2] else None, percent, Place(match[4] or Place.DEVICE))

    @property
    def request(self) -> PoolRequest:
        """As the planner takes it; a share is only a weight there, until the page size is known."""
        return PoolRequest(self.pages, self.percent, self.place)


def parse_pools(texts: Sequence[str]) -> list[PoolOption]:
    pool_options = [PoolOption.parse(text) for text in texts]
    tags = [pool_option.tag for pool_option in pool_options]
    if twice := sorted({tag for tag in tags if tags.count(tag) > 1}):
        raise PlanError(f"--pool: {', '.join(twice)} given twice")
    return pool_options

"""Host caches: the groups of an arena once more in (pinned) host memory, page for page the same bytes.

A page keeps its layout, so every layer, role and scale of it travels together; in page-major pools it is one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType

from kvweave.errors import ArenaClosed, BadRows, PlanError
from kvweave.plan import Group, Place, Plan, Pool
from kvweave.tensor.arena import Arena, ArenaStats
from kvweave.tensor.layer import LayerView
from kvweave.tensor.page_copies import copy_pages


@dataclass(frozen=True, slots=True)
class MirrorStats:
    """What a mirror holds, pages by tag (0 where skipped), and why tags were skipped."""

    memory: ArenaStats
    num_pages: Mapping[str, int]
    skipped: Mapping[str, str]


class HostMirror:
    """`num_pages` pages by tag on the host, the NULL page apart. Ids start at 1, as everywhere.

    A tag in `not_hosted` (see `backend.not_hosted`), on the host anyway, or asked for no pages is skipped, and
    `num_pages(tag)` is 0: ask before a page is promised to the host. Memory is taken from, and counted in, the arena's.
    """

    def __init__(
        self,
        arena: Arena,
        num_pages: Mapping[str, int],
        *,
        not_hosted: Mapping[str, str] | None = None,
        place: Place = Place.PINNED,
    ) -> None:
        self.source = arena
        self.skipped = _skipped(arena.plan, num_pages, not_hosted or {})
        wanted = {tag: count for tag, count in num_pages.items() if tag not in self.skipped}
        self.arena = Arena(mirror_plan(arena.plan, wanted, place), arena.memory)

    @property
    def is_whole(self) -> bool:
        """Whether every group with layers is mirrored, so that sequences can leave the device altogether."""
        return all(self.num_pages(group.tag) for group in self.source.plan.groups if group.layers)

    def num_pages(self, tag: str) -> int:
        """Pages of a group that the host can hold."""
        self.source.plan.group(tag)
        return 0 if tag in self.skipped else self.arena.plan.num_pages(tag)

    def layer(self, layer: int, tag: str | None = None) -> LayerView:
        """What a layer's pages hold on the host, role by role, as the arena shows them on the device."""
        return self.arena.layer(layer, tag)

    def store(self, tag: str, device_pages: object, host_pages: object) -> None:
        """Copy pages of a group to the host. Blocks until they are there."""
        self._check(tag)
        copy_pages(self.source, self.arena, tag, device_pages, host_pages)

    def load(self, tag: str, host_pages: object, device_pages: object) -> None:
        """Copy pages of a group back. Blocks until they are there."""
        self._check(tag)
        copy_pages(self.arena, self.source, tag, host_pages, device_pages)

    def stats(self) -> MirrorStats:
        tags = [group.tag for group in self.source.plan.groups]
        return MirrorStats(self.arena.stats(), {tag: self.num_pages(tag) for tag in tags}, dict(self.skipped))

    def close(self) -> None:
        """Give all memory back; twice is once."""
        self.arena.close()

    def __enter__(self) -> HostMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, tag: str) -> None:
        if self.arena.is_closed:
            raise ArenaClosed("this mirror is closed: its memory was given back")
        if tag in self.skipped:
            raise BadRows(f"group {tag!r} is not mirrored: {self.skipped[tag]}")


def mirror_plan(plan: Plan, num_pages: Mapping[str, int], place: Place) -> Plan:
    """The plan of a mirror: a pool a group, in which a page has the bytes it has in `plan`."""
    groups, pools = [], []
    for group in plan.groups:
        if group.tag not in num_pages:
            groups.append(_absent(group))
            continue
        groups.append(replace(group, pool=group.tag, pages_per_superpage=1))
        lanes = plan.pool(group.pool).lanes
        pools.append(Pool(group.tag, (group.tag,), lanes, group.page_stride, num_pages[group.tag] + 1, place))
    reads = tuple((reader, read) for reader, read in plan.reads if read.tag in num_pages)
    return replace(plan, groups=tuple(groups), pools=tuple(pools), reads=reads)


def _absent(group: Group) -> Group:
    return replace(group, layers=(), pool="", lane_layers=0, pages_per_superpage=0, kernel_stride=0)


def _skipped(plan: Plan, num_pages: Mapping[str, int], not_hosted: Mapping[str, str]) -> dict[str, str]:
    """Why each group that will not be there is not."""
    reasons = {}
    for tag, count in num_pages.items():
        plan.group(tag)
        if count < 0:
            raise PlanError(f"a mirror of {tag!r} cannot have {count} pages")
    for group in plan.groups:
        if not group.layers:
            reasons[group.tag] = "none of its layers is on this rank"
        elif group.tag in not_hosted:
            reasons[group.tag] = not_hosted[group.tag]
        elif plan.pool(group.pool).place is not Place.DEVICE:
            reasons[group.tag] = f"its pool is {plan.pool(group.pool).place} memory already"
        elif not num_pages.get(group.tag):
            reasons[group.tag] = "no pages were asked for"
    return reasons

"""Host caches: a mirror of an arena's groups in (pinned) host memory. A page has the same bytes in both.

A page keeps its layout, so that all layers, roles and scales of it are copied together; a page of a page-major pool is
one copy.
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
    """What a mirror holds: pages by tag (0 where a group was skipped), and why groups were skipped."""

    memory: ArenaStats
    num_pages: Mapping[str, int]
    skipped: Mapping[str, str]


class HostMirror:
    """`num_pages[tag]` pages of each group on the host, beside the NULL page. Page ids start at 1, as in the arena.

    A group is skipped, and `num_pages(tag)` is 0, if it is in `not_hosted` (see `backend.not_hosted`), if its pool is
    on the host already, or if no pages were asked for. The memory is counted in the arena's `Memory`.
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
        """Whether every group that has layers is mirrored, so that a sequence can be swapped out completely."""
        return all(self.num_pages(group.tag) for group in self.source.plan.groups if group.layers)

    def num_pages(self, tag: str) -> int:
        """Pages of a group that the mirror can hold."""
        self.source.plan.group(tag)
        return 0 if tag in self.skipped else self.arena.plan.num_pages(tag)

    def layer(self, layer: int, tag: str | None = None) -> LayerView:
        """The view of a layer over the mirror's pages, as `Arena.layer` gives it over the arena's."""
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
        """Free all memory; calling it twice is fine."""
        self.arena.close()

    def __enter__(self) -> HostMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, tag: str) -> None:
        if self.arena.is_closed:
            raise ArenaClosed("this mirror is closed: its memory was freed")
        if tag in self.skipped:
            raise BadRows(f"group {tag!r} is not mirrored: {self.skipped[tag]}")


def mirror_plan(plan: Plan, num_pages: Mapping[str, int], place: Place) -> Plan:
    """The plan of a mirror: one pool for each group, with pages laid out as in `plan`."""
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
    """Why groups are not in the mirror, by tag."""
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

"""The memory as a whole: a bar for each place, its pools filled as a load would fill them; below it the legend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvweave.cli.format import count, format_size
from kvweave.cli.svg.draw import (
    EMPTY,
    INK,
    LINE,
    NULL,
    PADDING,
    PAPER,
    WHITE,
    Bar,
    Drawing,
    Sheet,
    bar_row,
    heading,
    legend,
    lighter,
    line,
    rect,
    stack,
    text,
)
from kvweave.cli.svg.sample_load import SampleLoad, members
from kvweave.plan import Place, Plan, Pool

RESERVE = lighter(PADDING, 0.5)


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A run of bytes in a bar of the memory."""

    start: int
    num_bytes: int
    fill: str
    name: str


def memory_drawing(sheet: Sheet, plan: Plan, colours: Mapping[str, str], load: SampleLoad) -> Drawing:
    """Bars to scale, one for each place that has a pool."""
    places = [place for place in Place if any(pool.place is place for pool in plan.pools)]
    bars = [_place(sheet, plan, place, colours, load) for place in places]
    taken = {
        group.tag: load.superpages(group) * plan.pool(group.pool).unit_bytes for group in plan.groups if group.layers
    }
    free = sum(pool.num_usable * pool.unit_bytes for pool in plan.pools) - sum(taken.values())
    padding = any(plan.padding_bytes(tag) for tag in taken)
    keys = [(colours[tag], f"{tag} {format_size(size)}") for tag, size in taken.items()]
    keys += [(NULL, "NULL super-page")]
    keys += [(EMPTY, f"free in pools {format_size(free)}")] if free else []
    keys += [(RESERVE, f"reserve {format_size(plan.reserve)}")] if plan.reserve else []
    keys += [(PADDING, "padding (further down)")] if padding else []
    top = stack([heading(sheet, "Memory", f"filled as {load} would fill it"), *bars], 8)
    return stack([top, legend(sheet, keys)], 12)


def _place(sheet: Sheet, plan: Plan, place: Place, colours: Mapping[str, str], load: SampleLoad) -> Drawing:
    pools = [pool for pool in plan.pools if pool.place is place]
    used = sum(pool.num_bytes for pool in pools)
    whole = plan.memory if place is Place.DEVICE else used
    pieces = [BarSegment(0, used, EMPTY, ""), *_pieces(plan, pools, colours, load)]
    if place is Place.DEVICE and plan.reserve:
        pieces.append(BarSegment(whole - plan.reserve, plan.reserve, RESERVE, "reserve"))
    ends = [sum(pool.num_bytes for pool in pools[: number + 1]) for number in range(len(pools) - 1)]

    def draw(x: float, y: float) -> list[str]:
        bar = Bar(x, y, sheet.bar_width, 34, whole)
        shapes = [rect(bar.x, bar.y, bar.width, bar.height, PAPER, stroke=LINE)]
        shapes += [shape for piece in pieces for shape in _drawn(bar, piece)]
        return [*shapes, *(line(bar.x_of(end), bar.y - 4, bar.y + bar.height + 4, INK) for end in ends)]

    left, right = (str(place), count(len(pools), "pool")), (format_size(used), f"in pools, of {format_size(whole)}")
    return bar_row(sheet, left, right, 38, draw)


def _pieces(plan: Plan, pools: list[Pool], colours: Mapping[str, str], load: SampleLoad) -> list[BarSegment]:
    """What each group takes of each pool, in the order of the pools; the first super-page is NULL."""
    pieces, pool_start = [], 0
    for pool in pools:
        pieces.append(BarSegment(pool_start, pool.unit_bytes, NULL, ""))
        start = pool_start + pool.unit_bytes
        for member in members(plan, pool):
            taken = load.superpages(member) * pool.unit_bytes
            pieces.append(BarSegment(start, taken, colours[member.tag], member.tag))
            start += taken
        pool_start += pool.num_bytes
    return pieces


def _drawn(bar: Bar, piece: BarSegment) -> list[str]:
    """The piece, and its size written on it where there is room."""
    words = f"{piece.name} {format_size(piece.num_bytes)}" if piece.name else ""
    shapes = [bar.piece(piece.start, piece.num_bytes, piece.fill, "memory", words)]
    if words and bar.width * piece.num_bytes / bar.num_bytes > 7.6 * len(words) + 10:
        middle = bar.x_of(piece.start + piece.num_bytes / 2)
        shapes.append(text(middle, bar.y + 21, words, size=12, fill=WHITE, anchor="middle", bold=True))
    return shapes

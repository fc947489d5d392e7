"""A map of the pools: every super-page, the group it belongs to, and whose each of its pages is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvweave.cache.contents import CacheContents, Owner, PoolMap, SuperPage
from kvweave.cli.format import count
from kvweave.cli.svg.draw import (
    EMPTY,
    INK,
    PAPER,
    Drawing,
    Sheet,
    group,
    heading,
    legend,
    lighter,
    paragraph,
    rect,
    stack,
)

SIDES = (64.0, 48.0, 36.0, 26.0, 18.0, 12.0)
"""Sides of a super-page in pixels; the largest with which a pool is not too high is taken."""
GAP = 4.0
MOST_HEIGHT = 520.0


def map_drawing(sheet: Sheet, snapshot: CacheContents, colours: Mapping[str, str]) -> Drawing:
    pools = [_pool(sheet, pool, colours) for pool in snapshot.pools]
    said = "dark: shared by branches of the tree; light: one branch's alone"
    return stack([heading(sheet, "The pages at the end", said), _legend(sheet, snapshot, colours), *pools], 12)


def _legend(sheet: Sheet, snapshot: CacheContents, colours: Mapping[str, str]) -> Drawing:
    keys = []
    for pool in snapshot.pools:
        for tag in (tag for tag in colours if any(super_page.tag == tag for super_page in pool.superpages)):
            mine = [super_page for super_page in pool.superpages if super_page.tag == tag]
            shared, alone = (sum(s.count(owner) for s in mine) for owner in (Owner.SHARED, Owner.CACHED))
            keys.append((colours[tag], f"{tag}: {count(shared, 'page')} shared"))
            keys.append((lighter(colours[tag], 0.55), f"{tag}: {count(alone, 'page')} of one branch"))
            if held := sum(s.count(Owner.HELD) for s in mine):
                keys.append((INK, f"{tag}: {count(held, 'page')} held by requests"))
    free = sum(super_page.tag is None for pool in snapshot.pools for super_page in pool.superpages)
    return legend(sheet, [*keys, (EMPTY, f"free: {count(free, 'super-page')}, and pages within others")])


def _pool(sheet: Sheet, pool: PoolMap, colours: Mapping[str, str]) -> Drawing:
    side = _side(sheet, len(pool.superpages))
    columns = _columns(sheet, side)
    rows = min(-(-len(pool.superpages) // columns), int(MOST_HEIGHT // (side + GAP)))
    drawn = _shortened(pool.superpages, rows * columns)
    free = [place for place, super_page in enumerate(drawn) if not super_page.tag]
    shapes = [_squares(free, columns, (sheet.margin, 0), side + GAP, EMPTY, GAP)]
    for place, super_page in enumerate(drawn):
        row, column = divmod(place, columns)
        shapes += _super(super_page, sheet.margin + column * (side + GAP), row * (side + GAP), side, colours)
    left_out = len(pool.superpages) - len(drawn)
    more = f"; {left_out:,} more are not drawn, free ones first" if left_out else ""
    title = paragraph(sheet, [f"pool {pool.name}: {count(len(pool.superpages), 'super-page')}{more}"])
    return stack([title, Drawing(tuple(shapes), -(-len(drawn) // columns) * (side + GAP))], 2)


def _columns(sheet: Sheet, side: float) -> int:
    return int((sheet.inner + GAP) // (side + GAP))


def _side(sheet: Sheet, number: int) -> float:
    for side in SIDES:
        if -(-number // _columns(sheet, side)) * (side + GAP) <= MOST_HEIGHT:
            return side
    return SIDES[-1]


def _shortened(supers: Sequence[SuperPage], most: int) -> list[SuperPage]:
    """At most `most` super-pages, in order; free ones are left out first."""
    if len(supers) <= most:
        return list(supers)
    taken = [super_page for super_page in supers if super_page.tag][:most]
    free = [super_page for super_page in supers if not super_page.tag][: most - len(taken)]
    return sorted([*taken, *free], key=lambda super_page: super_page.number)


def _super(super_page: SuperPage, x: float, y: float, side: float, colours: Mapping[str, str]) -> list[str]:
    """A square; inside it a square a page, row by row; the rest stays white. Nothing for one that no group has."""
    if super_page.tag is None:
        return []
    hue, columns = colours[super_page.tag], math.ceil(math.sqrt(len(super_page.pages)))
    step = (side - 2) / columns
    frame = rect(x, y, side, side, PAPER, stroke=hue, kind="super-page", tip=_tip(super_page))
    fills = {Owner.SHARED: hue, Owner.CACHED: lighter(hue, 0.55), Owner.HELD: INK, Owner.FREE: EMPTY}
    squares = []
    for owner, fill in fills.items():
        places = [place for place, page in enumerate(super_page.pages) if page is owner]
        squares.append(_squares(places, columns, (x + 1, y + 1), step, fill, 0.8 if step > 4 else 0))
    return [group([frame, *squares], data_tag=super_page.tag, data_super=str(super_page.number))]


def _squares(places: list[int], columns: int, corner: tuple[float, float], step: float, fill: str, gap: float) -> str:
    """Squares of one colour as one path, `step` from one to the next."""
    if not places:
        return ""
    size = f"{step - gap:.1f}"
    path = "".join(
        f"M{corner[0] + place % columns * step:.1f} {corner[1] + place // columns * step:.1f}h{size}v{size}h-{size}z"
        for place in places
    )
    return f'<path class="pages" data-pages="{len(places)}" d="{path}" fill="{fill}" pointer-events="none"/>'


def _tip(super_page: SuperPage) -> str:
    counts = ", ".join(f"{number} {owner}" for owner in Owner if (number := super_page.count(owner)))
    return (
        f"super-page {super_page.number} belongs to {super_page.tag}: {count(len(super_page.pages), 'page')}, {counts}"
    )

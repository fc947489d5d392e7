"""One pool: its lanes of super-pages, and how each group slices a super-page into its own pages."""

from __future__ import annotations

from collections.abc import Mapping

from kvweave.cli.format import count, format_size
from kvweave.cli.svg.draw import (
    EMPTY,
    FAINT,
    NULL,
    ON_LIGHT,
    PADDING,
    WHITE,
    Bar,
    Drawing,
    Sheet,
    bar_row,
    group,
    heading,
    lighter,
    line,
    rect,
    stack,
    text,
)
from kvweave.cli.svg.sample_load import SampleLoad, members
from kvweave.plan import Group, Plan, Pool

CELL_HEIGHT = 22
ONE_BY_ONE, WITH_LINES = 3.0, 6.0
"""Pixels that a page must be wide to be drawn, and to have a line beside it; between them shades alternate."""


def pool_drawing(sheet: Sheet, plan: Plan, pool: Pool, colours: Mapping[str, str], load: SampleLoad) -> Drawing:
    """Lanes of super-pages, and below it one of them, as each group would slice it."""
    groups = members(plan, pool)
    title = f"Pool {pool.name}: {count(pool.num_superpages, 'super-page')}"
    layers = " + ".join(str(member.lane_layers) for member in groups)
    beside = f"{plan.layout}: {count(pool.lanes, 'lane')} of {layers} layer{'' if layers == '1' else 's'}"
    per_lane = f", {format_size(pool.superpage_bytes)} in one lane" if pool.lanes > 1 else ""
    said = f"one super-page: {format_size(pool.unit_bytes)}{per_lane}"
    said += ", as each group slices it" if len(groups) > 1 and not sheet.is_narrow else ""
    x, width, cell = sheet.bar_x, sheet.bar_width, _cell_width(sheet)
    funnel = Bar(x + cell, 0, cell - 2, 0, 1).zoom_into(0, 1, Bar(x, 26, width, 0, 1))
    words = text(x + width, 16, said, size=12, fill=FAINT, anchor="end")
    rows = stack([_slices(sheet, member, pool, colours[member.tag]) for member in groups], 10)
    lanes = _lanes(sheet, pool, _fills(sheet, plan, pool, colours, load))
    return stack([heading(sheet, title, beside), lanes, Drawing((funnel, words), 30), rows], 0)


# ---- lanes


def _num_cells(sheet: Sheet) -> int:
    """Super-pages drawn of a pool: the first ones, a gap, the last."""
    return 7 if sheet.is_narrow else 14


def _cell_width(sheet: Sheet) -> float:
    return sheet.bar_width / _num_cells(sheet)


def _lanes(sheet: Sheet, pool: Pool, fills: list[str]) -> Drawing:
    names = _cell_names(pool, _num_cells(sheet))
    shapes = [
        text(sheet.bar_x + (cell + 0.5) * _cell_width(sheet), 10, name, size=11, fill=FAINT, anchor="middle")
        for cell, name in enumerate(names)
    ]
    y = 16.0
    for number in range(pool.lanes) if pool.lanes <= 4 else (0, 1, None, pool.lanes - 1):
        height = 12 if number is None else CELL_HEIGHT
        if not sheet.is_narrow:
            name = "..." if number is None else f"lane {number}"
            shapes.append(text(sheet.bar_x - 12, y + height - 5, name, size=12, fill=FAINT, anchor="end"))
        shapes += [] if number is None else _lane(sheet, y, names, fills)
        y += height + 3
    return Drawing(tuple(shapes), y - 3)


def _cell_names(pool: Pool, cells: int) -> list[str]:
    if pool.num_superpages <= cells:
        return ["NULL", *map(str, range(1, pool.num_superpages))]
    return ["NULL", *map(str, range(1, cells - 2)), "...", f"{pool.num_superpages - 1:,}"]


def _lane(sheet: Sheet, y: float, names: list[str], fills: list[str]) -> list[str]:
    width = _cell_width(sheet)
    return [
        rect(sheet.bar_x + cell * width, y, width - 2, CELL_HEIGHT, fills[cell], tip=f"super-page {name}")
        for cell, name in enumerate(names)
        if name != "..."
    ]


def _fills(sheet: Sheet, plan: Plan, pool: Pool, colours: Mapping[str, str], load: SampleLoad) -> list[str]:
    """A colour for each drawn cell: NULL, then groups in proportion, one or more each; the last is free, if any is."""
    wants = {member.tag: load.superpages(member) for member in members(plan, pool)}
    is_whole = pool.num_superpages <= _num_cells(sheet)
    drawn = pool.num_superpages if is_whole else _num_cells(sheet) - 1
    is_free = pool.num_usable > sum(wants.values())
    given = _seats(wants, min(sum(wants.values()), drawn - 1 - is_free))
    fills = [NULL, *(colours[tag] for tag, cells in given.items() for _ in range(cells))]
    fills += [EMPTY] * (drawn - len(fills))
    return fills if is_whole else [*fills[:-1], "", fills[-1]]


def _seats(wants: Mapping[str, int], seats: int) -> dict[str, int]:
    """`seats` divided in proportion to `wants`, so that each group that wants any gets one before another gets two."""
    given = dict.fromkeys(wants, 0)
    for _ in range(seats):
        given[max(given, key=lambda tag: wants[tag] / max(given[tag], 1e-9))] += 1
    return given


# ---- slices


def _slices(sheet: Sheet, member: Group, pool: Pool, hue: str) -> Drawing:
    """One super-page of one lane, cut into the group's pages; padding in grey, to scale."""
    pages = member.pages_per_superpage
    payload = member.payload_bytes // pool.lanes
    padding = pool.superpage_bytes - pages * payload

    def draw(x: float, y: float) -> list[str]:
        bar = Bar(x, y, sheet.bar_width, 30, pool.superpage_bytes)
        cut = _run if bar.width / pages < ONE_BY_ONE else _pages
        drawn = cut(bar, pages, payload, padding, hue)
        return [group(drawn, kind="super-page", data_tag=member.tag, data_bytes=str(pool.superpage_bytes))]

    lost = f"{padding / pool.superpage_bytes:.2%} padding, {format_size(padding)}" if padding else "no padding"
    right = f"{count(pages, 'page')} of {format_size(payload)}", lost
    return bar_row(sheet, (member.tag, ""), right, 30, draw, hue)


def _pages(bar: Bar, pages: int, payload: int, padding: int, hue: str) -> list[str]:
    """Page by page. Padding lies behind each; where that is thinner than a pixel, all of it is drawn at the end."""
    apart = padding * bar.width >= pages * bar.num_bytes
    stride = bar.num_bytes // pages if apart else payload
    lines = not apart and bar.width / pages >= WITH_LINES
    plain = apart or lines
    shapes = []
    for page in range(pages):
        fill = hue if plain or page % 2 == 0 else lighter(hue, 0.25)
        shapes.append(bar.piece(page * stride, payload, fill, "page", f"page {page}: {format_size(payload)}"))
        shapes += _padding(bar, page * stride + payload, stride - payload)
        shapes += [line(bar.x_of(page * stride), bar.y, bar.y + bar.height)] if lines and page else []
    return shapes if apart else [*shapes, *_padding(bar, pages * payload, padding)]


def _run(bar: Bar, pages: int, payload: int, padding: int, hue: str) -> list[str]:
    """Pages too thin to draw, with a line after every 10, 100, ... of them."""
    step = 10
    while bar.width / pages * step < WITH_LINES:
        step *= 10
    lines = [line(bar.x_of(page * payload), bar.y, bar.y + bar.height) for page in range(step, pages, step)]
    says = f"a line every {step:,} pages"
    plate = rect(bar.x + 6, bar.y + 6, 7.1 * len(says) + 12, 18, WHITE)
    words = text(bar.x + 12, bar.y + 19, says, size=12, fill=ON_LIGHT)
    pages_piece = bar.piece(0, pages * payload, hue, "page", f"{count(pages, 'page')}")
    return [pages_piece, *lines, plate, words, *_padding(bar, pages * payload, padding)]


def _padding(bar: Bar, start: int, size: int) -> list[str]:
    return [bar.piece(start, size, PADDING, "padding", f"padding: {format_size(size)}")] if size else []

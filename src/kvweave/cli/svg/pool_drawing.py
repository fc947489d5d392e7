"""One pool: its lanes of super-pages, and how each group slices a super-page into its own pages."""

from __future__ import annotations

from collections.abc import Mapping

from kvweave.cli.format import count, format_size
from kvweave.cli.svg.draw import (
    EMPTY,
    FAINT,
    INK,
    MARGIN,
    NULL,
    PADDING,
    WHITE,
    Bar,
    Drawing,
    group,
    heading,
    label,
    lighter,
    line,
    rect,
    stack,
    text,
)
from kvweave.cli.svg.memory_drawing import BAR_WIDTH, BAR_X, RIGHT_X
from kvweave.cli.svg.sample_load import SampleLoad, members
from kvweave.plan import Group, Plan, Pool

CELLS = 14
"""Super-pages drawn of a pool: the first ones, a gap, the last."""
CELL_WIDTH, CELL_HEIGHT = BAR_WIDTH / CELLS, 22
ONE_BY_ONE, WITH_LINES = 3.0, 6.0
"""Pixels that a page must be wide to be drawn, and to have a line beside it; between them shades alternate."""


def pool_drawing(plan: Plan, pool: Pool, colours: Mapping[str, str], load: SampleLoad) -> Drawing:
    """Lanes of super-pages, and below it one of them, as each group would slice it."""
    groups = members(plan, pool)
    title = f"Pool {pool.name}: {count(pool.num_superpages, 'super-page')} of {format_size(pool.unit_bytes)}"
    layers = " + ".join(str(member.lane_layers) for member in groups)
    beside = f"{plan.layout}: {count(pool.lanes, 'lane')} of {layers} layer{'' if layers == '1' else 's'}"
    per_lane = f" in one lane, {format_size(pool.superpage_bytes)}" if pool.lanes > 1 else ""
    said = f"one super-page{per_lane}" + (", as each group slices it" if len(groups) > 1 else "")
    funnel = Bar(BAR_X + CELL_WIDTH, 0, CELL_WIDTH - 2, 0, 1).zoom_into(0, 1, Bar(BAR_X, 26, BAR_WIDTH, 0, 1))
    words = text(BAR_X + BAR_WIDTH, 16, said, size=12, fill=FAINT, anchor="end")
    rows = stack([_slices(member, pool, colours[member.tag]) for member in groups], 10)
    drawn = [
        heading(title, beside),
        _lanes(pool, _fills(plan, pool, colours, load)),
        Drawing((funnel, words), 26),
        rows,
    ]
    return stack(drawn, 0)


# ---- lanes


def _lanes(pool: Pool, fills: list[str]) -> Drawing:
    names = _cell_names(pool)
    shapes = [
        text(BAR_X + (cell + 0.5) * CELL_WIDTH, 10, name, size=11, fill=FAINT, anchor="middle")
        for cell, name in enumerate(names)
    ]
    y = 16.0
    for number in range(pool.lanes) if pool.lanes <= 4 else (0, 1, None, pool.lanes - 1):
        name = "..." if number is None else f"lane {number}"
        height = 12 if number is None else CELL_HEIGHT
        shapes.append(
            text(BAR_X - 12, y + height - (6 if number is not None else 2), name, size=12, fill=FAINT, anchor="end")
        )
        shapes += [] if number is None else _lane(y, names, fills)
        y += height + 3
    return Drawing(tuple(shapes), y - 3)


def _cell_names(pool: Pool) -> list[str]:
    if pool.num_superpages <= CELLS:
        return ["NULL", *map(str, range(1, pool.num_superpages))]
    return ["NULL", *map(str, range(1, CELLS - 2)), "...", f"{pool.num_superpages - 1:,}"]


def _lane(y: float, names: list[str], fills: list[str]) -> list[str]:
    return [
        rect(BAR_X + cell * CELL_WIDTH, y, CELL_WIDTH - 2, CELL_HEIGHT, fills[cell], tip=f"super-page {name}")
        for cell, name in enumerate(names)
        if name != "..."
    ]


def _fills(plan: Plan, pool: Pool, colours: Mapping[str, str], load: SampleLoad) -> list[str]:
    """A colour for each drawn cell: NULL, then groups in proportion, one or more each; the last is free, if any is."""
    wants = {member.tag: load.superpages(member) for member in members(plan, pool)}
    drawn = pool.num_superpages if pool.num_superpages <= CELLS else CELLS - 1
    is_free = pool.num_usable > sum(wants.values())
    given = _seats(wants, min(sum(wants.values()), drawn - 1 - is_free))
    fills = [NULL, *(colours[tag] for tag, cells in given.items() for _ in range(cells))]
    fills += [EMPTY] * (drawn - len(fills))
    return fills if pool.num_superpages <= CELLS else [*fills[:-1], "", fills[-1]]


def _seats(wants: Mapping[str, int], seats: int) -> dict[str, int]:
    """`seats` divided in proportion to `wants`, so that nobody who wants any is left out before another has two."""
    given = dict.fromkeys(wants, 0)
    for _ in range(seats):
        given[max(given, key=lambda tag: wants[tag] / max(given[tag], 1e-9))] += 1
    return given


# ---- slices


def _slices(member: Group, pool: Pool, hue: str) -> Drawing:
    """One super-page of one lane, cut into the group's pages; padding in grey, to scale."""
    bar = Bar(BAR_X, 0, BAR_WIDTH, 30, pool.superpage_bytes)
    pages = member.pages_per_superpage
    payload = member.payload_bytes // pool.lanes
    padding = pool.superpage_bytes - pages * payload
    thin = bar.width / pages < ONE_BY_ONE
    drawn = _run(bar, pages, payload, padding, hue) if thin else _pages(bar, pages, payload, padding, hue)
    lost = f"{padding / pool.superpage_bytes:.2%} padding, {format_size(padding)}" if padding else "no padding"
    shapes = [
        group(drawn, kind="super-page", data_tag=member.tag, data_bytes=str(pool.superpage_bytes)),
        rect(MARGIN, 8, 14, 14, hue),
        label(MARGIN + 22, 20, member.tag),
        text(RIGHT_X, 13, f"{count(pages, 'page')} of {format_size(payload)}"),
        text(RIGHT_X, 28, lost, size=12, fill=FAINT),
    ]
    return Drawing(tuple(shapes), 30)


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
    words = text(bar.x + 12, bar.y + 19, says, size=12, fill=INK)
    pages_piece = bar.piece(0, pages * payload, hue, "page", f"{count(pages, 'page')}")
    return [pages_piece, *lines, plate, words, *_padding(bar, pages * payload, padding)]


def _padding(bar: Bar, start: int, size: int) -> list[str]:
    return [bar.piece(start, size, PADDING, "padding", f"padding: {format_size(size)}")] if size else []

"""One page of a group, zoomed in on: its lanes, the kernel blocks of one, the layers of one, the roles of one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvweave.cli.format import count, format_layers, format_reach, format_role, format_size
from kvweave.cli.svg.draw import (
    FAINT,
    INK,
    LINE,
    PADDING,
    Bar,
    Drawing,
    Sheet,
    line,
    paragraph,
    rect,
    shade,
    stack,
    text,
)
from kvweave.plan import Group, Pool
from kvweave.spec import Role

BAR_HEIGHT, ZOOM_HEIGHT = 24.0, 20.0
NARROWEST = 5.0
FINEST = 0.25
"""Pixels that a piece must be wide to be drawn at all."""
"""Pixels below which a role is not divided by lines."""


@dataclass(frozen=True, slots=True)
class Level:
    """A page, or a piece of one, that consists of `pieces` equal `name`s."""

    name: str
    pieces: int
    num_bytes: int


def page_drawing(sheet: Sheet, group: Group, pool: Pool, hue: str, x: float, width: float) -> Drawing:
    """A panel of `width` from `x` on. Each bar has its own scale: the whole of it is one piece of the bar above."""
    levels = _levels(group, pool)
    bars = [Bar(x, number * (BAR_HEIGHT + ZOOM_HEIGHT), width, BAR_HEIGHT, level.num_bytes) for number, level in levels]
    shapes = [shape for bar, (_, level) in zip(bars, levels, strict=True) for shape in _pieces(group, bar, level, hue)]
    for (above, below), (_, level), (_, inner) in zip(pairwise(bars), levels, levels[1:], strict=False):
        shapes.append(above.zoom_into(0, level.num_bytes / level.pieces, below))
        shapes.append(text(x + width, below.y - 6, _format_zoom(level, inner), size=11, fill=FAINT, anchor="end"))
    drawn = Drawing(tuple(shapes), bars[-1].y + BAR_HEIGHT + 6)
    return stack([_title(sheet, group, hue, x, width), drawn, _roles_legend(sheet, group, hue, x)], 2)


def _levels(group: Group, pool: Pool) -> list[tuple[int, Level]]:
    """From the page down to a layer, numbered; steps of one piece are left out."""
    counts = (("lane", pool.lanes), ("kernel block", group.kernel_blocks), ("layer", group.lane_layers))
    levels, num_bytes = [], group.page_bytes
    for name, pieces in counts:
        if pieces > 1:
            levels.append(Level(name, pieces, num_bytes))
        num_bytes //= pieces
    return list(enumerate([*levels, Level("role", 1, num_bytes)]))


def _format_zoom(level: Level, inner: Level) -> str:
    inside = f": {count(inner.pieces, inner.name)}" if inner.pieces > 1 else ""
    return f"one {level.name}{inside}, {format_size(inner.num_bytes)}"


def _title(sheet: Sheet, group: Group, hue: str, x: float, width: float) -> Drawing:
    unit = count(group.block_tokens, "token") if group.cache.reach.per_token else "one snapshot"
    kernel = f", in kernel blocks of {group.kernel_tokens}" if group.kernel_blocks > 1 else ""
    layers = f"{count(len(group.layers), 'layer')}: {format_layers(group.layers)}"
    shapes = (
        rect(x, 4, 14, 14, hue),
        text(x + 22, 16, group.tag, size=14, bold=True),
        text(x + width, 16, format_size(group.payload_bytes), size=14, bold=True, anchor="end"),
    )
    said = paragraph(sheet, [f"{format_reach(group.cache.reach)}; {unit} a page{kernel}", layers], x=x - sheet.margin)
    return stack([Drawing(shapes, 24), said], 0)


def _pieces(group: Group, bar: Bar, level: Level, hue: str) -> list[str]:
    """A level's pieces, each with the roles of its layers in it as far as they can be seen; one if too fine."""
    pieces = level.pieces if bar.width / level.pieces >= FINEST else 1
    step = level.num_bytes // pieces
    layers = step // group.layer_bytes
    shapes = []
    for number in range(pieces):
        inner = Bar(bar.x_of(number * step), bar.y, bar.width / pieces, bar.height, step)
        shapes += _roles(group, inner, hue) if layers == 1 else [inner.piece(0, step, hue, level.name)]
    if level.name == "role":
        shapes += _cuts(group, bar)
    gaps = [line(bar.x_of(number * step), bar.y, bar.y + bar.height) for number in range(1, pieces)]
    return [*shapes, *gaps]


def _own_roles(group: Group) -> list[Role]:
    return [role for role in group.cache.roles if role.alias_of is None]


def _roles(group: Group, bar: Bar, hue: str) -> list[str]:
    """The roles of one layer where they lie; what alignment leaves between them is padding."""
    shapes = [rect(bar.x, bar.y, bar.width, bar.height, PADDING)]
    for number, role in enumerate(_own_roles(group)):
        start, size = group.role_offsets[role.name], role.row_bytes * group.num_rows(role)
        shapes.append(bar.piece(start, size, shade(hue, number), "role", f"{role.name}: {format_size(size)}"))
    return shapes


def _cuts(group: Group, bar: Bar) -> list[str]:
    """Lines between the heads, rows or planes of each role, where they are wide enough."""
    shapes = []
    for role in _own_roles(group):
        start, runs = group.role_offsets[role.name], _runs(group, role)
        if bar.width * min(runs) / bar.num_bytes >= NARROWEST:
            ends = (start + end for end in accumulate(runs[:-1]))
            shapes += [line(bar.x_of(end), bar.y, bar.y + bar.height, opacity=0.45) for end in ends]
    return shapes


def _runs(group: Group, role: Role) -> list[int]:
    """Bytes of the runs that a role consists of in memory: its planes, else what its first axis counts."""
    rows = group.num_rows(role)
    if role.planar:
        return [part.num_bytes * rows for part in role.parts]
    axis = rows if group.cache.reach.per_token and role.token_axis == 0 else role.shape[0]
    return [role.row_bytes * rows // axis] * axis


def _roles_legend(sheet: Sheet, group: Group, hue: str, x: float) -> Drawing:
    """A role a line, since some are too thin to be written on."""
    lines = []
    for number, role in enumerate(_own_roles(group)):
        words = paragraph(sheet, [format_role(group, role)], fill=INK, x=x - sheet.margin + 20)
        swatch = rect(x, 2, 12, 12, shade(hue, number), stroke=LINE)
        lines.append(Drawing((swatch, *words.shapes), words.height))
    return stack(lines, 0)

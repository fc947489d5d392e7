"""SVG shapes as strings, drawings that stack, and the colours: a hue a group, a shade a role, grey for padding."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

INK, FAINT, LINE, PAPER, WHITE = "#1f2933", "#616e7c", "#cbd2d9", "#fdfdfb", "#ffffff"
ON_LIGHT = "#1c252f"
"""Ink on light shapes, which stay light where a page is dark."""
EMPTY, PADDING, NULL = "#ecedea", "#7b8794", "#3e4c59"
HUES = ("#3b6fd6", "#e8833a", "#2a9d8f", "#b5489f", "#d1a02b", "#6a4fc4", "#c8473f", "#3f9b3f", "#2795b8", "#8a6d4b")
FONTS = "'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
SHADES = (0.0, 0.42, 0.66, 0.22, 0.78)
"""How much white is mixed into a hue for the first role, the second, ..."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """How wide a picture is, and what stays free at its sides. Narrow ones, for phones, put names above their bars."""

    width: int
    margin: int
    is_narrow: bool = False

    @property
    def right(self) -> int:
        return self.width - self.margin

    @property
    def inner(self) -> int:
        return self.width - 2 * self.margin

    @property
    def bar_x(self) -> int:
        """Where bars start that have a name."""
        return self.margin if self.is_narrow else 180

    @property
    def bar_width(self) -> int:
        return self.inner if self.is_narrow else 770


WIDE, NARROW = Sheet(1200, 40), Sheet(400, 12, is_narrow=True)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes below `y = 0`, and the height that they take."""

    shapes: tuple[str, ...]
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal strip in which lengths are bytes."""

    x: float
    y: float
    width: float
    height: float
    num_bytes: int

    def x_of(self, offset: float) -> float:
        return self.x + self.width * offset / self.num_bytes

    def piece(self, start: float, size: int, fill: str, kind: str, tip: str = "") -> str:
        """`size` bytes from `start` on, to scale."""
        x, width = self.x_of(start), self.width * size / self.num_bytes
        return rect(x, self.y, width, self.height, fill, kind=kind, tip=tip, num_bytes=size)

    def frame(self) -> str:
        return rect(self.x, self.y, self.width, self.height, "none", stroke=LINE)

    def zoom_into(self, start: float, size: float, below: Bar) -> str:
        """A pale funnel from a piece of this bar to the whole of the one below."""
        left, right = self.x_of(start), max(self.x_of(start + size), self.x_of(start) + 1)
        top, bottom = self.y + self.height, below.y
        points = ((left, top), (right, top), (below.x + below.width, bottom), (below.x, bottom))
        joined = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        return f'<polygon points="{joined}" fill="#e4e7eb" fill-opacity="0.7"/>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str = "none",
    kind: str = "",
    tip: str = "",
    num_bytes: int | None = None,
) -> str:
    """A rectangle; `tip` is shown under the pointer, `kind` and `num_bytes` are attributes for programs that read the
    file."""
    extra = f" class={quoteattr(kind)}" if kind else ""
    extra += f' data-bytes="{num_bytes}"' if num_bytes is not None else ""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    box = f'x="{x:.3f}" y="{y:.2f}" width="{width:.4f}" height="{height:.2f}"'
    return f'<rect {box} fill="{fill}" stroke="{stroke}"{extra}>{inner}</rect>'


def text(
    x: float, y: float, words: str, *, size: int = 13, fill: str = INK, bold: bool = False, anchor: str = "start"
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def line(x: float, top: float, bottom: float, colour: str = WHITE, opacity: float = 1.0) -> str:
    return f'<path d="M{x:.2f} {top:.2f}V{bottom:.2f}" stroke="{colour}" stroke-opacity="{opacity:g}"/>'


def lighter(colour: str, white: float) -> str:
    """`white` = 0 is the colour itself, 1 is white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)


def hues(tags: Sequence[str]) -> dict[str, str]:
    """A colour a group, in their order."""
    return {tag: HUES[number % len(HUES)] for number, tag in enumerate(tags)}


def shade(hue: str, number: int) -> str:
    """The colour of a group's role `number`."""
    return lighter(hue, SHADES[number % len(SHADES)])


def group(shapes: Iterable[str], **attributes: str) -> str:
    """Shapes under common attributes; underscores in their names stand for hyphens, `kind` for class."""
    names = {name: "class" if name == "kind" else name.replace("_", "-") for name in attributes}
    written = " ".join(f"{names[name]}={quoteattr(value)}" for name, value in attributes.items())
    return f"<g {written}>{''.join(shapes)}</g>"


def stack(drawings: Iterable[Drawing], gap: float) -> Drawing:
    """One below the other."""
    shapes, y = [], 0.0
    for drawing in drawings:
        shapes.append(group(drawing.shapes, transform=f"translate(0 {y:.1f})"))
        y += drawing.height + gap
    return Drawing(tuple(shapes), max(0.0, y - gap))


def paragraph(
    sheet: Sheet, sentences: Iterable[str], size: int = 12, fill: str = FAINT, x: float = 0, bold: bool = False
) -> Drawing:
    """Sentences below one another, each broken where the sheet ends; `x` is how far they are indented."""
    letters = int((sheet.inner - x) / (0.54 * size))
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, letters)]
    step = size + 6
    shapes = [
        text(sheet.margin + x, size + step * at, words, size=size, fill=fill, bold=bold)
        for at, words in enumerate(lines)
    ]
    return Drawing(tuple(shapes), step * len(lines))


def heading(sheet: Sheet, words: str, beside: str = "") -> Drawing:
    """A title, and what is said of it on the right, or below it."""
    title = Drawing((text(sheet.margin, 18, words, size=17, bold=True),), 30)
    if sheet.is_narrow:
        return stack([title, paragraph(sheet, [beside])], 0) if beside else title
    said = [text(sheet.right, 18, beside, size=13, fill=FAINT, anchor="end")] if beside else []
    return Drawing((*title.shapes, *said), 30)


def bar_row(
    sheet: Sheet,
    left: tuple[str, str],
    right: tuple[str, str],
    height: float,
    draw: Callable[[float, float], Iterable[str]],
    swatch: str = "",
) -> Drawing:
    """A bar with a name on its left and numbers on its right; on a narrow sheet they are above it.

    `left` and `right` are a word and what is said of it below; `draw(x, y)` draws the bar, `height` high, from there.
    """
    margin, end = sheet.margin, sheet.right if sheet.is_narrow else sheet.bar_x + sheet.bar_width + 16
    anchor, y = ("end", 36.0) if sheet.is_narrow else ("start", 0.0)
    start = margin + (22 if swatch else 0)
    shapes = [rect(margin, 4, 13, 13, swatch)] if swatch else []
    shapes += [text(start, 15, left[0], bold=True), text(margin, 31, left[1], size=12, fill=FAINT)]
    shapes += [text(end, 15, right[0], bold=True, anchor=anchor)]
    shapes += [text(end, 31, right[1], size=12, fill=FAINT, anchor=anchor)]
    return Drawing((*shapes, *draw(sheet.bar_x, y)), y + max(height, 34.0))


def legend(sheet: Sheet, entries: Sequence[tuple[str, str]]) -> Drawing:
    """Swatches with their words, as many to a line as fit."""
    shapes, x, row = [], float(sheet.margin), 0
    for fill, words in entries:
        width = 40 + 7.4 * len(words)
        if x > sheet.margin and x + width > sheet.right:
            x, row = float(sheet.margin), row + 1
        shapes.append(rect(x, 22 * row, 13, 13, fill, stroke=LINE))
        shapes.append(text(x + 20, 11 + 22 * row, words))
        x += width
    return Drawing(tuple(shapes), 22 * row + 16)


def document(sheet: Sheet, body: Drawing, *, alone: bool = True) -> str:
    """An SVG document, or, if it is not `alone`, a part of an HTML page."""
    height = round(body.height + 2 * sheet.margin)
    size = f'viewBox="0 0 {sheet.width} {height}"'
    size += f' xmlns="http://www.w3.org/2000/svg" width="{sheet.width}" height="{height}"' if alone else ""
    kind = "" if alone else ' class="narrow"' if sheet.is_narrow else ' class="wide"'
    return (
        f'<svg{kind} {size} font-family="{FONTS}">\n{rect(0, 0, sheet.width, height, PAPER)}\n'
        f'<g transform="translate(0 {sheet.margin})">\n' + "\n".join(body.shapes) + "\n</g>\n</svg>\n"
    )

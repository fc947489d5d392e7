"""Parts of an HTML page that needs nothing else: no scripts, no fonts, no links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from kvweave.cli.report.style import css
from kvweave.cli.svg.draw import NARROW, WIDE, Drawing, Sheet
from kvweave.cli.svg.draw import document as draw_svg

Tile = tuple[str, str, str]
"""A number, what it is, and whether it is good, bad or neither."""


def document(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{css()}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def tiles(each: Iterable[Tile]) -> str:
    cells = "".join(f'<div class="tile {kind}"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s, kind in each)
    return f'<div class="tiles">{cells}</div>'


def section(title: str, says: str, inner: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n" + (f"<p>{escape(says)}</p>\n" if says else "") + f"{inner}\n</section>"


def figure(draw: Callable[[Sheet], Drawing]) -> str:
    """A picture, drawn wide and narrow: the page shows the one for its width."""
    drawn = [draw_svg(sheet, draw(sheet), alone=False) for sheet in (WIDE, NARROW)]
    return f"<figure>{''.join(drawn)}</figure>"


def details(title: str, table: str) -> str:
    """What a picture shows only under a pointer, as a table that needs none."""
    return f"<details><summary>{title}</summary>{table}</details>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; on a narrow screen its rows become lists, each cell with the name of its column."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    cells = (
        "".join(f'<td data-head="{escape(h)}">{escape(cell)}</td>' for h, cell in zip(heads, row, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def data(id: str, numbers: Any) -> str:
    """All numbers once more, for programs; nothing in it can end the element."""
    written = json.dumps(numbers).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{written}</script>'

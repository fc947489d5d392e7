"""Parts of an HTML page that needs nothing else: no scripts, no fonts, no links."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kvweave.cli.report.style import css

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


def figure(drawn: str) -> str:
    return f"<figure>{drawn}</figure>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def data(id: str, numbers: Any) -> str:
    """All numbers once more, for programs; nothing in it can end the element."""
    written = json.dumps(numbers).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{written}</script>'

"""The whole picture: title, memory, pools, pages, and a caption that says what is to scale."""

from __future__ import annotations

from collections.abc import Mapping

from kvweave.cli.format import format_cost, format_title
from kvweave.cli.plan_request import PlanResult
from kvweave.cli.svg.draw import FAINT, MARGIN, PAPER, WIDTH, Drawing, heading, hues, rect, stack, text
from kvweave.cli.svg.memory_drawing import memory_drawing
from kvweave.cli.svg.page_drawing import page_drawing
from kvweave.cli.svg.pool_drawing import pool_drawing
from kvweave.cli.svg.sample_load import SampleLoad
from kvweave.plan import Plan
from kvweave.plan.plan import TYPICAL_TOKENS

GUTTER = 48
FONTS = "'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
CAPTION = (
    "Bars are to scale from left to right. A super-page belongs to one group at a time, and is drawn for each.",
    "The first super-page of a pool is NULL: nobody's, and what tables name where there is nothing.",
    "Padding lies behind each page; where that is thinner than a pixel, the padding of all pages is drawn at the end.",
    "In the pages each bar has its own scale: the whole of it is one piece of the bar above.",
)


def plan_svg(answer: PlanResult) -> str:
    """An SVG document, 1200 wide, as high as it must be."""
    plan = answer.plan
    colours = hues([group.tag for group in plan.groups])
    load = SampleLoad.of(plan, answer.context or TYPICAL_TOKENS)
    body = stack(
        [
            _title(answer),
            memory_drawing(plan, colours, load),
            *(pool_drawing(plan, pool, colours, load) for pool in plan.pools),
            _pages(plan, colours),
            _caption(),
        ],
        36,
    )
    return _document(body)


def _document(body: Drawing) -> str:
    height = round(body.height + 2 * MARGIN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' font-family="{FONTS}">\n{rect(0, 0, WIDTH, height, PAPER)}\n'
        f'<g transform="translate(0 {MARGIN})">\n' + "\n".join(body.shapes) + "\n</g>\n</svg>\n"
    )


def _title(answer: PlanResult) -> Drawing:
    title = text(MARGIN, 20, format_title(answer), size=24, bold=True)
    return Drawing((title, text(MARGIN, 46, f"A sequence keeps {format_cost(answer.plan)}.", size=14, fill=FAINT)), 46)


def _pages(plan: Plan, colours: Mapping[str, str]) -> Drawing:
    """A panel a group, two to a row."""
    groups = [group for group in plan.groups if group.layers]
    columns = min(2, len(groups))
    width = (WIDTH - 2 * MARGIN - GUTTER * (columns - 1)) / columns
    panels = [
        page_drawing(
            group, plan.pool(group.pool), colours[group.tag], MARGIN + (width + GUTTER) * (number % columns), width
        )
        for number, group in enumerate(groups)
    ]
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    drawn = [
        Drawing(tuple(shape for panel in row for shape in panel.shapes), max(panel.height for panel in row))
        for row in rows
    ]
    return stack([heading("One page of each group"), stack(drawn, 28)], 4)


def _caption() -> Drawing:
    shapes = [text(MARGIN, 12 + 18 * number, words, size=12, fill=FAINT) for number, words in enumerate(CAPTION)]
    return Drawing(tuple(shapes), 18 * len(CAPTION))

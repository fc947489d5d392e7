"""The whole picture: title, memory, pools, pages, and a caption that says what is to scale."""

from __future__ import annotations

from collections.abc import Mapping

from kvweave.cli.format import format_cost, format_title
from kvweave.cli.plan_request import PlanResult
from kvweave.cli.svg.draw import INK, WIDE, Drawing, Sheet, document, heading, hues, paragraph, stack
from kvweave.cli.svg.memory_drawing import memory_drawing
from kvweave.cli.svg.page_drawing import page_drawing
from kvweave.cli.svg.pool_drawing import pool_drawing
from kvweave.cli.svg.sample_load import SampleLoad
from kvweave.plan import Plan
from kvweave.plan.plan import TYPICAL_TOKENS

GUTTER = 48
CAPTION = (
    "Bars are to scale from left to right. A super-page belongs to one group at a time, and is drawn for each.",
    "The first super-page of a pool is NULL: no group has it, and tables name it where there is no page.",
    "Padding lies behind each page; where that is thinner than a pixel, the padding of all pages is drawn at the end.",
    "In the pages each bar has its own scale: the whole of it is one piece of the bar above.",
)


def plan_svg(answer: PlanResult) -> str:
    """An SVG document, 1200 wide, as high as it must be."""
    return document(WIDE, plan_drawing(WIDE, answer))


def plan_drawing(sheet: Sheet, answer: PlanResult) -> Drawing:
    plan = answer.plan
    colours = hues([group.tag for group in plan.groups])
    load = SampleLoad.of(plan, answer.context or TYPICAL_TOKENS)
    return stack(
        [
            _title(sheet, answer),
            memory_drawing(sheet, plan, colours, load),
            *(pool_drawing(sheet, plan, pool, colours, load) for pool in plan.pools),
            _pages(sheet, plan, colours),
            paragraph(sheet, CAPTION),
        ],
        36,
    )


def _title(sheet: Sheet, answer: PlanResult) -> Drawing:
    title = paragraph(sheet, [format_title(answer)], size=16 if sheet.is_narrow else 24, fill=INK, bold=True)
    return stack([title, paragraph(sheet, [f"A sequence keeps {format_cost(answer)}."], size=14)], 0)


def _pages(sheet: Sheet, plan: Plan, colours: Mapping[str, str]) -> Drawing:
    """A panel a group, two to a row where there is room."""
    groups = [group for group in plan.groups if group.layers]
    columns = 1 if sheet.is_narrow else min(2, len(groups))
    width = (sheet.inner - GUTTER * (columns - 1)) / columns
    panels = [
        page_drawing(
            sheet,
            group,
            plan.pool(group.pool),
            colours[group.tag],
            sheet.margin + (width + GUTTER) * (number % columns),
            width,
        )
        for number, group in enumerate(groups)
    ]
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    drawn = [
        Drawing(tuple(shape for panel in row for shape in panel.shapes), max(panel.height for panel in row))
        for row in rows
    ]
    return stack([heading(sheet, "One page of each group"), stack(drawn, 28)], 4)

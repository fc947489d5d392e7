"""The pictures of a run: one for a README, and each on its own, wide and narrow, for a page."""

from __future__ import annotations

from kvweave.cli.report.charts import requests_drawing, time_drawing
from kvweave.cli.report.pool_map import map_drawing
from kvweave.cli.report.tree_drawing import tree_drawing
from kvweave.cli.run.run_request import RunResult
from kvweave.cli.svg.draw import FAINT, WIDE, Drawing, Sheet, document, hues, stack, text
from kvweave.cli.svg.plan_picture import plan_drawing


def run_svg(result: RunResult) -> str:
    """An SVG document: requests, the tree and the map."""
    title = Drawing(
        (
            text(WIDE.margin, 20, result.title, size=22, bold=True),
            text(WIDE.margin, 44, "  ".join(result.about[:1]), size=13, fill=FAINT),
        ),
        46,
    )
    parts = drawings(WIDE, result)
    return document(WIDE, stack([title, parts["requests"], parts["tree"], parts["map"]], 30))


def drawings(sheet: Sheet, result: RunResult) -> dict[str, Drawing]:
    colours = hues([group.tag for group in result.answer.plan.groups])
    return {
        "requests": requests_drawing(sheet, result.outcomes),
        "time": time_drawing(sheet, result.outcomes),
        "tree": tree_drawing(sheet, result.snapshot),
        "map": map_drawing(sheet, result.snapshot, colours),
        "plan": plan_drawing(sheet, result.answer),
    }

"""The pictures of a run: one for a README, and each on its own for a page."""

from __future__ import annotations

from kvweave.cli.report.charts import requests_drawing, time_drawing
from kvweave.cli.report.pool_map import map_drawing
from kvweave.cli.report.tree_drawing import tree_drawing
from kvweave.cli.run.run_request import RunResult
from kvweave.cli.svg.draw import FAINT, MARGIN, PAPER, WIDTH, Drawing, hues, rect, stack, text
from kvweave.cli.svg.plan_picture import FONTS

NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'


def run_svg(result: RunResult) -> str:
    """An SVG document: requests, the tree and the map."""
    title = Drawing(
        (
            text(MARGIN, 20, result.title, size=22, bold=True),
            text(MARGIN, 44, "  ".join(result.about[:1]), size=13, fill=FAINT),
        ),
        46,
    )
    parts = drawings(result)
    return svg(stack([title, parts["requests"], parts["tree"], parts["map"]], 30), NAMESPACE)


def drawings(result: RunResult) -> dict[str, Drawing]:
    colours = hues([group.tag for group in result.answer.plan.groups])
    return {
        "requests": requests_drawing(result.outcomes),
        "time": time_drawing(result.outcomes),
        "tree": tree_drawing(result.snapshot),
        "map": map_drawing(result.snapshot, colours),
    }


def svg(body: Drawing, namespace: str = "") -> str:
    """A document of its own, or, without a namespace, a part of an HTML page."""
    height = round(body.height + 2 * MARGIN)
    size = f'viewBox="0 0 {WIDTH} {height}"' + (f' width="{WIDTH}" height="{height}"' if namespace else "")
    shapes = "\n".join(body.shapes)
    return (
        f'<svg{namespace} {size} font-family="{FONTS}">\n{rect(0, 0, WIDTH, height, PAPER)}\n'
        f'<g transform="translate(0 {MARGIN})">\n{shapes}\n</g>\n</svg>\n'
    )

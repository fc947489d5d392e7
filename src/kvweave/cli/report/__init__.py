"""The report of a run: one self-contained HTML page, and a small SVG picture."""

from kvweave.cli.report.report_page import report_html
from kvweave.cli.report.run_picture import run_svg

__all__ = ["report_html", "run_svg"]

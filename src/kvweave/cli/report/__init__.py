"""What came of a run, as one self-contained HTML page and as a small SVG picture."""

from kvweave.cli.report.report_page import report_html
from kvweave.cli.report.run_picture import run_svg

__all__ = ["report_html", "run_svg"]

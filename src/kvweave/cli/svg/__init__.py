"""A plan as one SVG picture: the memory, its super-pages, and one page of each group. No fonts, no scripts."""

from kvweave.cli.svg.plan_picture import plan_svg

__all__ = ["plan_svg"]

"""A bar that shows on a terminal how far a command is."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn


def progress_bar(time: ProgressColumn, *, shown: bool = True) -> Progress:
    """On stderr, if that is a terminal; gone when it is done. `time` is its last column."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), time)
    disable = not (shown and sys.stderr.isatty())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=disable)

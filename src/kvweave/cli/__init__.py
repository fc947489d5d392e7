"""The command line, `kvweave --help`. Needs `kvweave[cli]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from kvweave.cli.version import version_line
from kvweave.errors import MissingExtra

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """`kvweave.cli.app.main`, or, where rich and typer are not installed, one line that says how to get them."""
    try:
        from kvweave.cli.app import main as run  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "typer"}:
            raise
        if list(sys.argv[1:] if argv is None else argv) == ["--version"]:
            print(version_line())
            sys.exit(0)
        print(f"kvweave: error: {MissingExtra('the kvweave command', 'cli', error.name)}", file=sys.stderr)
        sys.exit(2)
    run(argv)

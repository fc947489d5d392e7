"""The command line: `kvweave plan | demo | examples`."""

from kvweave.cli.app import main

__all__ = ["main"]

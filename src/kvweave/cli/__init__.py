"""The command line: `kvweave plan | run | demo | examples`."""

from kvweave.cli.app import main

__all__ = ["main"]

"""The command line: `kvweave plan | run | serve | inspect | clear | demo | examples`."""

from kvweave.cli.app import main

__all__ = ["main"]

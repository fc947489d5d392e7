"""What `kvweave --version` says."""

from kvweave import __version__
from kvweave.cache import cache


def version_line() -> str:
    """The version, and whether this build's core was compiled: the same results, faster."""
    core = "interpreted" if cache.__file__.endswith(".py") else "compiled"
    return f"kvweave {__version__} ({core} core)"

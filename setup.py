"""The core is plain Python, and is compiled by mypyc where wheels are built and a C compiler is there.

Nothing else changes: without a compiler, with KVWEAVE_PURE=1, or installed as editable, the same files are interpreted.
"""

import os
import sys
import warnings
from pathlib import Path

from setuptools import Extension, setup

COMPILED = ("pool", "prefix", "table", "cache")


def compiled() -> list[Extension]:
    if os.environ.get("KVWEAVE_PURE") or "editable_wheel" in sys.argv:
        return []
    files = [str(path) for folder in COMPILED for path in sorted(Path("src/kvweave", folder).glob("[!_]*.py"))]
    os.environ.setdefault("MYPYPATH", "src")
    try:
        from mypyc.build import mypycify  # noqa: PLC0415

        extensions: list[Extension] = mypycify(["--strict", *files], opt_level="3", debug_level="0")
    except (Exception, SystemExit) as error:
        warnings.warn(f"the core is not compiled: {error}", stacklevel=1)
        return []
    for extension in extensions:
        extension.optional = True
    return extensions


setup(ext_modules=compiled())

"""Two things are compiled where there is a C compiler; without one, or with KVWEAVE_PURE=1, Python does the same.

The core is plain Python, compiled by mypyc where wheels are built; installed as editable, its files are interpreted as
they are. What touches every byte of the host's memory, or every token of a list, is C, which editable installs have
too. So is what talks to CUDA's driver, for which Python does not stand in.
"""

import os
import sys
import warnings
from pathlib import Path

from setuptools import Extension, setup

COMPILED = ("pool", "prefix", "table", "cache")
NATIVE = ("prefix", "copying", "store", "transfer")


def core() -> list[Extension]:
    if {"editable_wheel", "--inplace"} & {*sys.argv}:
        return []
    files = [str(path) for folder in COMPILED for path in sorted(Path("src/kvweave", folder).glob("[!_]*.py"))]
    os.environ.setdefault("MYPYPATH", "src")
    try:
        from mypyc.build import mypycify  # noqa: PLC0415

        extensions: list[Extension] = mypycify(["--strict", *files], opt_level="3", debug_level="0")
    except (Exception, SystemExit) as error:
        warnings.warn(f"the core is not compiled: {error}", stacklevel=1)
        return []
    return extensions


def native(folder: str) -> Extension:
    flags = ["-O3", "-Wall", "-Wextra"]
    return Extension(f"kvweave.{folder}._native", [f"src/kvweave/{folder}/native.c"], extra_compile_args=flags)


extensions = [] if os.environ.get("KVWEAVE_PURE") else [*core(), *map(native, NATIVE)]
for extension in extensions:
    extension.optional = True
setup(ext_modules=extensions)

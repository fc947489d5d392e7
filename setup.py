"""What `pip install .` and `make wheel` compile. Everything works without it, more slowly.

- the core (`COMPILED`): some forty Python files, through mypyc to as many C files, which are compiled side by side. Of
  40 seconds of one core, mypy takes 13 and the C compiler 20;
- `NATIVE`: small C files, for what touches every byte of the host's memory, every page of a run or every token of a
  list, and for CUDA's driver, for which Python does not stand in.

Without a C compiler, or with KVWEAVE_PURE=1, the wheel is pure Python. A line of the build (`pip install -v`)
says so, and so does `kvweave --version`. In an editable install the core's files are interpreted as they are.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILED = ("pool", "prefix", "policy", "table", "cache")
NATIVE = ("pool", "prefix", "copying", "store", "transfer", "attention")
BUILDS = {"bdist_wheel", "build", "build_ext", "editable_wheel", "install"}
"""The commands that need the extensions; pip runs this file twice more, for metadata alone."""


def say(words: str) -> None:
    print(f"kvweave: {words}", file=sys.stderr)


def compiler_error() -> str:
    """Why no extension can be compiled here; empty if a small one can."""
    from setuptools._distutils.ccompiler import new_compiler  # noqa: PLC0415
    from setuptools._distutils.sysconfig import customize_compiler, get_python_inc  # noqa: PLC0415

    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n")
        try:
            compiler.compile([str(source)], output_dir=folder, include_dirs=[get_python_inc()])
        except Exception as error:
            return str(error)
    return ""


def core() -> list[Extension]:
    """The core as extensions; none, and a line that says why, if mypyc does not take it.

    -O1: it runs as fast as with -O3 (its time goes to calls into Python and numpy), and compiles in half the time.
    """
    paths = [path for folder in COMPILED for path in sorted(Path("src/kvweave", folder).glob("[!_]*.py"))]
    os.environ.setdefault("MYPYPATH", "src")
    try:
        from mypyc.build import mypycify  # noqa: PLC0415

        extensions: list[Extension] = mypycify(
            ["--strict", *map(str, paths)], opt_level="1", debug_level="0", multi_file=True
        )
    except (Exception, SystemExit) as error:
        say(f"mypyc failed ({error}): the core is interpreted, more slowly")
        return []
    sources = {Path(source).name: Path(source) for extension in extensions for source in extension.sources}
    for path in paths:
        source = sources[f"__native_{module_of(path).replace('.', '___')}.c"]
        source.write_text(with_docstrings(source.read_text(), path, paths))
    return extensions


def native(folder: str) -> Extension:
    """Optional: where it does not compile, Python stands in, or `NotBuilt` says what is missing."""
    flags = ["-O3", "-Wall", "-Wextra"]
    source = f"src/kvweave/{folder}/native.c"
    return Extension(f"kvweave.{folder}._native", [source], extra_compile_args=flags, optional=True)


# ---- docstrings: mypyc leaves them out, so they are written into the C that it made


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts[1:])


def with_docstrings(code: str, path: Path, paths: list[Path]) -> str:
    """The C that mypyc made of a file, one of `paths`, with the docstrings of the file."""
    from mypyc.namegen import NameGenerator  # noqa: PLC0415

    module, tree = module_of(path), ast.parse(path.read_text())
    names = NameGenerator([[module_of(each) for each in paths]])
    code = put(code, rf'("{re.escape(module)}",\s+)NULL(, /\* docstring \*/)', tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            code = put_function(code, names.private_name(module, node.name), node)
        elif isinstance(node, ast.ClassDef):
            code = put_class(code, module, names.private_name(module, node.name), node)
    return code


def put_class(code: str, module: str, name: str, node: ast.ClassDef) -> str:
    """Of the class (where it is no extension class, as a NamedTuple, instead of mypyc's filler) and of its methods."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    init = next((signature(item, node.name) for item in methods if item.name == "__init__"), f"{node.name}()")
    code = put(code, rf"(CPyType_{name}_template_ = {{[^}}]*?\.tp_doc = PyDoc_STR\().*(\),\n)", node, init)
    filler = rf"()CPyStatics\[\d+\](; /\* 'mypyc filler docstring' \*/[^']*'__doc__'[^']*'{re.escape(module)}'"
    code = put(code, rf"{filler}[^']*'__module__'[^']*'{node.name}')", node, call="PyUnicode_FromString({})")
    for item in methods:
        code = put_function(code, f"{name}___{item.name}", item)
        code = put(code, rf"(\(getter\){name}_get_{item.name},\s+(?:NULL|\(setter\)\w+),\s+)NULL(, NULL}})", item)
    return code


def put_function(code: str, name: str, node: ast.FunctionDef) -> str:
    pattern = rf"(\(PyCFunction\)CPyPy_{name},\s+[A-Z_| ]+, PyDoc_STR\().*(\).*}},\n)"
    return put(code, pattern, node, signature(node))


Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def put(code: str, pattern: str, node: Documented, head: str = "", call: str = "{}") -> str:
    """`code` with the docstring of `node`, after its signature `head`, between the two groups of `pattern`."""
    text = ast.get_docstring(node)
    literal = c_string(f"{head}\n--\n\n{text}" if head else text or "")
    return re.sub(pattern, lambda match: match[1] + call.format(literal) + match[2], code, count=1) if text else code


def signature(node: ast.FunctionDef, class_name: str = "") -> str:
    """As CPython reads it in a docstring; of a class, without self. Empty if a default is no literal.

    It takes the place of mypyc's, which calls all parameters positional where one of them is a float.
    """
    given = deepcopy(node.args)
    for parameter in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg):
        if parameter is not None:
            parameter.annotation = None
    if class_name:
        del given.args[0]
    elif given.args and given.args[0].arg in {"self", "cls"}:
        given.args[0].arg = f"${given.args[0].arg}"
    try:
        _ = [ast.literal_eval(default) for default in (*given.defaults, *given.kw_defaults) if default is not None]
    except ValueError:
        return ""
    return f"{class_name or node.name}({ast.unparse(given)})"


def c_string(text: str) -> str:
    """A C literal; octal escapes, since hexadecimal ones have no end."""
    plain = {ord("\n"): "\\n", ord('"'): '\\"', ord("\\"): "\\\\", ord("?"): "\\?"}
    escaped = (plain.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in text.encode())
    return f'"{"".join(escaped)}"'


def extensions() -> list[Extension]:
    if not BUILDS & {*sys.argv}:
        return []
    if os.environ.get("KVWEAVE_PURE"):
        say("KVWEAVE_PURE is set: nothing is compiled, the core is interpreted")
        return []
    if problem := compiler_error():
        say(f"no C compiler ({problem}): the core is interpreted, more slowly")
        return []
    made = [native(folder) for folder in NATIVE]
    if not {"editable_wheel", "--inplace"} & {*sys.argv}:
        say(f"compiling the core and {len(NATIVE)} small C files: some 40 seconds of one core")
        made += core()
    return made


class ParallelBuild(build_ext):
    """Compiles the files of an extension side by side; the extensions one after the other."""

    def build_extensions(self) -> None:
        self.compiler.compile = partial(compile_all, self.compiler.compile)
        super().build_extensions()


def compile_all(compile_one: Any, sources: list[str], **options: Any) -> list[str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*chain.from_iterable(pool.map(lambda source: compile_one([source], **options), sources))]


setup(ext_modules=extensions(), cmdclass={"build_ext": ParallelBuild})

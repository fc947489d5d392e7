"""The distributions in fresh environments: a wheel with a compiled core and its docstrings, one without a compiler.

`make wheel` builds them into dist/ and runs this on them; elsewhere they are built here, which takes a minute or two.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvweave

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
COMPILED = ("pool", "prefix", "policy", "table", "cache")

USE = """
import kvweave as kw
model = {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
plan = kw.make_plan(kw.from_config({**model, "head_dim": 64, "sliding_window": 32}), "8MiB")
with kw.Cache(plan) as cache:
    sequence = cache.open(range(100))
    list(cache.extend(sequence, 100)), list(cache.commit(sequence)), cache.close(sequence)
    print(cache.lookup(range(100)))
"""


def run(*command: str | Path, **environment: str) -> str:
    """What a command wrote; its errors are the test's."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, **environment, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made of it."""
    if made := os.environ.get("KVWEAVE_DIST"):
        return ROOT / made
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


def environment(folder: Path, wheel: Path) -> Path:
    """A Python with nothing but a wheel and what it depends on."""
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "pip", "install", "--quiet", *CONSTRAINTS, wheel)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def compiled(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = (path for path in dist.glob("*.whl") if "none-any" not in path.name)
    return environment(tmp_path_factory.mktemp("compiled"), wheel)


def documented() -> Iterator[tuple[str, str]]:
    """All that has a docstring in the compiled files, as a path to reach it: `kvweave.cache.cache:Cache.open`."""
    for path in sorted(path for folder in COMPILED for path in (ROOT / "src/kvweave" / folder).glob("[!_]*.py")):
        module, tree = f"kvweave.{path.parent.name}.{path.stem}", ast.parse(path.read_text())
        yield f"{module}:", ast.get_docstring(tree) or ""
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield f"{module}:{node.name}", ast.get_docstring(node) or ""
                body = node.body if isinstance(node, ast.ClassDef) else []
                methods = [item for item in body if isinstance(item, ast.FunctionDef)]
                yield from ((f"{module}:{node.name}.{item.name}", ast.get_docstring(item) or "") for item in methods)


def test_a_compiled_wheel_needs_numpy_alone(compiled: Path) -> None:
    assert run(compiled, "-c", USE).split() == ["96"]
    assert run(compiled, "-c", "import kvweave.cache.cache as c; print(c.__file__)").strip().endswith(".so")
    packages = run(compiled, "-m", "pip", "list", "--format=freeze").split()
    assert {package.partition("==")[0] for package in packages} <= {"kvweave", "numpy", "pip", "setuptools"}


def test_a_compiled_wheel_keeps_every_docstring(compiled: Path) -> None:
    wanted = {path: text for path, text in documented() if text}
    assert len(wanted) > 250
    program = f"""
import importlib, inspect, operator
for path, text in {wanted!r}.items():
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    found = operator.attrgetter(name)(found) if name else found
    if inspect.cleandoc(found.__doc__ or "") != text:
        print(path, "says", repr(found.__doc__))
"""
    assert run(compiled, "-c", program) == ""


def test_help_shows_signatures_and_contracts(compiled: Path) -> None:
    shown = run(compiled, "-c", "import kvweave; help(kvweave.Cache); help(kvweave.Cache.open)")
    assert "class Cache(kvweave.cache.sequence.SequenceOwner)" in shown
    policy = inspect.signature(kvweave.Cache).parameters["policy"].default
    assert f"Cache(plan, *, policy={policy!r}, retention=None, admission_reserve=0.0, rows=256" in shown
    assert "open(self, /, tokens, *, namespace=''" in shown
    assert "At least one token is left to compute." in shown


def test_the_command_of_a_bare_wheel_says_what_to_install(compiled: Path) -> None:
    command = compiled.parent / "kvweave"
    assert run(command, "--version").strip() == f"kvweave {kvweave.__version__} (compiled core)"
    bare = subprocess.run([command, "plan", "qwen3-next-80b"], capture_output=True, text=True, check=False)
    assert bare.returncode == 2
    assert "pip install 'kvweave[cli]'" in bare.stderr


def test_without_a_compiler_a_pure_wheel_is_built_and_says_so_once(dist: Path, tmp_path: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    said = run(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", tmp_path, source, CC="/no/such/compiler")
    assert said.count("no C compiler") == 1
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    python = environment(tmp_path / "pure", wheel)
    assert run(python, "-c", USE).split() == ["96"]
    assert run(python.parent / "kvweave", "--version").strip().endswith("(interpreted core)")

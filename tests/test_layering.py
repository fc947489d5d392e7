"""Folders import only toward the core, and the core needs numpy and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvweave

ROOT = Path(kvweave.__file__).parent
CORE = ("errors", "units", "host_memory", "spec", "plan", "pool", "prefix", "policy", "table", "cache")
EDGES = (
    "trace_writer",
    "operation",
    "copying",
    "tensor",
    "transfer",
    "attention",
    "store",
    "server",
    "integrations",
    "engine",
    "sim",
    "cli",
    "__main__",
)
ORDER = (*CORE, *EDGES)
DATA = {"examples"}

MODULES = {
    ".".join(("kvweave", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(module: str, source: str) -> Iterator[tuple[str, int]]:
    """Every module of ours that `source` imports, wherever in it, with the line."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: -node.level + 1 or None]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = [full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.partition(".")[0] == "kvweave")


def folder(module: str) -> str:
    """The part of kvweave a module belongs to; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def ours(module: str) -> list[tuple[str, int]]:
    return list(imports(module, MODULES[module].read_text()))


@pytest.mark.parametrize("module", [name for name in MODULES if name != "kvweave"])
def test_a_module_imports_only_its_own_folder_and_those_nearer_to_the_core(module: str) -> None:
    mine = folder(module)
    assert mine in ORDER, f"{module}: folder {mine!r} is not in the order of DESIGN section 5"
    allowed = {*ORDER[: ORDER.index(mine) + 1], *([""] if mine in EDGES else [])}
    wrong = [f"line {line}: {name}" for name, line in ours(module) if folder(name) not in allowed]
    assert not wrong, f"{module} imports away from the core: {', '.join(wrong)}"


def test_every_folder_has_its_place_in_the_order() -> None:
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found - {*ORDER, *DATA} == set()


def test_the_package_itself_imports_the_core_only() -> None:
    assert {folder(name) for name, _ in ours("kvweave")} <= set(CORE)


def test_no_module_imports_itself_on_a_detour() -> None:
    graph = {name: {target for target, _ in ours(name)} - {name} for name in MODULES}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the detour


def test_the_walk_sees_imports_however_they_are_written() -> None:
    source = """
import kvweave.plan.view as v
from kvweave.plan import pool, Layout
from . import role
from .. import errors
from ..spec.model import ModelSpec
def late():
    from ..plan.planner import make_plan
"""
    seen = [name for name, _ in imports("kvweave.spec.codec", source)]
    assert seen[:3] == ["kvweave.plan.view", "kvweave.plan.pool", "kvweave.plan"]
    assert seen[3:] == ["kvweave.spec.role", "kvweave.errors", "kvweave.spec.model", "kvweave.plan.planner"]


BLOCKED = """
import importlib, sys

class OnlyNumpy:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | {"numpy", "kvweave"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, OnlyNumpy())
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["torch", "transformers", "rich", "typer", "hypothesis"])
def test_the_blocker_blocks(name: str) -> None:
    result = run(f"import {name}")
    assert result.returncode == 1
    assert f"{name} is blocked" in result.stderr


def test_the_simulator_replays_with_numpy_alone() -> None:
    names = [name for name in MODULES if folder(name) == "sim"]
    result = run(
        f"""
for name in {names!r}:
    importlib.import_module(name)
import kvweave, numpy
from importlib.resources import files
from kvweave.sim import Request, Trace, replay
spec = kvweave.from_config(str(files("kvweave") / "examples" / "qwen3-next-80b.json"))
trace = Trace("twice", "", 1, (Request(0.0, numpy.arange(4000, dtype=numpy.int32), 4000),) * 2)
assert replay(trace, kvweave.make_plan(spec, "8GiB")).hit_tokens > 3000
"""
    )
    assert len(names) > 15
    assert result.returncode == 0, result.stderr


def test_the_core_imports_plans_and_caches_with_numpy_alone() -> None:
    core = [name for name in MODULES if folder(name) in ("", *CORE)]
    result = run(
        f"""
for name in {core!r}:
    importlib.import_module(name)
import kvweave
from importlib.resources import files
spec = kvweave.from_config(str(files("kvweave") / "examples" / "qwen3-next-80b.json"))
plan = kvweave.make_plan(spec, "8GiB")
assert kvweave.explain(plan) and plan.sequences(32768) > 0
with kvweave.Cache(plan) as cache:
    for found in (0, 96):
        sequence = cache.open(range(100))
        assert sequence.num_cached == found
        for length in (96, 100)[found > 0:]:
            list(cache.extend(sequence, length - sequence.length)), list(cache.commit(sequence))
        cache.close(sequence)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("argv", "code"), [(["--version"], 0), (["plan", "qwen3-next-80b"], 2), ([], 2)])
def test_the_command_says_what_to_install(argv: list[str], code: int) -> None:
    result = run(f"import kvweave.cli\nkvweave.cli.main({argv!r})")
    assert result.returncode == code, result.stderr
    if code:
        assert result.stderr == "kvweave: error: the kvweave command needs typer: pip install 'kvweave[cli]'\n"
    else:
        assert result.stdout.startswith(f"kvweave {kvweave.__version__} (")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("kvweave.store", "store"),
        ("kvweave.server", "server"),
        ("kvweave.tensor", "torch"),
        ("kvweave.transfer", "torch"),
        ("kvweave.attention", "torch"),
        ("kvweave.engine", "transformers"),
        ("kvweave.integrations.transformers", "transformers"),
    ],
)
def test_an_import_says_which_extra_to_install(module: str, extra: str) -> None:
    result = run(f"import {module}")
    *_, said = result.stderr.splitlines()
    assert said.startswith(f"kvweave.errors.MissingExtra: {module} needs "), result.stderr
    assert said.endswith(f": pip install 'kvweave[{extra}]'")

"""Mutation testing, run by hand: `python scripts/mutants.py [--only SUBSTRING] [--jobs N] [--patience N] [--list]`.

Each mutant of `mutants.toml` is one small change of src/kvweave/{cache,policy,prefix,pool,table,store,server}, made in
a copy of the tree. Random lives run against those of the core first, then tests of the mutant's folder; it is killed
when anything fails or does not end in time. Exits with 1 if a mutant survives that is not marked as equivalent, or if
anything fails as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")
LIVES = """
import sys
import kvweave
from tests.cache.lives import Life
assert kvweave.__file__.startswith(sys.argv[1]), f"{kvweave.__file__} is not the copy in {sys.argv[1]}"
for seed in range(320):
    Life(seed).run(80)
"""
CACHE = tuple(f"tests/cache/test_{name}.py" for name in ("cache", "steps", "window_moves"))
CORE = (*CACHE, "tests/pool", "tests/table", "tests/prefix", "tests/policy")
SERVER_FILES = (
    "leases shares pins protocol requests tiers operations deadlines small_promises inbox capacity staged"
    " save_operation shared_arena hung"
)
SERVER = tuple(f"tests/server/test_{name}.py" for name in SERVER_FILES.split())
STORE_FILES = (
    "budget breaker journal ticket tiers faults tier_stack recovery recency removals jobs operations unreadable store"
    " checksums layouts tails engine_memory"
)
STORE = tuple(f"tests/store/test_{name}.py" for name in STORE_FILES.split())
TESTS = {"store": (*STORE, *SERVER), "server": SERVER}
"""By a mutant's folder; of the others the core's."""
LEFT_OUT = "(two_hundred_thousand_presence_patterns or every_pair_of_engines)"
"""They take longer than all others. The first is about prefix/joint.py alone, of which there are no mutants."""
LIVES_SECONDS, TESTS_SECONDS = 60, 240
"""Many times what unmutated code takes: beyond, a mutant hangs."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file: `old`, which occurs once in it, becomes `new`."""

    file: str
    old: str
    new: str
    breaks: str
    equivalent: str = ""
    """Why no test can notice it, where none can."""

    @property
    def folder(self) -> str:
        return self.file.partition("/")[0]

    def applied(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise SystemExit(f"{self.file}: {source.count(self.old)} times, not once: {self.old!r}")
        return source.replace(self.old, self.new)


def load(only: str) -> list[Mutant]:
    """The mutants of the table in which `only` occurs; all of the table must fit the core as it is."""
    mutants = [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text())["mutant"]]
    for mutant in mutants:
        mutated = mutant.applied((ROOT / "src" / "kvweave" / mutant.file).read_text())
        compile(mutated, mutant.file, "exec")
    return [mutant for mutant in mutants if any(only in text for text in (mutant.file, mutant.old, mutant.breaks))]


class Copy:
    """A copy of the sources and tests, in which one mutant at a time is tried."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.patience = patience
        folder.mkdir()
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def killer(self, mutant: Mutant) -> str:
        """What noticed a mutant; empty where nothing did."""
        path = self.folder / "src" / "kvweave" / mutant.file
        source = path.read_text()
        path.write_text(mutant.applied(source))
        try:
            return self.failure(mutant.folder, PYTHONDONTWRITEBYTECODE="1")  # compiled files stay those of the core
        finally:
            path.write_text(source)

    def failure(self, folder: str, **environment: str) -> str:
        """What fails first of that by which mutants of a folder are tried, in one line; empty where nothing does."""
        lives = "" if folder in TESTS else self._run("lives", LIVES_SECONDS, environment, "-c", LIVES, str(self.folder))
        options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", f"not {LEFT_OUT}")
        tests = ("-m", "pytest", *options, *TESTS.get(folder, CORE))
        return lives or self._run("pytest", TESTS_SECONDS, environment, *tests)

    def _run(self, name: str, seconds: int, environment: dict[str, str], *arguments: str) -> str:
        paths = os.pathsep.join((str(self.folder / "src"), str(self.folder)))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": paths}
        command, limit = [sys.executable, *arguments], seconds * self.patience
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{name}: does not end in {limit:.0f} s"
        if done.returncode == 0:
            return ""
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return f"{name}: {(failed or lines[-1:])[0][:160]}"


def survivors(copies: Sequence[Copy], mutants: list[Mutant]) -> list[Mutant]:
    """Try the mutants, one at a time in each copy, and say what became of each."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def survives(numbered: tuple[int, Mutant]) -> bool:
        number, mutant = numbered
        copy, start = free.get(), time.perf_counter()
        killer = copy.killer(mutant)
        free.put(copy)
        verdict = f"killed by {killer}" if killer else "equivalent" if mutant.equivalent else "SURVIVES"
        if killer and mutant.equivalent:
            verdict += "; it is marked as equivalent, and is not"
        seconds = time.perf_counter() - start
        print(f"{number:3}/{len(mutants)} {seconds:5.1f} s  {mutant.file}: {mutant.breaks}: {verdict}", flush=True)
        return not killer

    with ThreadPoolExecutor(len(copies)) as pool:
        alive = list(pool.map(survives, enumerate(mutants, 1)))
    return [mutant for mutant, is_alive in zip(mutants, alive, strict=True) if is_alive]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose file, text or sentence contains this")
    parser.add_argument("--jobs", type=int, default=1, help="so many mutants at once")
    parser.add_argument("--patience", type=float, default=1.0, help="so many times the usual time, on a busy machine")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    options = parser.parse_args()
    mutants = load(options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}: {mutant.breaks}{' (equivalent)' if mutant.equivalent else ''}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies = [Copy(Path(place).resolve() / str(i), options.patience) for i in range(options.jobs)]
        for folder in sorted({mutant.folder for mutant in mutants}):
            if failure := copies[0].failure(folder):
                print(f"{folder} as it is fails: {failure}")
                return 1
        alive = survivors(copies, mutants)
    unmarked = [mutant for mutant in alive if not mutant.equivalent]
    print(f"{len(mutants)} mutants, {len(mutants) - len(alive)} killed, {len(alive) - len(unmarked)} equivalent")
    for mutant in unmarked:
        print(f"survives: {mutant.file}: {mutant.breaks}\n    {mutant.old}\n    -> {mutant.new}")
    return 1 if unmarked else 0


if __name__ == "__main__":
    sys.exit(main())

"""`kvweave --version`, `--help`, and what the shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from kvweave import __version__
from kvweave.cache import cache
from kvweave.cli.app import COMMANDS
from kvweave.cli.version import version_line
from tests.cli.command import Kvweave


@pytest.mark.parametrize(
    ("file", "core"), [("site-packages/cache.py", "interpreted"), ("cache.cpython-311-x86_64-linux-gnu.so", "compiled")]
)
def test_the_version_says_whether_the_core_is_compiled(monkeypatch: pytest.MonkeyPatch, file: str, core: str) -> None:
    monkeypatch.setattr(cache, "__file__", file)
    assert version_line() == f"kvweave {__version__} ({core} core)"


@pytest.mark.parametrize(("words", "completed"), [("kvweave pl", "plan"), ("kvweave plan --block", "--block-tokens")])
def test_the_shell_completes_commands_and_options(words: str, completed: str) -> None:
    cursor = str(len(words.split()) - 1)
    asked = {"_KVWEAVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": cursor}
    program = (sys.executable, "-c", "from kvweave.cli import main; main()")
    run = subprocess.run(program, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert run.stdout.split() == [completed], run.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_wrapped_where_the_terminal_ends_and_not_where_the_source_does(
    kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    text = kvweave(command, "--help").out.partition("\u256d")[0]
    lines = [line.strip() for paragraph in text.split("Examples")[:1] for line in paragraph.splitlines()]
    broken = [
        (line, after)
        for line, after in pairwise(lines)
        if line and after and len(line) + 1 + len(after.split()[0]) < 68
    ]
    assert not broken

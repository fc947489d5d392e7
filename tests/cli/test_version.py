"""`kvweave --version`, and what the shell completes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvweave import __version__
from kvweave.cache import cache
from kvweave.cli.version import version_line


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

"""docs/how-to/plan.md: its commands, run, write what it says they write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import Kvweave

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "plan.md"
COLUMNS = 96
"""The width that the page was written at."""


def shown() -> dict[str, str]:
    """Each command of the page that is ours alone (no pipe), with what is said to follow."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    runs = [run.partition("\n") for block in blocks for run in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return {command: output for command, _, output in runs if "|" not in command}


def test_the_page_shows_commands() -> None:
    assert len(shown()) >= 7


@pytest.mark.parametrize("command", shown())
def test_a_command_writes_what_the_page_says(kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    run = kvweave(*shlex.split(command)[1:])
    written = "".join(f"{line.rstrip()}\n" for line in (run.out + run.err).splitlines())
    pattern = "(?:.*\n)*?".join(re.escape(part) for part in shown()[command].split("...\n"))
    assert re.fullmatch(pattern, written), f"the page says\n{shown()[command]}\nbut it is\n{written}"

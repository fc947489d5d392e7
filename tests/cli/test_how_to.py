"""docs/how-to/plan.md, and the errors of run.md: the commands, run, write what the page says they write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import Kvweave

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
COLUMNS = 96
"""The width that the page was written at."""


def shown(page: str) -> dict[str, str]:
    """Each command of a page that is ours alone (no pipe), with what is said to follow."""
    blocks = re.findall(r"```console\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)
    runs = [run.partition("\n") for block in blocks for run in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return {command: output for command, _, output in runs if "|" not in command}


PLANS = shown("plan.md")
ERRORS = {command: output for command, output in shown("run.md").items() if output.startswith("kvweave: error: ")}


def test_the_pages_show_commands() -> None:
    assert len(PLANS) >= 7
    assert len(ERRORS) >= 3


@pytest.mark.parametrize("command", PLANS)
def test_a_command_writes_what_the_page_says(kvweave: Kvweave, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    run = kvweave(*shlex.split(command)[1:])
    written = "".join(f"{line.rstrip()}\n" for line in (run.out + run.err).splitlines())
    pattern = "(?:.*\n)*?".join(re.escape(part) for part in PLANS[command].split("...\n"))
    assert re.fullmatch(pattern, written), f"the page says\n{PLANS[command]}\nbut it is\n{written}"


@pytest.mark.parametrize("command", ERRORS)
def test_a_command_fails_as_the_page_says(kvweave: Kvweave, command: str) -> None:
    pytest.importorskip("transformers")
    run = kvweave(*shlex.split(command)[1:])
    pattern = ".*".join(re.escape(part) for part in ERRORS[command].split("..."))
    assert re.fullmatch(pattern, run.err.splitlines(keepends=True)[-1]), run.err

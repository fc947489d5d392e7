"""The documents say what happens: every example in them is run."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["docs/walk.md", "README.md"])
def test_every_example_does_what_it_says(name: str) -> None:
    failed, tried = doctest.testfile(str(DOCS / name), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 3
    assert not failed


def test_the_worked_examples_for_contributors_run() -> None:
    """In a process of its own: they register kinds and families."""
    program = "import doctest, sys; sys.exit(bool(doctest.testfile(sys.argv[1], module_relative=False).failed))"
    page = str(DOCS / "CONTRIBUTING.md")
    run = subprocess.run([sys.executable, "-c", program, page], cwd=DOCS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", sorted((DOCS / "docs" / "decisions").glob("*.md")), ids=lambda page: page.stem)
def test_a_decision_has_its_reason_and_what_follows_in_forty_lines(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 40
    assert re.search(r"^\*\*Decision", text, re.MULTILINE)
    assert re.search(r"^\*\*(Reason|Decisions and their reasons)", text, re.MULTILINE)
    assert re.search(r"^\*\*Consequence", text, re.MULTILINE)


@pytest.mark.parametrize("page", sorted((DOCS / "docs" / "measurements").glob("[!i]*.md")), ids=lambda page: page.stem)
def test_a_page_of_measurements_says_when_on_what_and_by_which_script(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"2026", text)
    assert re.search(r"H200|CPU|core", text)
    scripts = re.findall(r"`[^`]*(?:bench[/.]|NAME=)(\w+)", text)
    assert all((DOCS / "bench" / f"{name}.py").exists() for name in scripts)
    assert scripts or "`make " in text


def pages() -> list[Path]:
    return [*DOCS.glob("*.md"), *(DOCS / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def commands(page: Path, word: str) -> list[str]:
    """What a page says to type that begins with a word, without comments."""
    lines = re.findall(rf"^\$ ({word} .*)$", page.read_text(), re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def test_every_target_that_the_documents_name_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (DOCS / "Makefile").read_text(), re.MULTILINE))
    named = {word for page in pages() for command in commands(page, "make") for word in command.split()[1:2]}
    assert {"demo", "test", "docs"} <= named
    assert named <= targets


@pytest.mark.parametrize("command", commands(DOCS / "README.md", "kvweave (?:plan|run)"))
def test_the_commands_of_the_readme_are_understood(command: str) -> None:
    """Planning is done; of runs, whose models take their time, the options are read (tests/cli runs them)."""
    config = DOCS / "src" / "kvweave" / "examples" / "qwen3-next-80b.json"
    words = shlex.split(command.replace("path/to/config.json", str(config)))
    asked = words[1:] if words[1] == "plan" else [*words[1:], "--help"]
    program = [sys.executable, "-m", "kvweave", *asked]
    run = subprocess.run(program, cwd=DOCS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

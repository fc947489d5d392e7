"""docs/how-to/simulate.md: its examples do what it says, and its table names every format."""

from __future__ import annotations

import doctest
from pathlib import Path

from kvweave.sim import FORMATS, ORACLES

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md"


def test_every_example_does_what_the_page_says() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 10
    assert not failed


def test_the_page_tells_of_every_format_and_oracle() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in FORMATS:
        assert f"\n| `{name}` |" in page, name
    for oracle in ORACLES:
        assert f"\n| {oracle.name} |" in page, oracle.name

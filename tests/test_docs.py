"""The documents say what happens: every example in them is run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["docs/walk.md", "README.md"])
def test_every_example_does_what_it_says(name: str) -> None:
    failed, tried = doctest.testfile(str(DOCS / name), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 3
    assert not failed

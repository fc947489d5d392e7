"""docs/how-to/engine.md runs as written."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_every_example_does_what_it_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "engine.md"
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=options)
    assert tried > 15
    assert not failed

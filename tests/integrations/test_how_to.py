"""docs/how-to/transformers.md runs as written."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_every_example_does_what_it_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "transformers.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 15
    assert not failed

"""Every example in docs/how-to/attention.md does what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "attention.md"


def test_every_example_does_what_it_says() -> None:
    failed, tried = doctest.testfile(str(HOW_TO), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 8
    assert not failed

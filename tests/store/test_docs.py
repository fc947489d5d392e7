"""The how-to does what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "store.md"


def test_every_example_does_what_it_says() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testfile(str(HOW_TO), module_relative=False, optionflags=flags)
    assert tried > 20
    assert not failed

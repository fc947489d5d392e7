"""The table of mutants fits the sources: each changes one place, and what it makes of it is Python."""

from __future__ import annotations

from scripts.mutants import load


def test_every_mutant_of_the_table_fits_the_sources() -> None:
    assert len(load("")) > 40

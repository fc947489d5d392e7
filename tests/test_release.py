"""Release notes: the section of the changelog that a tag names, and nothing else."""

from __future__ import annotations

import pytest

import kvweave
from scripts.release_notes import ROOT, notes, package_version

CHANGELOG = """# Changelog

## Unreleased
- later

## 1.2.0 - 2026-12-01
### Added
- this

## [1.1.0]
- that
"""


@pytest.mark.parametrize(("version", "text"), [("1.2.0", "### Added\n- this"), ("1.1.0", "- that")])
def test_a_tag_has_its_section(version: str, text: str) -> None:
    assert notes(f"v{version}", CHANGELOG, version) == text


@pytest.mark.parametrize(("tag", "version"), [("v1.2.0", "1.2.1"), ("1.2.0", "1.2.0"), ("v1.0.0", "1.0.0")])
def test_a_tag_that_does_not_agree_is_refused(tag: str, version: str) -> None:
    with pytest.raises(SystemExit):
        notes(tag, CHANGELOG, version)


def test_the_version_is_read_without_an_import() -> None:
    assert package_version((ROOT / "src" / "kvweave" / "__init__.py").read_text()) == kvweave.__version__

"""Releases: notes are the section of the changelog that a tag names, and an sdist has what belongs to it."""

from __future__ import annotations

from pathlib import Path

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


def test_an_sdist_has_no_file_that_an_import_beside_its_build_makes_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "tests" / "__pycache__"
    cached.mkdir(parents=True)
    for name in ("conftest.cpython-311.pyc", "conftest.cpython-311.pyc.140245", "../conftest.py"):
        (cached / name).touch()
    monkeypatch.chdir(tmp_path)
    files = pytest.importorskip("setuptools.command.egg_info").FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        files.process_template_line(line)
    assert [path.replace("\\", "/") for path in files.files] == ["tests/conftest.py"]

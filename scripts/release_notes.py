"""The section of CHANGELOG.md that belongs to a tag, for its release; fails if version, tag and changelog disagree.

Run: python scripts/release_notes.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, changelog: str, version: str) -> str:
    """The text below `## [version]` or `## version`, up to the next section."""
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but kvweave.__version__ is {version}: expected v{version}")
    found = re.search(rf"^## \[?{re.escape(version)}\]?[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section {version} with text in it")
    return found[1].strip()


def package_version(source: str) -> str:
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]  # type: ignore[index]


if __name__ == "__main__":
    source = (ROOT / "src" / "kvweave" / "__init__.py").read_text()
    print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(), package_version(source)))

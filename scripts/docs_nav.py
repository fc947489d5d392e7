"""A hook of mkdocs: an entry of the navigation that is a folder, `decisions/`, stands for all pages in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    config.nav = [_expanded(entry, Path(config.docs_dir)) for entry in config.nav]
    return config


def _expanded(entry: Any, docs: Path) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(value, docs) for title, value in entry.items()}
    if not (isinstance(entry, str) and entry.endswith("/")):
        return entry
    pages = [str(page.relative_to(docs)) for page in sorted((docs / entry).glob("*.md"))]
    return sorted(pages, key=lambda page: not page.endswith("index.md"))

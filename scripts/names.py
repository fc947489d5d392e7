"""Names that mislead a reader: `python scripts/names.py` prints them, one a line, and nothing where all is well.

Two classes, or two files, of one name; and words that were replaced once, and would come back as the name of a file, a
class, a function or an attribute.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "kvweave"

REPLACED = {
    "cache": "Books Room wake mark fresh pointed alike supers adopt arrive blocks_earlier",
    "prefix": "Prefix Record extras rolling",
    "transfer": "Draft Drafts Tape Mark Way Line Sheet drafts tape lines sheet way",
    "store": "Row Lane LanePolicy LaneStats Cascade Desk Which Watch rows lane lanes cascade desk sums",
    "server": "Far Hub Opened Registered Incoming Dialogue Bring far opened registered incoming dialogue hub bring say",
    "integrations": "Keeper Visit Arrival Past Stage Beside Apart Same keeper visit keeping own.py places.py stage",
    "cli": "words wishes wish prose",
}
"""By folder: the words that stopped newcomers, and that have a plainer one now."""

ALLOWED = {
    "rows": "on the wire: `GroupDescription.rows`, as older clients read it",
    "group.py": "plan/group.py and pool/group.py: a group as it is planned, and its pages as they are held",
}
"""Names that stay, and why."""


def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The classes and functions that a module defines, at any depth, and the attributes of its classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        if isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            yield from ((target.id, target.lineno) for target in fields if isinstance(target, ast.Name))


def twice(found: dict[Path, ast.Module]) -> Iterator[str]:
    """Classes and files of one name; a class is named with every file that has one."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in found.items():
        where = path.relative_to(SOURCE).as_posix()
        if path.name != "__init__.py":
            places[path.name].append(where)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(where)
    for name, files in places.items():
        if len(files) > 1 and name not in ALLOWED:
            yield f"{name} is defined {len(files)} times: {', '.join(files)}"


def returned(found: dict[Path, ast.Module]) -> Iterator[str]:
    """Replaced words that are names again, in the folder where they were replaced."""
    for path, tree in found.items():
        where = path.relative_to(SOURCE)
        words = {*REPLACED.get(where.parts[0], "").split()} - ALLOWED.keys()
        if {path.stem, path.name} & words:
            yield f"{where.as_posix()}: a plainer word for {path.stem!r} is in use elsewhere"
        for name, line in names(tree):
            if name.strip("_") in words:
                yield f"{where.as_posix()}:{line}: a plainer word for {name!r} is in use elsewhere"


def misleading() -> list[str]:
    found = modules()
    return [*twice(found), *returned(found)]


if __name__ == "__main__":
    lines = misleading()
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))

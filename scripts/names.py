"""Names that mislead a reader: `python scripts/names.py` prints them, one a line, and nothing where all is well.

Two classes, or two files, of one name; and words that were replaced once, and would come back as the name of a file, a
class, a function, an attribute or a constant. All folders of src/kvweave are read.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "kvweave"

EVERYWHERE = """
    Books Room fresh pointed alike supers adopt arrive blocks_earlier Prefix Record rolling
    Draft Drafts Tape tape Mark Way Line Sheet sheet
    Row Lane LanePolicy LaneStats Cascade cascade Desk desk Which Watch sums
    Far far Hub hub Opened Registered Incoming incoming Dialogue dialogue Bring bring say
    Keeper keeper Visit visit visits Arrival Past Stage Beside Apart Same keeping own.py places.py
    wishes wish prose
"""
"""The words of the house style that stopped newcomers, and that have a plainer one now."""

IN_FOLDER = {
    "cache": {"mark", "room", "wake"},
    "prefix": {"extras"},
    "transfer": {"drafts", "lines", "way"},
    "store": {"rows", "lane", "lanes"},
    "server": {"opened", "registered"},
    "integrations": {"stage"},
    "cli": {"words", "words.py"},
}
"""Words that mislead in one folder, and are the field's elsewhere: rows of a table, stages of a pipeline, lanes of a
pool (glossary), lines of a file."""

ALLOWED = {
    "cli/plan_options.py: Draft": "the option --draft: a draft model, as engines call it",
    "cli/run/run_options.py: Record": "the option --record",
    "cli/svg/draw.py: Sheet": "a sheet to draw on: its width and margins",
    "group.py": "plan/group.py and pool/group.py: a group as it is planned, and its pages as they are held",
}
"""Names that stay, and why."""


def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The classes and functions that a module defines, at any depth, the attributes of its classes, its constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        if isinstance(node, ast.ClassDef | ast.Module):
            assigned = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
            targets = [each.targets[0] if isinstance(each, ast.Assign) else each.target for each in assigned]
            yield from ((target.id, target.lineno) for target in targets if isinstance(target, ast.Name))


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
    """Replaced words that are names again."""
    for path, tree in found.items():
        where = path.relative_to(SOURCE)
        words = {*EVERYWHERE.split()} | IN_FOLDER.get(where.parts[0], set())
        used = [(path.stem, 1), (path.name, 1), *names(tree)]
        for name, line in used:
            if name.strip("_") in words and f"{where.as_posix()}: {name}" not in ALLOWED:
                yield f"{where.as_posix()}:{line}: a plainer word for {name!r} is in use elsewhere"


def misleading() -> list[str]:
    found = modules()
    return [*twice(found), *returned(found)]


if __name__ == "__main__":
    lines = misleading()
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))

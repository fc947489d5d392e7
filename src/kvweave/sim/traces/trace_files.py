"""The files behind a path: one file, a compressed one, a tar archive, or a folder of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

from kvweave.errors import TraceError

HEAD_BYTES = 1 << 16
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".log", ".txt")


@dataclass(frozen=True)
class Head:
    """The beginning of the first file, by which a format is known."""

    text: str

    @cached_property
    def line(self) -> str:
        return next((line for line in self.text.splitlines() if line.strip()), "")

    @cached_property
    def record(self) -> dict[str, Any]:
        """The first line as a JSON object; empty where it is none."""
        try:
            found = json.loads(self.line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Each file with its name; of archives and folders, those that could hold a trace, in the order of their names."""
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.name.removesuffix(".gz").endswith(SUFFIXES)):
            with _open(file) as stream:
                yield str(file.relative_to(path)), stream
    elif path.name.endswith((".tar", ".tar.gz", ".tgz")):
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                found = archive.extractfile(member) if member.name.endswith(SUFFIXES) else None
                if found is not None:
                    yield member.name, found
    else:
        with _open(path) as stream:
            yield path.name, stream


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def head(path: Path) -> Head:
    for _, stream in members(path):
        return Head(stream.read(HEAD_BYTES).decode("utf-8", "replace"))
    raise TraceError(f"{path}: no file in it could be a trace; those end in {', '.join(SUFFIXES)}")


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with the name of its file."""
    for name, stream in members(path):
        for line in io.TextIOWrapper(stream, encoding="utf-8", errors="replace"):
            if line.strip():
                yield name, line.rstrip("\n")


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object, with the name of its file: one a line, or a file that is one array or one object."""
    for name, stream in members(path):
        text = io.TextIOWrapper(stream, encoding="utf-8")
        first = text.readline()
        try:
            whole = _whole(first)
            found = json.loads(first + text.read()) if whole else None
            rows = found if isinstance(found, list) else [found] if whole else _by_line(first, text)
            for row in rows:
                if not isinstance(row, dict):
                    raise TraceError(f"{path}: {name} holds a {type(row).__name__} where an object is expected")
                yield name, row
        except ValueError as error:
            raise TraceError(f"{path}: {name} is no JSON, nor JSON lines: {error}") from error


def _whole(first: str) -> bool:
    """Whether a file is one JSON document: its first line alone is none, or is an array."""
    try:
        return isinstance(json.loads(first), list) if first.strip() else False
    except ValueError:
        return True


def _by_line(first: str, rest: IO[str]) -> Iterator[Any]:
    for line in chain((first,), rest):
        if line.strip():
            yield json.loads(line)

"""The files behind a path: one file, a compressed one, a tar archive, or a folder of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

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
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class TraceObject(NamedTuple):
    """A JSON object of a trace, the name of its file, and where it is, for errors."""

    file: str
    where: str
    row: dict[str, Any]


def members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Each file with its name; of archives and folders, those that could hold a trace, in the order of their names."""
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.name.removesuffix(".gz").endswith(SUFFIXES)):
            with _open(file) as stream:
                yield str(file.relative_to(path)), stream
    elif path.name.endswith((".tar", ".tar.gz", ".tgz")):
        with _damage_named(str(path)), tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                found = archive.extractfile(member) if member.name.endswith(SUFFIXES) else None
                if found is not None:
                    yield member.name, found
    else:
        with _open(path) as stream:
            yield path.name, stream


@contextmanager
def _damage_named(where: str) -> Iterator[None]:
    """Make a `TraceError` of what is raised where a compressed file or an archive is damaged."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise TraceError(f"{where} is cut short, damaged, or not compressed as its name says: {error}") from error


def _named(path: Path, name: str) -> str:
    """A file of a trace, as errors name it."""
    return str(path) if name == path.name else f"{path}: {name}"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def head(path: Path) -> Head:
    for name, stream in members(path):
        with _damage_named(_named(path, name)):
            return Head(stream.read(HEAD_BYTES).decode("utf-8", "replace"))
    raise TraceError(f"{path}: no file in it could be a trace; those end in {', '.join(SUFFIXES)}")


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with the name of its file."""
    for name, stream in members(path):
        with _damage_named(_named(path, name)):
            for line in io.TextIOWrapper(stream, encoding="utf-8", errors="replace"):
                if line.strip():
                    yield name, line.rstrip("\n")


def records(path: Path) -> Iterator[TraceObject]:
    """Each JSON object: one a line, or of a file that is one array or one object."""
    for name, stream in members(path):
        file = _named(path, name)
        with _damage_named(file):
            for where, row in _rows(file, io.TextIOWrapper(stream, encoding="utf-8")):
                if not isinstance(row, dict):
                    raise TraceError(f"{where}: a {type(row).__name__} where an object is expected")
                yield TraceObject(name, where, row)


def _rows(file: str, text: IO[str]) -> Iterator[tuple[str, Any]]:
    """Each value of a file, and where it is."""
    where = f"{file}, line 1"
    try:
        first = text.readline()
        if _is_whole(first):
            where = file
            found = json.loads(first + text.read())
            for number, row in enumerate(found if isinstance(found, list) else [found], 1):
                yield f"{file}, object {number}", row
            return
        for number, line in enumerate(chain((first,), text), 1):
            where = f"{file}, line {number}"
            if line.strip():
                yield where, json.loads(line)
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if where != file else f"line {error.lineno}, column {error.colno}"
        raise TraceError(f"{where} is no JSON, nor JSON lines: {error.msg} in {at}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no JSON, nor JSON lines: {error}") from error


def _is_whole(first: str) -> bool:
    """Whether a file is one JSON document: its first line alone is none, or is an array."""
    try:
        return isinstance(json.loads(first), list) if first.strip() else False
    except ValueError:
        return True

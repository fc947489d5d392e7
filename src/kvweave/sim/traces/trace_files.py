"""The files behind a path: one file, a compressed one, a tar archive, or a folder of them."""

from __future__ import annotations

import codecs
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
LINE_BYTES = 1 << 26
"""Of a first line that is longer than the head, as much is read: a chat may be megabytes of text in one line."""
GZIP = b"\x1f\x8b"
NOT_READ = {
    codecs.BOM_UTF16_LE: "UTF-16 text: convert it to UTF-8, for instance with iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text: convert it to UTF-8, for instance with iconv -f UTF-16 -t UTF-8",
    b"PAR1": "a Parquet file: write it as JSON lines, for instance with pandas' to_json(orient='records', lines=True)",
    b"PK\x03\x04": "a zip archive: unpack it, and give the folder",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it, for instance with zstd -d",
    b"\xfd7zXZ": "compressed with xz: decompress it, for instance with xz -d",
}
"""Files that are not read, by their first bytes, and what to do."""
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
        """The first JSON object: the first line, or the first element of an array; empty where there is none."""
        for text in (self.line, self.text.lstrip().removeprefix("[").lstrip()):
            try:
                found, _ = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
        return {}


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
        raise TraceError(f"{where} is cut short, damaged, or no archive, as its name says: {error}") from error


def unusable(where: str, error: Exception) -> TraceError:
    """What reading the fields of a record raised, as an error that names the field or its value."""
    if isinstance(error, KeyError):
        return TraceError(f"{where} has no field {error.args[0]!r}")
    return TraceError(f"{where} has a field that cannot be read: {error}")


def _named(path: Path, name: str) -> str:
    """A file of a trace, as errors name it."""
    return str(path) if name == path.name else f"{path}: {name}"


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """A file, decompressed if it begins as gzip files do, whatever its name."""
    with path.open("rb") as stream:
        if not stream.peek(len(GZIP)).startswith(GZIP):
            yield stream
            return
        with gzip.open(stream) as unpacked:
            yield unpacked  # type: ignore[misc]


def _text(file: str, stream: IO[bytes], errors: str = "strict") -> IO[str]:
    """A file as UTF-8 text, without a byte order mark; `TraceError` for a file of `NOT_READ`."""
    start = stream.peek(8)  # type: ignore[attr-defined]
    for first_bytes, cure in NOT_READ.items():
        if start.startswith(first_bytes):
            raise TraceError(f"{file} is {cure}")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors=errors)


def head(path: Path) -> Head:
    """The beginning of the first file that is not empty."""
    names = []
    for name, stream in members(path):
        names.append(name)
        file = _named(path, name)
        with _damage_named(file):
            text = _text(file, stream, "replace")
            start = text.read(HEAD_BYTES)
            if start.strip():
                return Head(start if "\n" in start else start + text.readline(LINE_BYTES))
    if names:
        raise TraceError(f"{path}: {'it is' if len(names) == 1 else 'all files in it are'} empty")
    raise TraceError(f"{path}: no file in it could be a trace; those end in {', '.join(SUFFIXES)}")


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with the name of its file."""
    for name, stream in members(path):
        with _damage_named(_named(path, name)):
            for line in _text(_named(path, name), stream, "replace"):
                if line.strip():
                    yield name, line.rstrip("\n")


def records(path: Path) -> Iterator[TraceObject]:
    """Each JSON object: one a line, or of a file that is one array or one object."""
    for name, stream in members(path):
        file = _named(path, name)
        with _damage_named(file):
            for where, row in _rows(file, _text(file, stream)):
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
    except UnicodeDecodeError as error:
        cure = "convert it, for instance with iconv -f LATIN1 -t UTF-8"
        raise TraceError(f"{where} is no UTF-8 text, {error.reason} {error.object[error.start]:#x}: {cure}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no JSON, nor JSON lines: {error}") from error


def _is_whole(first: str) -> bool:
    """Whether a file is one JSON document: its first line alone is none, or is an array."""
    try:
        return isinstance(json.loads(first), list) if first.strip() else False
    except ValueError:
        return True

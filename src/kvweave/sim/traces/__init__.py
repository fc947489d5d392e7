"""Formats of traces, one a file. A format has a `NAME`, `matches(head)`, and `read(path, reading)`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvweave.errors import TraceError, UnknownName
from kvweave.sim.trace import Trace
from kvweave.sim.traces import agent, bailian, chat_trace, coding, lengths, logs, mooncake, recorded
from kvweave.sim.traces.reading import Reading, load_tokenizer
from kvweave.sim.traces.trace_files import Head, head

__all__ = ["FORMATS", "Reading", "load_tokenizer", "read_trace"]


class Format(Protocol):
    NAME: str

    def matches(self, head: Head) -> bool: ...
    def read(self, path: Path, reading: Reading) -> Trace: ...


_READERS: tuple[Format, ...] = (recorded, bailian, mooncake, coding, agent, chat_trace, lengths, logs)
FORMATS: dict[str, Format] = {reader.NAME: reader for reader in _READERS}
"""By name, in the order in which they are tried."""


def read_trace(path: str | Path, *, format: str = "auto", reading: Reading | None = None) -> Trace:
    """The trace at a path: a file (perhaps .gz), a .tar.gz or a folder of them. `auto`: known by its start."""
    path = Path(path)
    if format != "auto" and format not in FORMATS:
        raise UnknownName("format of a trace", format, ["auto", *FORMATS])
    if not path.exists():
        raise TraceError(f"no trace is at {str(path)!r}")
    reader = FORMATS[format] if format != "auto" else _detect(path)
    return reader.read(path, reading or Reading())


def _detect(path: Path) -> Format:
    start = head(path)
    for reader in FORMATS.values():
        if reader.matches(start):
            return reader
    raise TraceError(
        f"{path}: its format is not known from its first line, {start.line[:80]!r}; formats are"
        f" {', '.join(FORMATS)}: name one with --format"
    )

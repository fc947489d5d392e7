"""Agents' texts (LMCache/lmcache-agent-trace): a file a session, a JSON object a line: `timestamp` in microseconds,
`input`, `output`, `session_id`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvweave.errors import TraceError
from kvweave.sim.trace import Trace, checked_time
from kvweave.sim.traces.reading import Reading, TextRequest
from kvweave.sim.traces.trace_files import Head, records

NAME = "agent"


def matches(head: Head) -> bool:
    record = head.record
    return {"timestamp", "session_id"} <= record.keys() and isinstance(record.get("input"), str)


def read(path: Path, reading: Reading) -> Trace:
    return reading.text_trace(path.name, NAME, _requests(path))


def _requests(path: Path) -> Iterator[TextRequest]:
    for file, where, row in records(path):
        prompt, output = row.get("input"), row.get("output") or ""
        if not isinstance(prompt, str) or not isinstance(output, str):
            raise TraceError(f"{where} lacks a text `input` or `output`")
        time = checked_time(where, "timestamp", row.get("timestamp"))
        yield time / 1e6, prompt, output, str(row.get("session_id", file))

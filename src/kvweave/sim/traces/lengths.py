"""Traces of lengths: Azure's LLM inference traces and BurstGPT. They hold nothing of what prompts have in common."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from kvweave.errors import TraceError
from kvweave.sim.trace import Request, Trace, checked_time, checked_tokens, make_trace
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, lines, unusable

COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
"""Of each format: when, tokens of the prompt, tokens of the output."""
NO_BLOCKS = np.empty(0, np.int32)

NAME = "lengths"


def _kind(header: str) -> str | None:
    names = [name.strip() for name in header.split(",")]
    return next((kind for kind, columns in COLUMNS.items() if set(columns) <= set(names)), None)


def matches(head: Head) -> bool:
    return _kind(head.line) is not None


def read(path: Path, reading: Reading) -> Trace:  # noqa: ARG001 - nothing in it can be read in two ways
    text = [line for _, line in lines(path)]
    kind = _kind(text[0]) if text else None
    if kind is None:
        raise TraceError(f"{path}: its first line names the columns of neither {' nor '.join(COLUMNS)}")
    when, prompt, output = COLUMNS[kind]
    requests = []
    for number, row in enumerate(csv.DictReader(text)):
        where = f"{path}, request {number}"
        try:
            arrival, sizes = _seconds(row[when]), (int(row[prompt]), int(row[output]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise unusable(where, error) from error
        for name, size in zip((prompt, output), sizes, strict=True):
            checked_tokens(where, name, size)
        requests.append(Request(checked_time(where, when, arrival), NO_BLOCKS, *sizes))
    return make_trace(path.name, kind, 0, requests)


def _seconds(text: str) -> float:
    """Seconds as they are, or a time of day, of UTC where no zone is said; digits beyond microseconds are dropped."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

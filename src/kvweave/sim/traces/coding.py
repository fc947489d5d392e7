"""Recorded coding sessions (the "weka" traces): a JSON object a session: `block_size`, `hash_id_scope`, and `requests`
with `t` in seconds, `in`, `out` and `hash_ids`; those of subagents are nested. Local ids mean something within their
session alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.errors import TraceError
from kvweave.sim.trace import Trace, checked_tokens
from kvweave.sim.traces.block_ids import BlockRequest, Numbering, guess_parents, read_way
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, records

NAME = "coding"
APART = 60.0
"""Seconds between the starts of sessions: each counts time from its own start."""


def matches(head: Head) -> bool:
    return "hash_ids" in head.text and '"requests"' in head.text and '"block_size"' in head.text


def read(path: Path, reading: Reading) -> Trace:
    numbering, rows, sizes = Numbering(), list[BlockRequest](), set[int]()
    for number, (file, session) in enumerate(records(path)):
        if not isinstance(session.get("requests"), list) or not isinstance(session.get("block_size"), int):
            raise TraceError(f"{path}: session {number} ({file}) has no list of requests, or no block_size")
        sizes.add(session["block_size"])
        name = str(session.get("id", number))
        scope = "" if session.get("hash_id_scope") == "global" else f"{number}:{name}"
        rows += _requests(path, name, scope, session["requests"], number * APART, numbering)
    if len(sizes) != 1 or min(sizes) < 1:
        raise TraceError(f"{path}: sessions have blocks of {sorted(sizes)} tokens; one trace has one size, at least 1")
    block_tokens = sizes.pop()
    rows.sort(key=lambda row: row.arrival)
    parents = guess_parents(rows, block_tokens)
    rows = [replace(row, parent=parent) for row, parent in zip(rows, parents, strict=True)]
    invented = [
        f"a session starts every {APART:g} seconds: the trace says no time of day",
        "which request goes on from which is guessed from shared blocks",
    ]
    return read_way(path.name, NAME, block_tokens, rows, numbering, reading.way, invented)


def _requests(
    path: Path, session: str, scope: str, requests: Iterable[Any], start: float, numbering: Numbering
) -> Iterator[BlockRequest]:
    for row in requests:
        if not isinstance(row, dict):
            raise TraceError(f"{path}: session {session} holds a request that is no object: {row!r}")
        if "requests" in row:
            yield from _requests(path, session, scope, row["requests"], start, numbering)
        elif row.get("hash_ids"):
            where = f"{path}, session {session}"
            prompt = checked_tokens(where, 0, "in", row.get("in"), least=1)
            output = checked_tokens(where, 0, "out", row.get("out") or 0)
            ids = numbering(scope, row["hash_ids"])
            yield BlockRequest(start + float(row.get("t") or 0), ids, prompt, output, session)

"""Recorded coding sessions (the "weka" traces): a JSON object a session: `block_size`, `hash_id_scope`, and `requests`
with `t` in seconds, `in`, `out` and `hash_ids`; those of subagents are nested. Local ids mean something within their
session alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.errors import TraceError
from kvweave.sim.trace import Trace, checked_time, checked_tokens
from kvweave.sim.traces.block_ids import BlockRequest, Numbering, checked_ids, guess_parents, read_way
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, records, unusable

NAME = "coding"
APART = 60.0
"""Seconds between the starts of sessions: each counts time from its own start."""


def matches(head: Head) -> bool:
    return "hash_ids" in head.text and '"requests"' in head.text and '"block_size"' in head.text


def read(path: Path, reading: Reading) -> Trace:
    numbering, rows, sizes = Numbering(), list[BlockRequest](), set[int]()
    for number, (_, where, session) in enumerate(records(path)):
        if not isinstance(session.get("requests"), list):
            raise TraceError(f"{where}: a session without a list of requests")
        size = checked_tokens(where, "block_size", session.get("block_size"), least=1)
        sizes.add(size)
        name = str(session.get("id", number))
        scope = "" if session.get("hash_id_scope") == "global" else f"{number}:{name}"
        asked = _requests(f"{where}, session {name}", session["requests"])
        rows += [_row(*one, name, scope, size, number * APART, numbering) for one in asked]
    if len(sizes) != 1:
        raise TraceError(f"{path}: sessions have blocks of {sorted(sizes)} tokens; one trace has one size")
    block_tokens = sizes.pop()
    rows.sort(key=lambda row: row.arrival)
    parents = guess_parents(rows, block_tokens)
    rows = [replace(row, parent=parent) for row, parent in zip(rows, parents, strict=True)]
    invented = [
        f"a session starts every {APART:g} seconds: the trace says no time of day",
        "which request goes on from which is guessed from shared blocks",
    ]
    return read_way(path.name, NAME, block_tokens, rows, numbering, reading.way, invented)


def _requests(where: str, rows: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each request of a session with block ids, those of subagents among them, and where it is."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise TraceError(f"{where} holds a request that is no object: {row!r:.80}")
        nested = row.get("requests")
        if isinstance(nested, list):
            yield from _requests(where, nested)
        elif row.get("hash_ids"):
            yield f"{where}, request {number}", row


def _row(
    where: str, row: dict[str, Any], session: str, scope: str, block_tokens: int, start: float, numbering: Numbering
) -> BlockRequest:
    prompt = checked_tokens(where, "in", row.get("in"))
    output = checked_tokens(where, "out", row.get("out") or 0)
    arrival = start + checked_time(where, "t", row.get("t") or 0)
    try:
        ids = numbering(scope, row["hash_ids"])
    except TypeError as error:
        raise unusable(where, error) from error
    return BlockRequest(arrival, checked_ids(where, ids, prompt, block_tokens), prompt, output, session)

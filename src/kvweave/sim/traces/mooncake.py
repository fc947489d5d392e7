"""Mooncake's traces (FAST'25): a JSON object a line: `timestamp` in milliseconds, `input_length`, `output_length`,
`hash_ids`. An id names 512 tokens and all before them; the last one may name fewer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvweave.sim.trace import Trace, checked_time, checked_tokens
from kvweave.sim.traces.block_ids import BlockRequest, Numbering, checked_ids, guess_parents, guess_sessions, read_way
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, records, unusable

NAME = "mooncake"
BLOCK_TOKENS = 512


def matches(head: Head) -> bool:
    return {"hash_ids", "input_length", "timestamp"} <= head.record.keys() and "chat_id" not in head.record


def read(path: Path, reading: Reading) -> Trace:
    numbering, rows = Numbering(), []
    for _, where, row in records(path):
        try:
            arrival, ids, prompt = row["timestamp"], numbering("", row["hash_ids"]), row["input_length"]
        except (KeyError, TypeError) as error:
            raise unusable(where, error) from error
        arrival = checked_time(where, "timestamp", arrival) / 1000
        prompt = checked_tokens(where, "input_length", prompt)
        output = checked_tokens(where, "output_length", row.get("output_length", 0))
        rows.append(BlockRequest(arrival, checked_ids(where, ids, prompt, BLOCK_TOKENS), prompt, output, ""))
    rows.sort(key=lambda row: row.arrival)
    sessions, parents = guess_sessions([row.ids for row in rows]), guess_parents(rows, BLOCK_TOKENS)
    rows = [
        replace(row, session=session, parent=parent)
        for row, session, parent in zip(rows, sessions, parents, strict=True)
    ]
    invented = ["which request goes on from which, and sessions, are guessed from shared blocks: the trace has neither"]
    return read_way(path.name, NAME, BLOCK_TOKENS, rows, numbering, reading.way, invented)

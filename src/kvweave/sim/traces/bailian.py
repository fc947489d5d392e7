"""Traces of Alibaba Bailian (qwen-bailian-usagetraces-anon): a JSON object a line: `chat_id`, `parent_chat_id` (-1 for
the first turn), `timestamp` in seconds, `input_length`, `output_length`, `hash_ids` of 16 tokens each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.sim.trace import Trace, checked_time, checked_tokens
from kvweave.sim.traces.block_ids import BlockRequest, Numbering, checked_ids, read_way
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, records, unusable

NAME = "bailian"
BLOCK_TOKENS = 16


def matches(head: Head) -> bool:
    return {"hash_ids", "chat_id", "parent_chat_id"} <= head.record.keys()


def read(path: Path, reading: Reading) -> Trace:
    numbering = Numbering()
    found = [(_row(where, row, numbering), row) for _, where, row in records(path)]
    found.sort(key=lambda pair: pair[0].arrival)
    numbers = {row["chat_id"]: number for number, (_, row) in enumerate(found)}
    rows: list[BlockRequest] = []
    for number, (request, row) in enumerate(found):
        parent = numbers.get(row["parent_chat_id"])
        known = parent is not None and parent < number
        session = rows[parent].session if parent is not None and known else str(row["chat_id"])
        rows.append(replace(request, session=session, parent=parent if known else None))
    return read_way(path.name, NAME, BLOCK_TOKENS, rows, numbering, reading.way, [])


def _row(where: str, row: dict[str, Any], numbering: Numbering) -> BlockRequest:
    try:
        arrival, ids, prompt = row["timestamp"], numbering("", row["hash_ids"]), row["input_length"]
        hash((row["chat_id"], row["parent_chat_id"]))
    except (KeyError, TypeError) as error:
        raise unusable(where, error) from error
    arrival = checked_time(where, "timestamp", arrival)
    prompt = checked_tokens(where, "input_length", prompt)
    output = checked_tokens(where, "output_length", row.get("output_length", 0))
    return BlockRequest(arrival, checked_ids(where, ids, prompt, BLOCK_TOKENS), prompt, output, "")

"""`kvweave-trace`: what kvweave records itself, with `--record`. Read by `kvweave simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvweave.errors import TraceError
from kvweave.sim.trace import Request, Trace, checked_time, checked_tokens, make_trace
from kvweave.sim.traces.block_ids import Numbering
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, TraceObject, records, unusable
from kvweave.trace_writer import TRACE_NAME, TRACE_VERSION

NAME = TRACE_NAME
RECORDED_WITH = ("plan", "retention", "step_tokens")


def matches(head: Head) -> bool:
    return head.record.get("format") == NAME


def read(path: Path, reading: Reading) -> Trace:  # noqa: ARG001 - nothing in it can be read in two ways
    rows = records(path)
    _, where, header = next(rows, TraceObject("", str(path), {}))
    if header.get("version") != TRACE_VERSION:
        raise TraceError(f"{where}: a recording of version {TRACE_VERSION} is expected, got {header!r:.200}")
    block_tokens = checked_tokens(where, "block_tokens", header.get("block_tokens"), least=1)
    numbering, requests, tails = Numbering(), [], 0
    for number, (_, where, row) in enumerate(rows):
        try:
            ids, arrival, sizes = numbering("", row["blocks"]), row["time"], (row["prompt"], row["output"])
        except (KeyError, TypeError) as error:
            raise unusable(where, error) from error
        arrival = checked_time(where, "time", arrival)
        prompt = checked_tokens(where, "prompt", sizes[0], least=1)
        output = checked_tokens(where, "output", sizes[1])
        cached = None if row.get("cached") is None else checked_tokens(where, "cached", row["cached"])
        tail = -(-(prompt + output) // block_tokens) - len(ids)
        if not 0 <= tail <= 1:
            raise TraceError(f"{where}: a request of {prompt + output} tokens has {len(ids)} blocks of {block_tokens}")
        tails += tail
        blocks, session = np.concatenate([ids, numbering.new(tail)]), str(row.get("session") or f"request {number}")
        names = (session, str(row.get("namespace", "")))
        requests.append(Request(arrival, blocks, prompt, output, *names, cached))
    recorded_with: dict[str, Any] = {name: header[name] for name in RECORDED_WITH if name in header}
    invented = [f"the ends of {tails:,} requests, shorter than a block of {block_tokens}, are tokens of their own"]
    return make_trace(path.name, NAME, block_tokens, requests, invented if tails else (), recorded_with)

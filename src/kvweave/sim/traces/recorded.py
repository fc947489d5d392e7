"""`kvweave-trace`: what kvweave records itself, with `--record`. JSON lines: a header, then an object a request:

    {"format": "kvweave-trace", "version": 1, "block_tokens": 16, "plan": {...}, "retention": {...}}
    {"time": 1.25, "prompt": 40, "output": 8, "blocks": [7013..., 2200..., 5831...], "session": "9c4f...", "cached": 32}

A block's id is a hash of its tokens and of all before them, keyed by a secret that is never written: the trace says
which prefixes were equal and nothing of their text, and two recordings cannot be compared. Tokens behind the last
whole block have no id. Sessions and namespaces are hashed likewise.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvweave.errors import BadOption, TraceError
from kvweave.plan import Plan
from kvweave.prefix import Retention
from kvweave.sim.trace import Request, Trace, checked_tokens, make_trace
from kvweave.sim.traces.block_ids import Numbering
from kvweave.sim.traces.reading import Reading
from kvweave.sim.traces.trace_files import Head, records

if TYPE_CHECKING:
    from kvweave.engine.job import Job  # it needs torch

NAME = "kvweave-trace"
VERSION = 1
ID_BYTES = 6
"""48 bits: exact in every JSON reader."""


class TraceWriter:
    """Writes requests as they end. One writer writes one file, from one thread at a time; each line is whole."""

    def __init__(
        self, path: Path, *, block_tokens: int = 16, plan: Plan | None = None, retention: Retention | None = None
    ) -> None:
        if block_tokens < 1:
            raise BadOption(f"a recorded block has at least 1 token, got {block_tokens}")
        self.block_tokens = block_tokens
        self._secret = secrets.token_bytes(16)
        self._start = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        header: dict[str, Any] = {"format": NAME, "version": VERSION, "block_tokens": block_tokens}
        if plan is not None:
            header |= {"plan": plan.to_dict(), "retention": asdict(retention or Retention())}
        self._line(header)

    def write(
        self,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        session: str = "",
        namespace: str = "",
        cached: int | None = None,
        arrived: float | None = None,
    ) -> None:
        """One request; `cached` of its prompt's tokens were found. `arrived` by the monotonic clock (None: now)."""
        tokens = np.array([*prompt, *output], np.int32)
        row: dict[str, Any] = {
            "time": round((time.monotonic() if arrived is None else arrived) - self._start, 6),
            "prompt": len(prompt),
            "output": len(output),
            "blocks": self._blocks(tokens, namespace),
        }
        row |= {name: self._hash(name.encode() + text.encode()).hex() for name, text in
                (("session", session), ("namespace", namespace)) if text}  # fmt: skip
        self._line(row if cached is None else row | {"cached": cached})

    def write_job(self, job: Job) -> None:
        """A request that an engine has served."""
        prompt, output = job.tokens[: job.num_prompt], job.tokens[job.num_prompt :]
        self.write(prompt, output, namespace=str(job.tenant), cached=job.num_cached or 0, arrived=job.arrived)

    def _blocks(self, tokens: Any, namespace: str) -> list[int]:
        ids, above = [], namespace.encode()
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            above = self._hash(above + tokens[start : start + self.block_tokens].tobytes())
            ids.append(int.from_bytes(above, "big"))
        return ids

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._secret, digest_size=ID_BYTES).digest()

    def _line(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def matches(head: Head) -> bool:
    return head.record.get("format") == NAME


def read(path: Path, reading: Reading) -> Trace:  # noqa: ARG001 - nothing in it can be read in two ways
    rows = records(path)
    _, header = next(rows)
    block_tokens = header.get("block_tokens")
    if header.get("version") != VERSION or not isinstance(block_tokens, int) or block_tokens < 1:
        raise TraceError(f"{path}: a recording of version {VERSION} with block_tokens is expected, got {header!r:.200}")
    numbering, requests, tails = Numbering(), [], 0
    for number, (_, row) in enumerate(rows):
        try:
            ids, arrival, sizes = numbering("", row["blocks"]), float(row["time"]), (row["prompt"], row["output"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}: request {number} has no usable field: {error!r}") from error
        prompt = checked_tokens(str(path), number, "prompt", sizes[0], least=1)
        output = checked_tokens(str(path), number, "output", sizes[1])
        tail = -(-(prompt + output) // block_tokens) - len(ids)
        if not 0 <= tail <= 1:
            raise TraceError(f"{path}: request {number} of {prompt + output} tokens has {len(ids)} blocks")
        tails += tail
        blocks, session = np.concatenate([ids, numbering.new(tail)]), str(row.get("session") or f"request {number}")
        names = (session, str(row.get("namespace", "")))
        requests.append(Request(arrival, blocks, prompt, output, *names, row.get("cached")))
    recorded_with: dict[str, Any] = {name: header[name] for name in ("plan", "retention") if name in header}
    invented = [f"the ends of {tails:,} requests, shorter than a block of {block_tokens}, are tokens of their own"]
    return make_trace(path.name, NAME, block_tokens, requests, invented if tails else (), recorded_with)

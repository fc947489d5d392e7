"""Writes recordings of requests (`--record`), which `kvweave simulate` replays. JSON lines: a header, then an object a
request:

    {"format": "kvweave-trace", "version": 1, "block_tokens": 16, "plan": {...}, "retention": {...},
     "step_tokens": 2048}
    {"time": 1.25, "prompt": 40, "output": 8, "blocks": [7013..., 2200..., 5831...], "session": "9c4f...", "cached": 32}

A block's id is a hash of its tokens and of all before them, keyed by a secret that is never written: the trace says
which prefixes were equal and nothing of their text, and two recordings cannot be compared. Tokens behind the last
whole block have no id. Sessions and namespaces are hashed likewise.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from kvweave.errors import BadOption
from kvweave.plan import Plan
from kvweave.prefix import Retention, Span, TokenIds

TRACE_NAME = "kvweave-trace"
TRACE_VERSION = 1
ID_BYTES = 6
"""48 bits: exact in every JSON reader."""
YIELD_BLOCKS = 256
"""Blocks after which other threads run, an engine's for example: hashing a long prompt takes 10 ms."""


class ServedJob(Protocol):
    """A request that an engine has served."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_cached(self) -> int | None: ...
    @property
    def tenant(self) -> object: ...
    @property
    def arrived(self) -> float: ...


class TraceWriter:
    """Writes requests as they end. One writer writes one file, from one thread at a time; each line is whole."""

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = 16,
        plan: Plan | None = None,
        retention: Retention | None = None,
        step_tokens: int | None = None,
    ) -> None:
        if block_tokens < 1:
            raise BadOption(f"a recorded block has at least 1 token, got {block_tokens}")
        self.block_tokens = block_tokens
        self._secret = secrets.token_bytes(16)
        self._start = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        header: dict[str, Any] = {"format": TRACE_NAME, "version": TRACE_VERSION, "block_tokens": block_tokens}
        if plan is not None:
            header |= {"plan": plan.to_dict(), "retention": asdict(retention or Retention())}
        if step_tokens is not None:
            header["step_tokens"] = step_tokens
        self._line(header)

    def write(
        self,
        prompt: TokenIds,
        output: TokenIds = (),
        *,
        session: str = "",
        namespace: str = "",
        cached: int | None = None,
        arrived: float | None = None,
        spans: Sequence[Span] = (),
    ) -> None:
        """One request; `cached` of its prompt's tokens were found. `arrived` by the monotonic clock (None: now).
        `spans`: images and sounds that tokens stand for. Raises `OSError`; then nothing of it is in the file."""
        tokens = np.concatenate((np.asarray(prompt, np.int32), np.asarray(output, np.int32)))
        row: dict[str, Any] = {
            "time": round((time.monotonic() if arrived is None else arrived) - self._start, 6),
            "prompt": len(prompt),
            "output": len(output),
            "blocks": self._blocks(tokens, namespace, spans),
        }
        row |= {name: self._hash(name.encode() + text.encode()).hex() for name, text in
                (("session", session), ("namespace", namespace)) if text}  # fmt: skip
        self._line(row if cached is None else row | {"cached": cached})

    def write_job(self, job: ServedJob) -> None:
        prompt, output = job.tokens[: job.num_prompt], job.tokens[job.num_prompt :]
        self.write(prompt, output, namespace=str(job.tenant), cached=job.num_cached or 0, arrived=job.arrived)

    def _blocks(self, tokens: Any, namespace: str, spans: Sequence[Span]) -> list[int]:
        ids, above, size = [], namespace.encode(), self.block_tokens
        contents: dict[int, bytes] = {}
        for span in spans:
            contents[span.start // size] = contents.get(span.start // size, b"") + self._hash(span.content)
        for number in range(len(tokens) // size):
            own = tokens[number * size : (number + 1) * size].tobytes()
            above = self._hash(above + own + contents.get(number, b""))
            ids.append(int.from_bytes(above, "big"))
            if number % YIELD_BLOCKS == YIELD_BLOCKS - 1:
                time.sleep(0)
        return ids

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._secret, digest_size=ID_BYTES).digest()

    def _line(self, row: Mapping[str, Any]) -> None:
        data, whole = f"{json.dumps(row)}\n".encode(), self._file.tell()
        if self._file.write(data) != len(data):  # the disk is full: half a line could not be read
            self._file.truncate(whole)
            self._file.seek(whole)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

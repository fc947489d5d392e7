"""Records an engine's requests for `kvweave simulate`, without their text. A thread hashes and writes: the scheduler
waits neither for a disk nor for a lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from kvweave.errors import KVWeaveError
from kvweave.prefix import Span
from kvweave.prefix.prompt import as_tokens
from kvweave.trace_writer import TraceWriter

log = logging.getLogger("kvweave.vllm")
QUEUED_TOKENS = 4 << 20
"""Tokens of requests that wait for the disk, at most: some tens of MB. Further requests are not recorded."""


@dataclass(slots=True)
class RecordedRequest:
    """A request, while it runs. `tokens` are the engine's own list, which grows."""

    tokens: Sequence[int]
    num_prompt: int
    namespace: str
    spans: Sequence[Span] = ()
    num_cached: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    """When it ended."""


class TraceRecorder:
    """Writes one trace. Used by one thread; no call waits but `close`. A disk that fails ends the recording, with a
    warning."""

    def __init__(self, path: Path) -> None:
        self._path, self._running = path, dict[str, RecordedRequest]()
        self._queue: SimpleQueue[RecordedRequest | None] = SimpleQueue()
        self._num_queued = self._num_written = 0
        """Tokens; each is changed by one thread alone."""
        self.dropped, self.is_over = 0, False
        self._thread = threading.Thread(target=self._work, name="kvweave-record", daemon=True)
        self._thread.start()

    def begin(self, name: str, request: RecordedRequest) -> None:
        self._running[name] = request

    def scheduled(self, name: str, num_cached: int) -> None:
        """A request runs for the first time, or again after it was preempted: the first counts."""
        request = self._running.get(name)
        if request is not None and request.num_cached is None:
            request.num_cached = min(num_cached, request.num_prompt)

    def end(self, name: str) -> None:
        request = self._running.pop(name, None)
        if request is None or self.is_over:
            return
        request.num_tokens = len(request.tokens)
        if self._num_queued - self._num_written + request.num_tokens > QUEUED_TOKENS:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("%s is too slow a place to record to: requests are left out", self._path)
            return
        self._num_queued += request.num_tokens
        self._queue.put(request)

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is queued; gives up after `wait_s`."""
        self._queue.put(None)
        self._thread.join(wait_s)

    # ---- the thread

    def _work(self) -> None:
        try:
            with TraceWriter(self._path) as writer:
                while (request := self._queue.get()) is not None:
                    self._write(writer, request)
                    self._num_written += request.num_tokens
        except OSError as error:
            log.warning("requests are no longer recorded to %s: %s", self._path, error)
        self.is_over = True
        while not self._queue.empty():  # no other thread takes from it
            self._queue.get()

    def _write(self, writer: TraceWriter, request: RecordedRequest) -> None:
        try:
            tokens = as_tokens(list(request.tokens[: request.num_tokens]))
            prompt, output = tokens[: request.num_prompt], tokens[request.num_prompt :]
            cached, arrived = request.num_cached or 0, request.arrived
            writer.write(
                prompt, output, namespace=request.namespace, cached=cached, arrived=arrived, spans=request.spans
            )
        except KVWeaveError as error:
            log.warning("a request is not recorded: %s", error)

"""The worker: the thread of an engine that owns the core, computes its steps and hands out the tokens."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvweave.cache.arguments import whole_number
from kvweave.cache.stats import Stats
from kvweave.engine.admission import Admission
from kvweave.engine.engine_request import EngineRequest
from kvweave.engine.executor import Executor
from kvweave.engine.job import Job, JobChunk
from kvweave.engine.launched_step import LaunchedStep
from kvweave.engine.sampling import RowSampler, sample
from kvweave.engine.scheduler import Scheduler
from kvweave.errors import BadCall, BadOption, QueueFull
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.support import uncompiled
from kvweave.tensor import carry_out

log = logging.getLogger(__name__)

RETRY_S = 0.01
"""How long the worker waits when another holder of the cache has the pages that it needs."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Jobs of this moment, sums over all requests, and the core's statistics."""

    running: int
    waiting: int
    requests: int
    finished: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    preemptions: int
    core: Stats


class LiveRequest:
    """A request, its job, and its sampler."""

    __slots__ = ("job", "request", "sampler", "stops")

    def __init__(self, request: EngineRequest, job: Job, sampler: RowSampler, stops: frozenset[int]) -> None:
        self.request, self.job, self.sampler, self.stops = request, job, sampler, stops


class Worker:
    """Computes the requests that any thread submits or cancels; the thread starts at once.

    `changed` guards what threads share: requests submitted or cancelled that the worker has not taken over, and all
    requests that are not done. While a caller holds it, the worker takes none of them over.
    """

    def __init__(
        self,
        weave: KVWeave,
        *,
        budget: int,
        max_running: int,
        max_waiting: int,
        on_finish: Callable[[Job], None] | None,
    ) -> None:
        if whole_number(max_waiting, "max_waiting") < 0:
            raise BadOption(f"max_waiting must be at least 0, not {max_waiting}")
        self.weave = weave
        self._max_requests, self._on_finish = max_running + max_waiting, on_finish
        self._admission, self.executor = Admission(weave), Executor(weave)
        self.scheduler = Scheduler(
            weave.core,
            self._admission.open,
            budget=budget,
            max_running=max_running,
            limit=self._limit,
            whole_prompts=weave.served.scans_afresh,
        )
        self.changed = threading.Condition()
        self._inbox: deque[tuple[LiveRequest, bool]] = deque()
        """Requests and whether they are new; others are to be cancelled."""
        self._by_request: dict[EngineRequest, LiveRequest] = {}
        self._closing = False
        self._entries: dict[int, LiveRequest] = {}
        """Those that were taken over, by the number of their job."""
        self._under_way: LaunchedStep | None = None
        self._counts: Counter[str] = Counter()
        self.thread = threading.Thread(target=self._work, name="kvweave-engine", daemon=True)
        self.thread.start()

    def _limit(self, job: Job, start: int) -> int:
        return min(self.executor.limit(job, start), self._admission.limit(job, start))

    # ---- any thread

    def submit(self, entry: LiveRequest) -> None:
        """Queue a request; `QueueFull` if too many are not done, `BadCall` if the worker has ended."""
        with self.changed:
            if self._closing:
                raise BadCall("this engine is closed: make another")
            if len(self._by_request) >= self._max_requests:
                raise QueueFull(
                    f"{len(self._by_request)} requests are under way, and no more may wait: try again later"
                )
            self._by_request[entry.request] = entry
            self._inbox.append((entry, True))
            self.changed.notify()

    def cancel(self, request: EngineRequest) -> None:
        with self.changed:
            entry = self._by_request.get(request)
            if entry:
                self._inbox.append((entry, False))
                self.changed.notify()

    def stats(self) -> EngineStats:
        names = ("requests", "finished", "steps", "prompt_tokens", "cached_tokens", "new_tokens", "preemptions")
        sums = {name: self._counts[name] for name in names}
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return EngineStats(running, waiting + len(self._inbox), **sums, core=self.weave.core.stats())

    @property
    def is_running(self) -> bool:
        return self.thread.is_alive() and not self._closing

    def close(self) -> None:
        """Cancel what runs, and wait for the end of the thread."""
        with self.changed:
            self._closing = True
            self.changed.notify()
        self.thread.join()

    # ---- the thread

    def _work(self) -> None:
        error: BaseException = BadCall("this engine is closed: make another")
        try:
            while self._take_inbox():
                if not self._try_step():
                    with self.changed:
                        self.changed.wait(RETRY_S)
        except BaseException as failure:
            log.exception("the engine has stopped: it cannot give back what its requests hold")
            error = failure
        with self.changed:  # requests that are left would wait for ever
            self._closing = True
            left = list(self._by_request)
        for request in left:
            request.fail(error)

    def _try_step(self) -> bool:
        """`_step`; if the engine itself fails, all requests that it knows of fail with it."""
        try:
            with self.weave.memory.core_lock, uncompiled(self.weave.model):
                return self._step()
        except BaseException as error:
            log.exception("the engine failed")
            self._under_way = None
            with self.weave.memory.core_lock:
                self._fail(list(self._entries.values()), error)
            return True

    def _take_inbox(self) -> bool:
        """Wait for something to do, and take over submitted and cancelled requests; False once it is closing."""
        with self.changed:
            self.changed.wait_for(lambda: self._inbox or self._closing or self._under_way or not self.scheduler.is_idle)
            asked = list(self._inbox)
            self._inbox.clear()
            is_closing = self._closing
        with self.weave.memory.core_lock:
            for entry, is_new in asked:
                if is_new:
                    self.scheduler.add(entry.job)
                    self._entries[entry.job.number] = entry
                    self._counts.update(requests=1, prompt_tokens=len(entry.request.prompt))
                elif not entry.request.is_done:
                    self._finish(entry, "cancelled")
            if is_closing:
                for entry in list(self._entries.values()):
                    self._finish(entry, "cancelled")
        return not is_closing

    def _step(self) -> bool:
        """Compute one step; False if there was none to compute.

        The tokens of the step before it are taken over while this one is computed, where it does not need them.
        """
        self._admission.begin_step()
        step = self.scheduler.plan()
        chunks = step.chunks
        if not chunks:
            return self._settle() or self.scheduler.is_idle
        try:
            for copies in step.copies:
                carry_out(self.weave.arena, copies)
            if not self.executor.can_run_ahead(chunks):
                self._settle()
                chunks = [chunk for chunk in chunks if chunk.sequence.is_open]
            launched = self._launch(chunks)
        except Exception as error:
            log.exception("a step of %d requests failed", len(chunks))
            self._fail([self._entries[chunk.job.number] for chunk in chunks], error)
            return True
        self._counts.update(steps=1)
        self._settle()
        self._under_way = launched
        if not self.executor.runs_ahead:
            self._settle()
        return True

    def _launch(self, chunks: SequenceOf[JobChunk]) -> LaunchedStep:
        """Compute chunks and their next tokens; waits for nothing."""
        logits = self.executor.run(chunks)
        giving = [chunk for chunk in chunks if chunk.gives_token]
        rows = [self._entries[chunk.job.number].sampler for chunk in giving]
        chosen = None if logits is None else sample(logits, rows)
        if chosen is not None:
            self.executor.note_tokens(chunks, chosen)
        for chunk in giving:
            chunk.job.num_pending += 1
        return LaunchedStep(chunks, rows, logits, chosen)

    def _settle(self) -> bool:
        """Commit the step under way and take its tokens over; False if there is none."""
        launched, self._under_way = self._under_way, None
        if launched is None:
            return False
        giving = [chunk.job for chunk in launched.chunks if chunk.gives_token]
        live = [self._entries.get(job.number) for job in giving]
        for job in giving:
            job.num_pending -= 1
        try:
            tokens = launched.tokens()
            for copies in self.scheduler.commit(launched.chunks):
                carry_out(self.weave.arena, copies)
            for chunk in launched.chunks:
                if chunk.sequence.is_open:
                    self._admission.after_commit(chunk)
        except Exception as error:
            log.exception("a step of %d requests failed", len(launched.chunks))
            found = (self._entries.get(chunk.job.number) for chunk in launched.chunks)
            self._fail([entry for entry in found if entry], error)
            return True
        for entry, (token, logs) in zip(live, tokens, strict=True):
            if entry:
                self._take(entry, token, logs)
        return True

    def _take(self, entry: LiveRequest, token: int, logs: Any) -> None:
        """The next token of a request."""
        job = entry.job
        job.tokens.append(token)
        self._counts.update(new_tokens=1)
        entry.request.put(token, logs)
        if token in entry.stops:
            self._finish(entry, "stop")
        elif len(job.tokens) - job.num_prompt >= job.max_new:
            self._finish(entry, "length")

    def _finish(self, entry: LiveRequest, reason: Any) -> None:
        job = entry.job
        with _logged("what a request leaves could not be saved"):
            self._admission.before_close(job)
        self._forget(entry)
        self._counts.update(finished=1, cached_tokens=job.num_cached or 0, preemptions=job.num_preempted)
        if self._on_finish is not None:
            with _logged("on_finish failed"):
                self._on_finish(job)
        entry.request.finish(reason, job.num_cached or 0, job.num_stored, job.num_preempted)

    def _fail(self, entries: Iterable[LiveRequest], error: BaseException) -> None:
        for entry in entries:
            self._forget(entry)
            entry.request.fail(error)

    def _forget(self, entry: LiveRequest) -> None:
        self.scheduler.remove(entry.job)
        self._admission.forget(entry.job)
        self._entries.pop(entry.job.number, None)
        with self.changed:
            self._by_request.pop(entry.request, None)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log a failure that does not concern the answer: the request still gets it."""
    try:
        yield
    except Exception:
        log.exception(what)

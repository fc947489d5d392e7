"""The engine: many requests at once on one transformers model, by a worker thread that owns the core."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.cache.stats import Stats
from kvweave.engine.admission import Admission
from kvweave.engine.engine_request import EngineRequest, Result
from kvweave.engine.executor import Executor
from kvweave.engine.job import Job, JobChunk
from kvweave.engine.sampling import RowSampler, Sampling, TokenLogprobs, logprobs, sample
from kvweave.engine.scheduler import Scheduler
from kvweave.errors import BadCall, BadOption, BadTokens, QueueFull
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.support import uncompiled
from kvweave.tensor import carry_out

log = logging.getLogger(__name__)

Prompt = SequenceOf[int] | NDArray[np.integer[Any]] | torch.Tensor
"""Token ids; of arrays and tensors one row."""

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


class LaunchedStep:
    """A step that is being computed: its chunks, and where the tokens will be that follow from some of them."""

    def __init__(
        self,
        chunks: SequenceOf[JobChunk],
        rows: SequenceOf[RowSampler],
        logits: torch.Tensor | None,
        chosen: torch.Tensor | None,
    ) -> None:
        self.chunks, self._rows, self._logits, self._chosen = chunks, rows, logits, chosen
        self._here = None if chosen is None else chosen.to("cpu", non_blocking=True)
        self._is_here = torch.cuda.Event() if chosen is not None and chosen.is_cuda else None
        if self._is_here:
            self._is_here.record()

    def tokens(self) -> list[tuple[int, TokenLogprobs | None]]:
        """The tokens, and what is to be told of them; waits until they are here."""
        if self._logits is None or self._chosen is None or self._here is None:
            return []
        if self._is_here:
            self._is_here.synchronize()
        return list(zip(self._here.tolist(), logprobs(self._logits, self._rows, self._chosen), strict=True))


class LiveRequest:
    """A request, its job, and its sampler."""

    __slots__ = ("job", "request", "sampler", "stops")

    def __init__(self, request: EngineRequest, job: Job, sampler: RowSampler, stops: frozenset[int]) -> None:
        self.request, self.job, self.sampler, self.stops = request, job, sampler, stops


class Engine:
    """Serves one model from `memory` bytes of pages; takes the options of `KVWeave`, which it makes.

    A step computes at most `budget` tokens, of at most `max_running` requests: tokens of those that generate first,
    then chunks of prompts. At most `max_waiting` requests wait. Requests are served by priority, and prefixes are
    shared within one namespace. `on_finish` hears of every request that ends, on the engine's thread. On a GPU layers
    are compiled for steps of few tokens, unless `compile_layers` is False: the first requests take some seconds more,
    all others less. Use it as a context; `close` cancels what runs and frees the memory.
    """

    def __init__(
        self,
        model: Any,
        memory: int | str = "2GiB",
        *,
        budget: int = 2048,
        max_running: int = 64,
        max_waiting: int = 4096,
        on_finish: Callable[[Job], None] | None = None,
        compile_layers: bool | None = None,
        **weave_options: Any,
    ) -> None:
        if compile_layers is None:
            compile_layers = model.device.type == "cuda"
        self.weave = KVWeave(model, memory, compile_layers=compile_layers, **weave_options)
        self.model, self.max_waiting, self._on_finish = self.weave.model, max_waiting, on_finish
        self._admission, self._executor = Admission(self.weave), Executor(self.weave)
        self._scheduler = Scheduler(
            self.weave.core,
            self._admission.open,
            budget=budget,
            max_running=max_running,
            limit=self._limit,
            whole_prompts=self.weave.served.scans_afresh,
        )
        self._entries: dict[int, LiveRequest] = {}
        self._inbox: deque[tuple[LiveRequest, bool]] = deque()
        self._by_request: dict[EngineRequest, LiveRequest] = {}
        self._wakes = threading.Condition()
        self._closing = False
        self._under_way: LaunchedStep | None = None
        self._counts: Counter[str] = Counter()
        self._worker = threading.Thread(target=self._work, name="kvweave-engine", daemon=True)
        self._worker.start()

    def _limit(self, job: Job, start: int) -> int:
        return min(self._executor.limit(job, start), self._admission.limit(job, start))

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        priority: int = 0,
        namespace: Hashable = "",
    ) -> EngineRequest:
        """Queue a prompt of token ids; from any thread. Raises `NeverFits` at once if prompt and answer can never fit,
        `BadTokens` if they are no prompt, `QueueFull` if too many requests wait."""
        sampling = sampling or Sampling()
        tokens = self._checked(prompt)
        self._scheduler.check(len(tokens), sampling.max_new_tokens)
        request = EngineRequest(tuple(tokens), sampling, self._cancel)
        job = Job(list(tokens), sampling.max_new_tokens, priority, namespace)
        sampler = RowSampler(sampling, tokens, self._vocabulary, self.model.device)
        entry = LiveRequest(request, job, sampler, self._stops(sampling))
        with self._wakes:
            if self._closing:
                raise BadCall("this engine is closed: make another")
            if len(self._by_request) >= self.max_waiting + self._scheduler.max_running:
                raise QueueFull(
                    f"{len(self._by_request)} requests are under way, and no more may wait: try again later"
                )
            self._by_request[request] = entry
            self._inbox.append((entry, True))
            self._wakes.notify()
        return request

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | SequenceOf[Sampling] | None = None,
        *,
        namespace: Hashable = "",
        progress: bool = False,
    ) -> list[Result]:
        """The answers to many prompts, in their order; with a `progress` bar, if tqdm is installed. Any number may be
        given: those beyond the queue are submitted as others end. If one can never be served, none is."""
        given = [self._checked(prompt) for prompt in prompts]
        each = list(sampling) if isinstance(sampling, SequenceOf) else [sampling] * len(given)
        if len(each) != len(given):
            raise BadOption(f"{len(each)} samplings for {len(given)} prompts: give one for each, or one for all")
        for tokens, wanted in zip(given, each, strict=True):
            self.check_fits(len(tokens), (wanted or Sampling()).max_new_tokens)
        requests: list[EngineRequest] = []
        results = []
        try:
            for number in _shown(range(len(given)), progress):
                with self._wakes:  # when the first prompt is opened, others are known, which may begin like it
                    self._submit_more(requests, given, each, namespace, at_least=number + 1)
                results.append(requests[number].result())
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return results

    def check_fits(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raise `NeverFits` if a prompt and an answer of so many tokens could never be served. From any thread."""
        self._scheduler.check(num_prompt, max_new_tokens)

    def _submit_more(
        self,
        requests: list[EngineRequest],
        prompts: SequenceOf[SequenceOf[int]],
        each: SequenceOf[Sampling | None],
        namespace: Hashable,
        at_least: int,
    ) -> None:
        """Submit prompts behind those of `requests`, as many as may wait; `QueueFull` if these are too few."""
        while (number := len(requests)) < len(prompts):
            try:
                requests.append(self.submit(prompts[number], each[number], namespace=namespace))
            except QueueFull:
                if number < at_least:
                    raise
                return

    def _checked(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, torch.Tensor | np.ndarray):
            if math.prod(prompt.shape[:-1]) != 1:
                raise BadTokens(f"a prompt is one row of token ids, not {list(prompt.shape)}: submit each row")
            prompt = prompt.reshape(-1).tolist()
        tokens = list(prompt)
        most = self._vocabulary
        if not tokens or not all(type(token) is int and 0 <= token < most for token in tokens):
            raise BadTokens(f"a prompt is a list of token ids from 0 to {most - 1}, at least one; got {tokens[:8]}")
        return tokens

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _stops(self, sampling: Sampling) -> frozenset[int]:
        if sampling.stop_tokens is not None:
            return frozenset(sampling.stop_tokens)
        ends = self.model.generation_config.eos_token_id
        return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def _cancel(self, request: EngineRequest) -> None:
        with self._wakes:
            entry = self._by_request.get(request)
            if entry:
                self._inbox.append((entry, False))
                self._wakes.notify()

    # ---- the worker

    def _work(self) -> None:
        error: BaseException = BadCall("this engine is closed: make another")
        try:
            while self._take_inbox():
                if not self._try_step():
                    with self._wakes:
                        self._wakes.wait(RETRY_S)
        except BaseException as failure:
            log.exception("the engine has stopped: it cannot give back what its requests hold")
            error = failure
        with self._wakes:  # whatever happened, nobody waits for ever
            self._closing = True
            left = list(self._by_request)
        for request in left:
            request.fail(error)

    def _try_step(self) -> bool:
        """`_step`; if the engine itself fails, all requests that it knows of fail with it."""
        try:
            with self.weave.memory.core_lock, uncompiled(self.model):
                return self._step()
        except BaseException as error:
            log.exception("the engine failed")
            self._under_way = None
            with self.weave.memory.core_lock:
                self._fail(list(self._entries.values()), error)
            return True

    def _take_inbox(self) -> bool:
        """Wait for something to do, and take over what was asked meanwhile; False at the end."""
        with self._wakes:
            self._wakes.wait_for(lambda: self._inbox or self._closing or self._under_way or not self._scheduler.is_idle)
            asked = list(self._inbox)
            self._inbox.clear()
            is_closing = self._closing
        with self.weave.memory.core_lock:
            for entry, is_new in asked:
                if is_new:
                    self._scheduler.add(entry.job)
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
        step = self._scheduler.plan()
        chunks = step.chunks
        if not chunks:
            return self._settle() or self._scheduler.is_idle
        try:
            for copies in step.copies:
                carry_out(self.weave.arena, copies)
            if not self._executor.can_run_ahead(chunks):
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
        if not self._executor.runs_ahead:
            self._settle()
        return True

    def _launch(self, chunks: SequenceOf[JobChunk]) -> LaunchedStep:
        """Compute chunks and their next tokens; waits for nothing."""
        logits = self._executor.run(chunks)
        giving = [chunk for chunk in chunks if chunk.gives_token]
        rows = [self._entries[chunk.job.number].sampler for chunk in giving]
        chosen = None if logits is None else sample(logits, rows)
        if chosen is not None:
            self._executor.note_tokens(chunks, chosen)
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
            for copies in self._scheduler.commit(launched.chunks):
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
        self._scheduler.remove(entry.job)
        self._admission.forget(entry.job)
        self._entries.pop(entry.job.number, None)
        with self._wakes:
            self._by_request.pop(entry.request, None)

    # ---- stats, and the end

    def stats(self) -> EngineStats:
        """The counts of this moment."""
        names = ("requests", "finished", "steps", "prompt_tokens", "cached_tokens", "new_tokens", "preemptions")
        sums = {name: self._counts[name] for name in names}
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return EngineStats(running, waiting + len(self._inbox), **sums, core=self.weave.core.stats())

    @property
    def is_running(self) -> bool:
        return self._worker.is_alive() and not self._closing

    def close(self) -> None:
        """Cancel what runs, end the worker and free the memory; calling it twice is fine."""
        with self._wakes:
            self._closing = True
            self._wakes.notify()
        self._worker.join()
        self.weave.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Failures beside an answer are logged: they take it from nobody."""
    try:
        yield
    except Exception:
        log.exception(what)


def _shown(numbers: Iterable[int], progress: bool) -> Iterable[int]:
    if not progress:
        return numbers
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - comes with transformers

    shown: Iterable[int] = tqdm(numbers, desc="answers", unit="request")
    return shown

"""The engine: many requests at once on one transformers model. What any thread calls; `worker` computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.cache.arguments import check_namespace, whole_number
from kvweave.engine.engine_request import EngineRequest, Result
from kvweave.engine.job import Job
from kvweave.engine.sampling import RowSampler, Sampling
from kvweave.engine.worker import EngineStats, LiveRequest, Worker
from kvweave.errors import BadOption, BadTokens, QueueFull
from kvweave.integrations.transformers import KVWeave
from kvweave.prefix import as_tokens

Prompt = SequenceOf[int] | NDArray[np.integer[Any]] | torch.Tensor
"""Token ids; of arrays and tensors one row."""


class Engine:
    """Serves one model from `memory` bytes of pages; takes the options of `KVWeave`, which it makes.

    A step computes at most `budget` tokens, of at most `max_running` requests: tokens of those that generate first,
    then chunks of prompts. At most `max_waiting` requests wait. Requests are served by priority, and prefixes are
    shared within one namespace. `on_finish` is called for every request that ends, on the engine's thread. On a GPU
    layers are compiled for steps of few tokens, unless `compile_layers` is False: the first requests take some seconds
    more, all others less. Use it as a context; `close` cancels what runs and frees the memory.
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
        self.model = self.weave.model
        try:
            self._worker = Worker(
                self.weave, budget=budget, max_running=max_running, max_waiting=max_waiting, on_finish=on_finish
            )
        except BaseException:
            self.weave.close()
            raise

    @property
    def budget(self) -> int:
        """The most tokens that a step computes."""
        return self._worker.scheduler.budget

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
        `BadTokens` if they are no prompt, `BadOption` or `BadType` for what cannot be used, `QueueFull` if too many
        requests wait."""
        sampling = sampling or Sampling()
        priority = whole_number(priority, "a priority")
        check_namespace(namespace)
        tokens = self._checked(prompt)
        self._worker.scheduler.check(len(tokens), sampling.max_new_tokens)
        request = EngineRequest(tuple(tokens), sampling, self._worker.cancel)
        job = Job(list(tokens), sampling.max_new_tokens, priority, namespace)
        sampler = RowSampler(sampling, tokens, self._vocabulary, self.model.device)
        self._worker.submit(LiveRequest(request, job, sampler, self._stops(sampling)))
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
                with self._worker.changed:  # the first is opened when others with its prefix are known
                    self._submit_more(requests, given, each, namespace, at_least=number + 1)
                results.append(requests[number].result())
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return results

    def check_fits(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raise `NeverFits` if a prompt and an answer of so many tokens could never be served. From any thread."""
        self._worker.scheduler.check(num_prompt, max_new_tokens)

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
        most, tokens = self._vocabulary, as_tokens(prompt)
        if not len(tokens) or tokens.max() >= most:
            raise BadTokens(f"a prompt is a list of token ids from 0 to {most - 1}, at least one; got {tokens[:8]}")
        return list(tokens.tolist())

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _stops(self, sampling: Sampling) -> frozenset[int]:
        if sampling.stop_tokens is not None:
            return frozenset(sampling.stop_tokens)
        ends = self.model.generation_config.eos_token_id
        return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    # ---- stats, and the end

    def stats(self) -> EngineStats:
        """The counts of this moment."""
        return self._worker.stats()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: not closed, and its thread has not failed."""
        return self._worker.is_running

    def close(self) -> None:
        """Cancel what runs, end the worker and free the memory; calling it twice is fine."""
        self._worker.close()
        self.weave.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shown(numbers: Iterable[int], progress: bool) -> Iterable[int]:
    if not progress:
        return numbers
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - comes with transformers

    shown: Iterable[int] = tqdm(numbers, desc="answers", unit="request")
    return shown

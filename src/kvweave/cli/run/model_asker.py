"""Requests, one by one: with reuse, and the same without it, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvweave.cli.run.outcome import BaselineOutcome, RequestOutcome
from kvweave.engine import Engine, Result, Sampling
from kvweave.sim import TraceWriter

WARM_UP_TOKENS = 8


class ModelAsker:
    """Asks an engine. With `compare`, asks its model again without reuse, each time. `recording` is called for every
    request. Random tokens are drawn from the seed of `sampling` and the number of the request."""

    def __init__(
        self, engine: Engine, sampling: Sampling, compare: bool = False, recording: TraceWriter | None = None
    ) -> None:
        self.engine, self.compare, self.recording = engine, compare, recording
        self.outcomes: list[RequestOutcome] = []
        self._sampling = replace(sampling, logprobs=0) if compare else sampling

    def warm_up(self) -> None:
        """The first call of a process pays for threads and kernels; no request should."""
        self._generate(torch.arange(1, 1 + WARM_UP_TOKENS, device=self.engine.model.device)[None], max_new_tokens=2)

    def ask(self, who: str, prompt: Sequence[int], on_token: Callable[[int], None] | None = None) -> list[int]:
        """The answer to a prompt, told token by token; what it took is added to `outcomes`."""
        arrived, start, first = time.monotonic(), time.perf_counter(), 0.0
        request = self.engine.submit(prompt, replace(self._sampling, seed=self._seed()))
        try:
            for token in request:
                first = first or time.perf_counter() - start
                if on_token is not None:
                    on_token(token)
            result, seconds = request.result(), time.perf_counter() - start
        finally:
            request.cancel()
        plain = self._plain(result) if self.compare else None
        found = len(prompt), result.cached_tokens, len(result.tokens)
        self.outcomes.append(RequestOutcome(who, *found, first, seconds, plain, result.stored_tokens))
        if self.recording is not None:
            session = who.partition(",")[0]
            cached = result.cached_tokens
            self.recording.write(prompt, result.tokens, session=session, cached=cached, arrived=arrived)
        return list(result.tokens)

    def _seed(self) -> int | None:
        seed = self._sampling.seed
        return None if seed is None else seed + len(self.outcomes)

    def _plain(self, ours: Result) -> BaselineOutcome:
        model = self.engine.model
        ids = torch.tensor([ours.prompt], device=model.device)
        start = time.perf_counter()
        with _first_forward(model) as first:
            theirs = self._generate(ids, max_new_tokens=self._sampling.max_new_tokens)
        end = time.perf_counter()
        at = _differs_at(ours.tokens, theirs.sequences[0, ids.shape[1] :].tolist())
        gaps = [
            abs(one.logprob - float(other[0].float().log_softmax(-1)[one.token]))
            for one, other in zip(ours.logprobs[: None if at is None else at + 1], theirs.logits, strict=False)
        ]
        return BaselineOutcome(first[0] - start, end - start, at, max(gaps))

    def _generate(self, ids: torch.Tensor, **options: Any) -> Any:
        """By transformers alone."""
        pad = self.engine.model.generation_config.pad_token_id
        how = {"do_sample": False, "num_beams": 1, "pad_token_id": 0 if pad is None else pad, "output_logits": True}
        how |= {"return_dict_in_generate": True, "repetition_penalty": self._sampling.repetition_penalty, **options}
        return self.engine.model.generate(ids, attention_mask=torch.ones_like(ids), **how)


@contextmanager
def _first_forward(model: Any) -> Iterator[list[float]]:
    """When the model returned, each time; the first is when the logits of the first token were there."""
    times: list[float] = []

    def note(*_: Any) -> None:
        if not times and model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    hook = model.register_forward_hook(note)
    try:
        yield times
    finally:
        hook.remove()


def _differs_at(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))

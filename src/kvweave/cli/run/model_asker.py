"""Requests, one by one: with reuse, and the same without it, token by token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvweave.cli.run.outcome import BaselineOutcome, RequestOutcome
from kvweave.integrations.transformers import KVWeave
from kvweave.sim import TraceWriter

WARM_UP_TOKENS = 8


class ModelAsker:
    """Asks a model: greedily, or with options of sampling as `generate` takes them. With `compare`, asks it again
    without reuse, each time. `recording` is told of every request."""

    def __init__(
        self,
        weave: KVWeave,
        max_new_tokens: int,
        compare: bool,
        recording: TraceWriter | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.weave, self.compare, self.recording = weave, compare, recording
        self.outcomes: list[RequestOutcome] = []
        pad = weave.model.generation_config.pad_token_id
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            **({"do_sample": True, **sampling} if sampling else {"do_sample": False}),
            "num_beams": 1,
            "pad_token_id": 0 if pad is None else pad,
            "return_dict_in_generate": True,
            "output_logits": compare,
        }

    def warm_up(self) -> None:
        """The first call of a process pays for threads and kernels; no request should."""
        ids = torch.arange(1, 1 + WARM_UP_TOKENS, device=self.weave.model.device)[None]
        self.weave.model.generate(ids, attention_mask=torch.ones_like(ids), **self._options | {"max_new_tokens": 2})

    def ask(self, who: str, prompt: Sequence[int], streamer: Any = None) -> list[int]:
        """The answer to a prompt; what it took is added to `outcomes`."""
        arrived = time.monotonic()
        ids = torch.tensor([list(prompt)], device=self.weave.model.device)
        mask = torch.ones_like(ids)
        answer = self.weave.generate(
            ids, attention_mask=mask, **self._options | ({"streamer": streamer} if streamer else {})
        )
        record = self.weave.records[-1]
        plain = self._plain(ids, mask, answer) if self.compare else None
        self.outcomes.append(
            RequestOutcome(
                who,
                record.prompt_tokens,
                record.reused_tokens,
                record.new_tokens,
                record.first_token_seconds,
                record.seconds,
                plain,
                record.stored_tokens,
            )
        )
        tokens: list[int] = answer.sequences[0, ids.shape[1] :].tolist()
        if self.recording is not None:
            session = who.partition(",")[0]
            self.recording.write(prompt, tokens, session=session, cached=record.reused_tokens, arrived=arrived)
        return tokens

    def _plain(self, ids: torch.Tensor, mask: torch.Tensor, ours: Any) -> BaselineOutcome:
        start = time.perf_counter()
        with _first_forward(self.weave.model) as first:
            theirs = self.weave.model.generate(ids, attention_mask=mask, **self._options)
        end = time.perf_counter()
        at = _differs_at(ours.sequences[0, ids.shape[1] :].tolist(), theirs.sequences[0, ids.shape[1] :].tolist())
        same = slice(None if at is None else at + 1)
        gap = max(float((a - b).abs().max()) for a, b in zip(ours.logits[same], theirs.logits[same], strict=False))
        return BaselineOutcome(first[0] - start, end - start, at, gap)


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


def _differs_at(ours: list[int], theirs: list[int]) -> int | None:
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))

"""A step that is being computed: its tokens may still be on the device."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from kvweave.engine.job import JobChunk
from kvweave.engine.sampling import RowSampler, TokenLogprobs, logprobs


class LaunchedStep:
    """A step that is being computed: its chunks, and the tensor of the tokens sampled after some of them."""

    def __init__(
        self,
        chunks: SequenceOf[JobChunk],
        rows: SequenceOf[RowSampler],
        logits: torch.Tensor | None,
        chosen: torch.Tensor | None,
    ) -> None:
        self.chunks, self._rows, self._logits, self._chosen = chunks, rows, logits, chosen
        self._on_host = None if chosen is None else chosen.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if chosen is not None and chosen.is_cuda else None
        if self._copied:
            self._copied.record()

    def tokens(self) -> list[tuple[int, TokenLogprobs | None]]:
        """The sampled tokens with their logprobs, if asked for; waits until they are on the host."""
        if self._logits is None or self._chosen is None or self._on_host is None:
            return []
        if self._copied:
            self._copied.synchronize()
        return list(zip(self._on_host.tolist(), logprobs(self._logits, self._rows, self._chosen), strict=True))

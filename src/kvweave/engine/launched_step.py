"""A step that is being computed: its tokens may still be on the device."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from kvweave.engine.job import JobChunk
from kvweave.engine.sampling import RowSampler, TokenLogprobs, logprobs


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

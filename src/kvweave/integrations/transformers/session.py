"""Sessions: conversations that remember their tokens, so that each turn brings only what is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Session:
    """One conversation. `tokens` is all that was said so far, `[1, tokens]`; the pages are found by it, not held."""

    def __init__(self, generate: Callable[..., Any], device: torch.device) -> None:
        self._generate = generate
        self.tokens = torch.empty(1, 0, dtype=torch.long, device=device)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Say `input_ids`, `[1, tokens]`, and remember the answer; returns the new tokens, `[1, tokens]`."""
        said = torch.cat([self.tokens, input_ids.to(self.tokens.device)], dim=1)
        answer = self._generate(said, attention_mask=torch.ones_like(said), **options)
        self.tokens = getattr(answer, "sequences", answer)[:1]
        return self.tokens[:, said.shape[1] :]

"""Sessions: conversations that keep their tokens, so that each turn passes only the new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvweave.errors import BadTokens


class Session:
    """One conversation. `tokens` are all tokens so far, `[1, tokens]`; pages are found by them, and not held."""

    def __init__(self, generate: Callable[..., Any], device: torch.device) -> None:
        self._generate = generate
        self.tokens = torch.empty(1, 0, dtype=torch.long, device=device)

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Append `input_ids`, `[1, tokens]`, generate, and append the answer; returns the new tokens, `[1, tokens]`.

        An `attention_mask`, as tokenizers return it, must be ones: conversations are not padded.
        """
        shape = list(getattr(input_ids, "shape", ()))
        if len(shape) != 2 or shape[0] != 1 or (attention_mask is not None and not bool(attention_mask.all())):
            raise BadTokens(f"a session takes the new tokens of one conversation, [1, tokens], unpadded; got {shape}")
        said = torch.cat([self.tokens, input_ids.to(self.tokens.device)], dim=1)
        answer = self._generate(said, attention_mask=torch.ones_like(said), **options)
        self.tokens = getattr(answer, "sequences", answer)[:1]
        return self.tokens[:, said.shape[1] :]

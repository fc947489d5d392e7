"""Prompts: the rows of a padded batch as the tokens that they are."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.errors import BadTokens

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: its tokens, of which the first `padding` are padding (0, where padding is left out), and whose it is."""

    tokens: Tokens
    padding: int
    name: Hashable

    @property
    def namespace(self) -> Hashable:
        """Rows that are padded otherwise are kept apart."""
        return self.name, self.padding


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """A batch `[rows, width]`, padded on the left; `mask` is 1 where there is a token."""

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)
    pads: tuple[int, ...]

    @classmethod
    def read(cls, ids: torch.Tensor, mask: torch.Tensor | None, pad_token: int | None) -> Prompts:
        """Without a mask, what equals the padding token is padding: as `generate` has it."""
        if mask is None:
            mask = torch.ones_like(ids) if pad_token is None else ids.ne(pad_token).long()
        if mask.shape != ids.shape or not ids.numel():
            raise BadTokens(f"prompts {list(ids.shape)} and attention_mask {list(mask.shape)} are not of one shape")
        if bool((mask[:, 1:] < mask[:, :-1]).any()) or not bool(mask[:, -1].all()):
            raise BadTokens("prompts of a batch are padded on the left: attention_mask must be zeros, then ones")
        return cls(ids, mask, tuple((ids.shape[1] - mask.sum(-1)).tolist()))

    def __len__(self) -> int:
        return len(self.pads)

    @property
    def width(self) -> int:
        return int(self.ids.shape[1])

    @property
    def num_tokens(self) -> int:
        return len(self) * self.width - sum(self.pads)

    def rows(self, namespace: Hashable, counts_padding: bool) -> list[Prompt]:
        """Each row without its padding; where layers count padding, with it."""
        tokens = self.ids.cpu().numpy()
        if counts_padding:
            return [Prompt(row, pad, namespace) for row, pad in zip(tokens, self.pads, strict=True)]
        return [Prompt(row[pad:], 0, namespace) for row, pad in zip(tokens, self.pads, strict=True)]


def pad_token(model: Any, options: dict[str, Any]) -> int | None:
    """The padding token of a model's prompts; None where it ends answers too, and so cannot be told from them."""
    config = options.get("generation_config") or model.generation_config
    pad, end = (options.get(name, getattr(config, name, None)) for name in ("pad_token_id", "eos_token_id"))
    ends = end if isinstance(end, list) else [end]
    return None if pad in ends else pad

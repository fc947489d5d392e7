"""Prompts: the rows of a padded batch as token sequences."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.errors import BadTokens
from kvweave.integrations.transformers.images import Images
from kvweave.integrations.transformers.rope import Range

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: its tokens, the first `padding` of which are padding (0, if padding is left out), and its namespace.

    `rope_range` says with which rotary frequencies it is computed, `extras` names its other inputs, which are all
    zeros. Rows that differ in either do not share prefixes.
    """

    tokens: Tokens
    padding: int = 0
    name: Hashable = ""
    rope_range: Range = ()
    extras: tuple[str, ...] = ()
    branches: tuple[int, ...] = field(default=(), compare=False)
    """Where others that are to come leave it."""
    images: Images | None = field(default=None, compare=False)
    positions: torch.Tensor | None = field(default=None, compare=False)
    """`[..., 1, tokens]`, for models that compute positions themselves."""

    @property
    def kind(self) -> Hashable:
        return self.name, self.padding, self.rope_range, self.extras


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """A batch `[rows, width]`, padded on the left; `mask` is 1 where there is a token."""

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)
    pads: tuple[int, ...]

    @classmethod
    def read(cls, ids: torch.Tensor, mask: torch.Tensor | None, pad_token: int | None) -> Prompts:
        """Without a mask, tokens that equal the padding token are padding, as in `generate`. Masks may have any
        dtype."""
        if mask is None:
            mask = torch.ones_like(ids) if pad_token is None else ids.ne(pad_token)
        if mask.shape != ids.shape or not ids.numel():
            raise BadTokens(f"prompts {list(ids.shape)} and attention_mask {list(mask.shape)} are not of one shape")
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise BadTokens("an attention_mask is ones where there are tokens and zeros where there is padding")
        mask = mask.long()
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

    @property
    def positions(self) -> torch.Tensor:
        """The positions that transformers would compute, `[rows, width]`; those of padding are 0."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def rows(self, name: Hashable, counts_padding: bool, extras: tuple[str, ...] = ()) -> list[Prompt]:
        """Each row without its padding; with it, where layers store padding."""
        tokens = self.ids.cpu().numpy()
        pairs = zip(tokens, self.pads, strict=True)
        if counts_padding:
            return [Prompt(row, pad, name, extras=extras) for row, pad in pairs]
        return [Prompt(row[pad:], 0, name, extras=extras) for row, pad in pairs]

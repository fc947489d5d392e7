"""Inputs of a forward beside its tokens: whether they have the values that `generate` would give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvweave.integrations.transformers.batch_step import Numbers

NO_INPUTS = ("input_ids", "labels", "logits_to_keep", "cache_position")
"""Tensors that may be passed to a forward without changing any row of the cache."""


def are_default(inputs: Mapping[str, Any], pads: Numbers, start: int, end: int) -> bool:
    """Whether a forward over columns `[start, end)` has the inputs that `generate` would give it: then its rows can be
    shared.

    Row i has `pads[i]` columns of padding; all its other tokens are attended to, with positions from 0 on.
    """
    given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor | dict)}
    positions, mask = given.pop("position_ids", None), given.pop("attention_mask", None)
    if any(name not in NO_INPUTS for name in given):
        return False
    columns = torch.arange(end)[None, :] - torch.from_numpy(pads)[:, None]
    return (positions is None or _equal(positions, columns[:, start:].clamp(min=0))) and (
        mask is None or _equal(mask, columns >= 0)
    )


def _equal(given: Any, expected: torch.Tensor) -> bool:
    """Whether all rows, and all axes, are as expected; False for other shapes than `[rows, columns]`."""
    if not isinstance(given, torch.Tensor) or given.shape[-1] != expected.shape[-1]:
        return False
    if given.dim() > 1 and given.shape[-2] not in (1, len(expected)):
        return False
    return given.dim() < 4 and bool((given.cpu() == expected).all())

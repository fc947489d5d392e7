"""What is asked of answers on pages: that they are transformers', and that nothing wrong is found later."""

from __future__ import annotations

from typing import Any

import torch

from kvweave.integrations.transformers import KVWeave
from tests.integrations.models import difference, greedy, plain, prompt

CLOSE = 2e-5
SIX = ("llama", "gemma3_text", "qwen3_next", "lfm2", "mamba2", "deepseek_v3")
"""Kinds of models: full attention, windows, states beside attention, convolutions, states alone, latents."""
IDS = prompt(93)
"""So long that models with states leave a point in it."""


def check(weave: KVWeave, ids: torch.Tensor = IDS, **options: Any) -> None:
    assert difference(weave.generate(ids, **greedy(**options)), plain(weave.model, ids, **options)) < CLOSE


def check_unspoilt(weave: KVWeave, ids: torch.Tensor = IDS) -> None:
    """What is found from now on is what a fresh computation gives: the same prompt, and ways to go on from it."""
    longer = torch.cat([ids[:1], prompt(9, seed=8)], dim=1)
    for each in (ids[:1], ids[:1, :-5], longer, prompt(40, seed=9)):
        check(weave, each)

"""Tiny seeded models in float32, and what transformers itself generates with them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers

from tests.oracle import tiny

GREEDY = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
NEW_TOKENS = 3

INDEX_HEADS = 16
"""So many that no two tokens score the same (zero): of equals an indexer takes any, and then nobody agrees. MiniMax-M3
has one for each head of its keys."""


VARIANTS = {
    "deepseek_v4:close": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
}
"""Beside those of `tiny`: rows of few tokens, so that short prompts have several."""


@lru_cache(maxsize=2)
def model_of(name: str) -> Any:
    few, tiny.SHRINK["index_n_heads"] = tiny.SHRINK["index_n_heads"], 2 if "minimax" in name else INDEX_HEADS
    tiny.VARIANTS.update(VARIANTS)
    try:
        config = tiny.tiny_config(name)
    finally:
        tiny.SHRINK["index_n_heads"] = few
    model_class = getattr(transformers, tiny.STAND_INS.get(name, tiny.CLASSES[name.partition(":")[0]]))
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    with torch.random.fork_rng():  # whoever samples has set the seed already
        torch.manual_seed(0)
        return model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, of which none is padding, a start or an end."""
    return torch.randint(3, 95, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(num_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
    return {**GREEDY, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens, **options}


def plain(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    """What transformers generates with its own cache."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **greedy(**{"use_cache": True, **options}))


def difference(one: Any, other: Any) -> float:
    """The largest difference of any logit, or infinity where a token differs."""
    if not torch.equal(one.sequences, other.sequences):
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))

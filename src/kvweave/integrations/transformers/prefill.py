"""Prefill: the rest of a prompt, computed in pieces that end where snapshots are wanted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from kvweave.cache import Sequence
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.integrations.transformers.support import Served
from kvweave.prefix import Retention

ANSWERS = 16
"""Tokens of an answer after which states are snapshotted, so that the next turn finds most of it."""


def retention(served: Served, unit: int = 1) -> Retention:
    """Where points to go on from are left: on the way, at multiples of `unit`, so that a store's are the same ones.

    A scan that starts afresh is cut once, at the end of the prompt.
    """
    if served.scans_afresh:
        return Retention(every=0, branches=False, decode_every=ANSWERS)
    return Retention(decode_every=ANSWERS, unit=unit)


def prefill(
    model: Any,
    served: Served,
    past: PagedCache,
    prompt: Prompt,
    most: int,
    points: SequenceOf[int] = (),
    on_point: Callable[[], object] = bool,
) -> None:
    """Compute all but the last token of a prompt, at most so many at once. `past` has one row, and hands it over.

    `on_point` is called when the row is as long as each of `points`, which are in order.
    """
    (sequence,) = past.sequences
    last = len(prompt.tokens) - 1
    ids = torch.from_numpy(prompt.tokens).to(model.device)[None, :]
    mask = torch.ones_like(ids)
    mask[:, : prompt.padding] = 0
    try:
        past.core.check_fits(last + 1)  # what can never fit is refused before any of it is computed
        while sequence.length < last:
            start = sequence.length
            piece = (1 if start else last) if served.scans_afresh else _fitting(past, sequence, min(most, last - start))
            end = min([last, start + piece, sequence.stop or last, *(point for point in points if point > start)])
            beside = {name: torch.zeros_like(ids[:, start:end]) for name in prompt.extras}
            if prompt.images and start < prompt.images.end:
                end = max(end, prompt.images.end)
                beside |= prompt.images.until(end)
            if prompt.positions is not None:
                beside["position_ids"] = prompt.positions[..., start:end]
            model(**{**_inputs(served, past, ids, mask, start, end), **beside})
            past.commit_pending()
            if end in points:
                on_point()
    finally:
        past.release_rows()


def _fitting(past: PagedCache, sequence: Sequence, most: int) -> int:
    """At most so many tokens at once: fewer, where pages are short and windows would need many for a long piece."""
    while most > 1 and not past.core.can_extend(sequence, most):
        most = -(-most // 2)
    return most


def _inputs(
    served: Served, past: PagedCache, ids: torch.Tensor, mask: torch.Tensor, start: int, end: int
) -> dict[str, Any]:
    """What `generate` would call the model with for the tokens [start, end)."""
    inputs = {"input_ids": ids[:, start:end], served.cache_name: past, "use_cache": True}
    if served.cache_name == "past_key_values":
        inputs["attention_mask"] = mask[:, :end]
    elif not bool(mask.all()):
        inputs["attention_mask"] = mask[:, start:end]
    if served.takes_positions:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
    if served.takes_logits_to_keep:
        inputs["logits_to_keep"] = 1
    return inputs

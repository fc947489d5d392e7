"""Prefill: the rest of a prompt, computed in pieces that end where snapshots are wanted.

Every piece is a forward, so the last one is left to `generate`, whose first forward takes any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.cache import Cache, Sequence
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.prompts import Prompt
from kvweave.integrations.transformers.support import Served
from kvweave.prefix import Retention

ANSWERS = 16
"""Tokens of an answer after which states are snapshotted, so that the next turn finds most of it."""

UNCUT, UNCUT_SCAN = 64, 256
"""A rest of so many tokens is one forward: a point within it would spare later prompts less than a forward costs. A
scan that starts afresh goes on from a point token by token, so there it is more."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How prompts are cut: into forwards of at most `most` tokens, of which `generate` computes the last one if it may.

    A rest of `uncut` tokens that it computes is not cut for the sake of a point.
    """

    most: int
    generate_computes_last: bool = False
    uncut: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class OpenRow:
    """A prompt, its sequence, and the lengths at which its prefill must stop (for a capture, or images), in order."""

    prompt: Prompt
    sequence: Sequence
    points: SequenceOf[int] = ()

    @property
    def left(self) -> int:
        """Tokens to compute."""
        return len(self.prompt.tokens) - self.sequence.length

    @property
    def is_plain(self) -> bool:
        """Whether only tokens are left, and the prefill need not stop on the way."""
        images, length = self.prompt.images, self.sequence.length
        return not any(point > length for point in self.points) and not (images and length < images.end)


def is_last_piece(core: Cache, served: Served, rows: SequenceOf[OpenRow], pieces: Pieces) -> bool:
    """Whether `generate` is to compute all that is left of these rows, in its first forward; at the least one token."""
    left, sequences = rows[0].left, [row.sequence for row in rows]
    if any(row.left != left or not row.is_plain for row in rows):
        return False
    if left == 1:
        return True
    if not pieces.generate_computes_last or left * len(rows) > pieces.most:
        return False
    if served.scans_afresh and any(sequence.length for sequence in sequences):
        return False
    wants_states = left > pieces.uncut and any(sequence.stop for sequence in sequences)
    return not wants_states and core.can_extend(sequences, left)


def uncut(served: Served) -> int:
    """A rest of a prompt within which no resume point is left, unless the caller names points."""
    return UNCUT_SCAN if served.scans_afresh else UNCUT


def retention(served: Served, unit: int = 1) -> Retention:
    """Where points to go on from are left: on the way, at multiples of `unit`, so that a store's are the same ones.

    A scan that starts afresh is cut once, at the end of the prompt.
    """
    if served.scans_afresh:
        return Retention(every=0, branches=False, decode_every=ANSWERS)
    return Retention(decode_every=ANSWERS, unit=unit)


def prefill(
    model: Any, served: Served, past: PagedCache, row: OpenRow, pieces: Pieces, on_point: Callable[[], object] = bool
) -> None:
    """Compute a prompt but for its last piece, or for its last token. `past` has this one row, and hands it over.

    `on_point` is called when the row is as long as each of its points.
    """
    prompt, sequence = row.prompt, row.sequence
    last = len(prompt.tokens) - 1
    ids = torch.from_numpy(prompt.tokens).to(model.device)[None, :]
    mask = torch.ones_like(ids)
    mask[:, : prompt.padding] = 0
    try:
        past.core.check_fits(last + 1)  # what can never fit is refused before any of it is computed
        while not is_last_piece(past.core, served, [row], pieces):
            start = sequence.length
            most = min(pieces.most, last - start)
            piece = (1 if start else last) if served.scans_afresh else _fitting(past, sequence, most)
            end = min([last, start + piece, sequence.stop or last, *(point for point in row.points if point > start)])
            beside = {name: torch.zeros_like(ids[:, start:end]) for name in prompt.extras}
            if prompt.images and start < prompt.images.end:
                end = max(end, prompt.images.end)
                beside |= prompt.images.until(end)
            if prompt.positions is not None:
                beside["position_ids"] = prompt.positions[..., start:end]
            model(**{**forward_inputs(served, past, ids[:, start:end], mask[:, :end]), **beside})
            past.commit_pending()
            if end in row.points:
                on_point()
    finally:
        past.release_rows()


def _fitting(past: PagedCache, sequence: Sequence, most: int) -> int:
    """At most so many tokens at once: fewer, where pages are short and windows would need many for a long piece."""
    while most > 1 and not past.core.can_extend(sequence, most):
        most = -(-most // 2)
    return most


def forward_inputs(served: Served, past: PagedCache, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """What `generate` would call the model with for new tokens `[rows, n]`; the mask is that of all tokens."""
    inputs = {"input_ids": ids, served.cache_name: past, "use_cache": True}
    if served.cache_name == "past_key_values":
        inputs["attention_mask"] = mask
    elif not bool(mask.all()):
        inputs["attention_mask"] = mask[:, -ids.shape[1] :]
    if served.takes_positions:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if served.takes_logits_to_keep:
        inputs["logits_to_keep"] = 1
    return inputs

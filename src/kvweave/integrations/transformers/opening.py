"""Opening prompts: prefixes are found in pages or in the store, the rest is computed."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvweave.cache import Sequence
from kvweave.integrations.transformers.images import Images, own_positions
from kvweave.integrations.transformers.model_changes import ModelVersion
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.prefill import OpenRow, Pieces, forward_inputs, is_last_piece, prefill
from kvweave.integrations.transformers.prompts import Prompt, Prompts
from kvweave.integrations.transformers.support import Served

log = logging.getLogger(__name__)

LEARNING_TOKENS = 9

if TYPE_CHECKING:
    from kvweave.integrations.transformers.store_sync import StoreBatch, StoreSync


@dataclass(frozen=True, slots=True, eq=False)
class Opener:
    """Opens the prompts of one model, for a thread that holds the core's lock."""

    model: Any
    served: Served
    memory: PagedMemory
    cache_class: Any
    counts_padding: bool
    store_sync: StoreSync | None

    def open(
        self,
        prompts: Prompts,
        namespace: Hashable,
        pieces: Pieces,
        extras: tuple[str, ...] = (),
        images: Images | None = None,
    ) -> PagedCache:
        """Open a sequence a row and compute what is missing, but for the last piece; all or nothing."""
        positions = (
            own_positions(self.model, prompts.ids, prompts.mask, images) if self.served.takes_positions else None
        )
        rope = self.memory.rope
        rows = prompts.rows(namespace, self.counts_padding, extras)
        longest = max(len(row.tokens) for row in rows)
        rope_range = rope.range_of(longest)
        rope.restart()
        if rope.is_there:  # such models (Phi-3) leave a cache aside that ends before the border, and their answer after
            pieces = replace(pieces, generate_computes_last=False)
        for number, row in enumerate(rows):
            own = None if positions is None else positions[..., number : number + 1, -len(row.tokens) :]
            rows[number] = replace(row, rope_range=rope_range, images=images, positions=own)
        store_batch = self.store_sync.store_batch() if self.store_sync and not images else None
        version = (
            None if store_batch else self.memory.model_changes.version()
        )  # before there are hooks of ours to be seen
        opened: list[OpenRow] = []
        try:
            with rope.with_length(longest):
                self._open_rows(rows, store_batch, version, pieces, opened)
        except BaseException:
            for each in opened:
                self.memory.core.close(each.sequence)
            raise
        sequences, left = [each.sequence for each in opened], opened[0].left
        past: PagedCache = self.cache_class(
            self.memory, sequences, prompts.width - left, store_batch, rope_range=rope_range
        )
        past.prompt_columns, past.positions = prompts.width, positions
        past.hides_tokens = any(row.padding for row in rows)
        return past

    def _open_rows(
        self,
        rows: list[Prompt],
        store_batch: StoreBatch | None,
        version: ModelVersion | None,
        pieces: Pieces,
        opened: list[OpenRow],
    ) -> None:
        """Open rows into `opened`, and compute them: one after the other where one may find what another computed."""
        core = self.memory.core
        are_apart = len({row.tokens[: core.grid].tobytes() for row in rows}) == len(rows)
        pieces_of_one = replace(pieces, generate_computes_last=pieces.generate_computes_last and len(rows) == 1)
        for together in [rows] if are_apart else [[row] for row in rows]:
            for row in together:
                opened.append(self.open_sequence(row, store_batch, version))
            if not are_apart or not is_last_piece(core, self.served, opened, pieces):
                for each in opened[-len(together) :]:
                    self._compute(each, store_batch, pieces_of_one)

    def learn_attention(self) -> None:
        """Find out which layers attend in place, by two forwards over a few tokens that no prompt can find later.

        Otherwise the first forwards of a request do, and differ from later ones in the last bits. A model that fails
        here will say so in its first request.
        """
        layers = self.memory.attention
        if self.model.training or all(len(layer.verdicts) == 2 for layer in layers):
            return
        ids = torch.arange(1, 1 + LEARNING_TOKENS, device=self.model.device)[None]
        sequence = self.memory.core.open(ids[0].cpu().numpy(), reuse=False)
        past = self.cache_class(self.memory, [sequence], 0)
        try:
            for start, end in ((0, LEARNING_TOKENS - 1), (LEARNING_TOKENS - 1, LEARNING_TOKENS)):
                mask = torch.ones_like(ids[:, :end])
                self.model(**forward_inputs(self.served, past, ids[:, start:end], mask))
        except Exception as error:
            log.debug("cannot find out how %s attends: %s", type(self.model).__name__, error)
        finally:
            past.release_rows()
            self.memory.core.close(sequence, keep=False)
            self.memory.rope.restart()

    def open_sequence(self, row: Prompt, store_batch: StoreBatch | None, version: ModelVersion | None) -> OpenRow:
        """A sequence with the longest prefix that memory or the store has; `version` counts if there is no store."""
        sequence, points = store_batch.open(row) if store_batch else (self._open_one(row, version), ())
        return OpenRow(row, sequence, points)

    def _compute(self, row: OpenRow, store_batch: StoreBatch | None, pieces: Pieces) -> None:
        sequence = row.sequence
        on_point = partial(store_batch.capture, sequence) if store_batch else bool
        past = self.cache_class(self.memory, [sequence], sequence.length, rope_range=row.prompt.rope_range)
        past.hides_tokens = row.prompt.padding > 0
        prefill(self.model, self.served, past, row, pieces, on_point)

    def _open_one(self, prompt: Prompt, version: ModelVersion | None) -> Sequence:
        """A hit is taken, unless it ends before the last image, or what is left is long and computed token by token."""
        core, namespace, images = self.memory.core, (prompt.kind, version), prompt.images
        spans = (images.span,) if images else ()
        sequence = core.open(prompt.tokens, namespace=namespace, spans=spans, branches=prompt.branches)
        left = len(prompt.tokens) - sequence.num_cached
        is_slow = self.served.scans_afresh and left > max(64, len(prompt.tokens) // 8)
        if sequence.num_cached and (is_slow or (images and sequence.num_cached < images.end)):
            core.close(sequence, keep=False)
            sequence = core.open(prompt.tokens, namespace=namespace, spans=spans, reuse=False)
        return sequence

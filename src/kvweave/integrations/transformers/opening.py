"""Opening prompts: prefixes are found in pages or in the store, the rest is computed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvweave.cache import Sequence
from kvweave.integrations.transformers.images import Images, own_positions
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.prefill import prefill
from kvweave.integrations.transformers.prompts import Prompt, Prompts
from kvweave.integrations.transformers.support import Served
from kvweave.integrations.transformers.watch import ModelVersion

if TYPE_CHECKING:
    from kvweave.integrations.transformers.store_sync import StoreSync


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
        prefill_tokens: int,
        extras: tuple[str, ...] = (),
        images: Images | None = None,
    ) -> PagedCache:
        """Open a sequence a row and compute what is missing of all but the last token; all or nothing."""
        positions = (
            own_positions(self.model, prompts.ids, prompts.mask, images) if self.served.takes_positions else None
        )
        rows, rope = prompts.rows(namespace, self.counts_padding, extras), self.memory.rope
        longest = max(len(prompt.tokens) for prompt in rows)
        rope_range = rope.range_of(longest)
        rope.restart()
        store_batch = self.store_sync.store_batch() if self.store_sync and not images else None
        version = None if store_batch else self.memory.watch.look()
        sequences: list[Sequence] = []
        try:
            with rope.with_length(longest):
                for number, row in enumerate(rows):
                    own = None if positions is None else positions[..., number : number + 1, -len(row.tokens) :]
                    prompt = replace(row, rope_range=rope_range, images=images, positions=own)
                    sequence, points = (
                        store_batch.open(prompt) if store_batch else (self._open_one(prompt, version), ())
                    )
                    sequences.append(sequence)
                    on_point = partial(store_batch.capture, sequence) if store_batch else bool
                    past = self.cache_class(self.memory, [sequence], sequence.length, rope_range=rope_range)
                    prefill(self.model, self.served, past, prompt, prefill_tokens, points, on_point)
        except BaseException:
            for sequence in sequences:
                self.memory.core.close(sequence)
            raise
        opened: PagedCache = self.cache_class(
            self.memory, sequences, prompts.width - 1, store_batch, rope_range=rope_range
        )
        opened.expects_prompts, opened.positions = True, positions
        return opened

    def _open_one(self, prompt: Prompt, version: ModelVersion | None) -> Sequence:
        """A hit is taken, unless it ends before the last image, or what is left is long and computed token by token."""
        core, namespace, images = self.memory.core, (prompt.kind, version), prompt.images
        spans = (images.span,) if images else ()
        sequence = core.open(prompt.tokens, namespace=namespace, spans=spans)
        left = len(prompt.tokens) - sequence.num_cached
        is_slow = self.served.scans_afresh and left > max(64, len(prompt.tokens) // 8)
        if sequence.num_cached and (is_slow or (images and sequence.num_cached < images.end)):
            core.close(sequence, keep=False)
            sequence = core.open(prompt.tokens, namespace=namespace, spans=spans, reuse=False)
        return sequence

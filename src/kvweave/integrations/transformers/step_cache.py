"""Caches for single forwards of an engine, which has allocated the pages and commits them itself.

stacked   one token, or a chunk, of each row: rows are aligned on the right, as `generate` pads them
packed    any tokens of any sequences, one after the other in one row: attention in place tells them apart
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from kvweave.attention import Step, make_step
from kvweave.cache import Cache, Sequence
from kvweave.integrations.transformers.batch_step import BatchStep
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_memory import PagedMemory


class StepCache(PagedCache):
    """Rows of `lengths` tokens, with pages for those of the next forward. At the end of the context the states are in
    their pages.

    Tokens that are packed in one row are of sequences of different lengths. `lengths_before` `[tokens]`, if there are
    any, are what such a cache says when a model asks for its length: a token's position, less its place in the row.
    """

    lengths_before: torch.Tensor | None = None

    def __init__(self, memory: PagedMemory, sequences: SequenceOf[Sequence], lengths: SequenceOf[int]) -> None:
        super().__init__(memory, sequences, max(lengths), lengths=lengths)

    def _advance(self, tokens: torch.Tensor) -> None:
        self._step = self._step_to(self.columns + tokens.shape[1])

    def length_after(self, step: object) -> Any:
        if self.lengths_before is None:
            return super().length_after(step)
        return self.lengths_before + (self._step.num_tokens if step is self._step else 0)

    def commit_pending(self) -> None:
        """Nothing to do: the engine commits."""

    def close(self) -> None:
        """Write the states back, and leave the rows to the engine."""
        self.fail()
        self._write_back()
        self.release_rows()


def step_cache_class(paged_class: Any) -> Any:
    """The class for models whose paged cache is of this class."""
    return StepCache if paged_class is PagedCache else type(paged_class.__name__, (StepCache, paged_class), {})


def lengths_before(positions: torch.Tensor) -> torch.Tensor:
    """Of packed tokens `[tokens]` at these positions."""
    return positions - torch.arange(len(positions), device=positions.device)


class PackedStep(BatchStep):
    """The last tokens of sequences, packed; where they are is asked of the core."""

    can_gather = False

    def __init__(self, core: Cache, sequences: SequenceOf[Sequence], counts: SequenceOf[int], device: Any) -> None:
        self.core, self.sequences, self.counts, self.device = core, sequences, counts, device
        self.start, self.end = 0, sum(counts)

    def packed(self) -> Step:
        return make_step(self.core, self.sequences, self.counts, self.device)


class PackedCache(StepCache):
    """The last `counts` tokens of sequences in one row `[1, tokens]`: all layers must attend in place."""

    def __init__(
        self,
        memory: PagedMemory,
        sequences: SequenceOf[Sequence],
        lengths: SequenceOf[int],
        counts: SequenceOf[int],
    ) -> None:
        super().__init__(memory, sequences, lengths)
        self._counts = counts

    def _advance(self, tokens: torch.Tensor) -> None:  # noqa: ARG002
        self._step = PackedStep(self.core, self.sequences, self._counts, self.arena.memory.device)

    def _see_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Positions of packed tokens are the engine's."""

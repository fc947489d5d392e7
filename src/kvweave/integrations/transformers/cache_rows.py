"""The rows of a paged cache: sequences of the core, which are forked, reordered and truncated as transformers asks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from transformers.cache_utils import Cache as TransformersCache

from kvweave.cache import Batch, Copies, Sequence
from kvweave.errors import BadSequence
from kvweave.integrations.transformers.batch_step import BatchStep, Numbers
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.tensor import carry_out


class CacheRows(TransformersCache):  # type: ignore[misc]
    """Rows aligned on the right: row i has `columns - pads[i]` tokens. If the cache is garbage-collected, its rows
    are closed."""

    def __init__(
        self,
        memory: PagedMemory,
        sequences: SequenceOf[Sequence],
        columns: int,
        lengths: SequenceOf[int] | None = None,
    ) -> None:
        self.memory, self.core, self.arena = memory, memory.core, memory.arena
        self.sequences = list(sequences)
        weakref.finalize(self, memory.core_lock.drop, self.sequences).atexit = False
        self.columns = columns
        self.num_cached = sum(sequence.num_cached for sequence in sequences)
        self._batch = Batch(self.sequences)
        lengths = [sequence.length for sequence in sequences] if lengths is None else lengths
        self._pads: Numbers = columns - np.array(lengths, np.int64)
        self._step = self._step_to(columns)
        layers = [make(self) for make in memory.make_layers]
        # called by name: a model's own cache class may come first in the order of bases
        TransformersCache.__init__(self, layers=layers)
        self._states = [layer for layer in self.layers if getattr(layer, "states", None)]

    def _step_to(self, end: int) -> BatchStep:
        return BatchStep(self.core, self._batch.rows, self._pads, self.columns, end, self.arena.memory.device)

    def _carry_out(self, copies: Copies) -> None:
        if copies:
            self._write_back()
            carry_out(self.arena, copies)

    def commit_pending(self) -> None:
        """Commit what was computed."""
        raise NotImplementedError

    def _write_back(self) -> None:
        for layer in self._states:
            for state in layer.states:
                state.write_back()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row: for beams, or for several answers."""
        if repeats < 2:
            raise BadSequence(f"{len(self.sequences)} rows cannot be {repeats} times as many")
        with self.memory.core_lock:
            twins = self._forked(repeats - 1)
            rows = zip(self.sequences, *(twins[n :: repeats - 1] for n in range(repeats - 1)), strict=True)
            self.sequences[:] = [row for same in rows for row in same]
            self._regroup(np.repeat(self._pads, repeats))

    def _forked(self, count: int = 1) -> list[Sequence]:
        """Fork each row `count` times, forks of a row side by side; all or nothing."""
        self.commit_pending()
        self._write_back()
        twins: list[Sequence] = []
        try:
            for sequence in self.sequences:
                new, copies = self.core.fork(sequence, count)
                twins += new
                carry_out(self.arena, copies)
        except BaseException:
            for twin in twins:
                self.core.close(twin, keep=False)
            raise
        return twins

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues from the state of row `beam_idx[i]`."""
        parents = beam_idx.tolist()
        with self.memory.core_lock:
            self.commit_pending()
            self._write_back()
            carry_out(self.arena, self.core.reorder(self.sequences, parents))
            self._regroup(self._pads[parents])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only, in this order."""
        chosen = np.arange(len(self.sequences))[indices.cpu().numpy()].tolist()
        with self.memory.core_lock:
            self._write_back()
            for number in set(range(len(self.sequences))) - set(chosen):
                self.core.close(self.sequences[number])
            self.sequences[:] = [self.sequences[number] for number in chosen]
            self._regroup(self._pads[chosen])

    def _regroup(self, pads: Numbers) -> None:
        self._batch, self._pads = Batch(self.sequences), pads
        self._step = self._step_to(self._step.end)
        for layer in self._states:
            for state in layer.states:
                state.unbind()

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove the last tokens; the count is negative, and may be a tensor on the model's device, as in
        transformers."""
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes how many tokens to remove, as a negative count; not {tokens_to_remove}")
        if tokens_to_remove:
            with self.memory.core_lock:
                for sequence in self.sequences:
                    carry_out(self.arena, self.core.truncate(sequence, sequence.length + tokens_to_remove))
                self.columns += tokens_to_remove
                self._step = self._step_to(self.columns)

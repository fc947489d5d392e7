"""The past of a batch, as transformers knows it: a `Cache` whose rows are sequences of ours.

begin     the model is called with new tokens: the last step is committed, room is made for these
update    each layer writes its rows and reads those it needs
finish    the model has returned: the tokens are there, but may still be taken back (`crop`)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache as TransformersCache

from kvweave.cache import Batch, Cache, Copies, Sequence
from kvweave.errors import BadSequence, BadTokens
from kvweave.integrations.transformers.step import Numbers, Step
from kvweave.tensor import Arena, carry_out

MakeLayer = Callable[["Past"], Any]


class Visit(Protocol):
    """What a past tells of its rows: which of them have come to where they are worth a copy, and before they end."""

    num_loaded: int
    save_seconds: float

    def due(self, sequences: SequenceOf[Sequence]) -> list[Sequence]: ...
    def capture_answers(self, due: SequenceOf[Sequence], num_rows: int) -> None: ...
    def save(self, sequences: SequenceOf[Sequence]) -> None: ...


class Past(TransformersCache):  # type: ignore[misc]
    """What the rows of a batch have computed. Give it to `generate` or to the model as `past_key_values`.

    Rows are aligned on the right: row i has `columns - pads[i]` tokens. It is a context: at its end the rows are
    closed, and what they committed stays for others to find.
    """

    is_compileable = False

    def __init__(
        self,
        core: Cache,
        arena: Arena,
        make_layers: SequenceOf[MakeLayer],
        sequences: SequenceOf[Sequence],
        columns: int,
        visit: Visit | None = None,
    ) -> None:
        self.core, self.arena = core, arena
        self.sequences = list(sequences)
        self.columns = columns
        self.visit = visit
        self._batch = Batch(self.sequences)
        self._pads: Numbers = np.array([columns - sequence.length for sequence in sequences], np.int64)
        self.num_cached = sum(sequence.num_cached for sequence in sequences)
        self.first_token_at: float | None = None
        self.expects_prompts = False
        self.is_computing = False
        self._uncommitted = False
        self.step = self._step(columns)
        TransformersCache.__init__(self, layers=[make(self) for make in make_layers])  # also beside a model's own class
        self._states = [layer for layer in self.layers if getattr(layer, "states", None)]

    # ---- a step

    def begin(self, tokens: torch.Tensor) -> None:
        """The model is about to compute `tokens`, `[batch, n]`; more rows than there are, are beams of each."""
        self.settle()
        if len(tokens) != len(self.sequences):
            self.batch_repeat_interleave(len(tokens) // max(1, len(self.sequences)))
        self._extend(tokens.cpu().numpy())
        self.step = self._step(self.columns + tokens.shape[1])
        self._bind()
        self.is_computing = True

    def _extend(self, tokens: Numbers) -> None:
        """Room for the tokens. Those of the prompt are known to the core, and must be these."""
        known = min(*(s.num_tokens - s.length for s in self.sequences), tokens.shape[1])
        for sequence, row in zip(self.sequences, tokens, strict=True):
            if known and not np.array_equal(sequence.run(sequence.length, sequence.length + known), row[:known]):
                raise BadTokens("these are not the tokens that this past was opened for: open another one")
        if known:
            self._carry_out(self.core.extend(self._batch, known))
        if known < tokens.shape[1]:
            self._carry_out(self.core.extend(self._batch, tokens.shape[1] - known, tokens=tokens[:, known:]))

    def _step(self, end: int) -> Step:
        return Step(self.core, self._batch.rows, self._pads, self.columns, end, self.arena.memory.device)

    def _bind(self) -> None:
        if self._states:
            live = {group.tag: self.step.live(group.tag) for group in self.core.plan.groups if not _per_token(group)}
            fresh = np.flatnonzero(self.columns == self._pads).tolist()
            for layer in self._states:
                layer.bind(live, fresh, self.columns > 0)

    def finish(self) -> None:
        """The model has computed the step."""
        self.columns = self.step.end
        self.is_computing = self.expects_prompts = False
        self._uncommitted = True
        if self.first_token_at is None:
            if self.arena.memory.device.type == "cuda":
                torch.cuda.synchronize()
            self.first_token_at = time.perf_counter()

    def settle(self) -> None:
        """What was computed is true, and nobody takes it back: others may find it."""
        if self._uncommitted:
            self._uncommitted = False
            self._carry_out(self.core.commit(self._batch))
            if self.visit and (due := self.visit.due(self.sequences)):
                self._write_back()
                self.visit.capture_answers(due, len(self.sequences))

    def _carry_out(self, copies: Copies) -> None:
        if copies:
            self._write_back()
            carry_out(self.arena, copies)

    def _write_back(self) -> None:
        for layer in self._states:
            for state in layer.states:
                state.write_back()

    # ---- rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes so many: beams, or several answers."""
        if repeats < 2:
            raise BadSequence(f"{len(self.sequences)} rows cannot be {repeats} times as many")
        self.settle()
        self._write_back()
        rows = []
        for sequence in self.sequences:
            twins, copies = self.core.fork(sequence, repeats - 1)
            carry_out(self.arena, copies)
            rows += [sequence, *twins]
        self.sequences = rows
        self._regroup(np.repeat(self._pads, repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on as row `beam_idx[i]` was."""
        parents = beam_idx.tolist()
        self.settle()
        self._write_back()
        carry_out(self.arena, self.core.reorder(self.sequences, parents))
        self._regroup(self._pads[parents])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows go on."""
        chosen = np.arange(len(self.sequences))[indices.cpu().numpy()].tolist()
        self._write_back()
        for number in set(range(len(self.sequences))) - set(chosen):
            self.core.close(self.sequences[number])
        self.sequences = [self.sequences[number] for number in chosen]
        self._regroup(self._pads[chosen])

    def _regroup(self, pads: Numbers) -> None:
        self._batch, self._pads = Batch(self.sequences), pads
        self.step = self._step(self.step.end)
        for layer in self._states:
            for state in layer.states:
                state.let_go()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; a negative count, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes back {tokens_to_remove} tokens by a negative count only")
        if tokens_to_remove:
            for sequence in self.sequences:
                carry_out(self.arena, self.core.truncate(sequence, sequence.length + tokens_to_remove))
            self.columns += tokens_to_remove
            self.step = self._step(self.columns)

    # ---- answers to transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.is_computing and hasattr(self.layers[layer_idx], "get_seq_length"):
            length: int = self.layers[layer_idx].get_seq_length()
            return length
        return self.columns

    def activate_past_recording(self) -> None:
        """Nothing to do: what was computed is committed with the next step only, so it can be taken back until then."""

    @property
    def batch_size(self) -> int:
        return len(self.sequences)

    @property
    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        raise BadSequence("a past is not emptied: close it, and open another")

    # ---- the end

    @property
    def is_open(self) -> bool:
        return bool(self.sequences)

    def close(self) -> None:
        """Let go of the rows; what was computed and not taken back stays in the tree. Twice is once."""
        if not self.is_computing:
            self.settle()
        self._write_back()
        try:
            if self.visit and not self.is_computing:
                self.visit.save(self.sequences)
        finally:
            while self.sequences:
                self.core.close(self.sequences.pop())

    def __enter__(self) -> Past:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _per_token(group: Any) -> bool:
    return bool(group.cache.reach.per_token)

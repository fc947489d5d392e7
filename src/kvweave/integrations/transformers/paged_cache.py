"""The cache of a batch on pages: a transformers `Cache` whose rows are sequences of the core.

begin     the model is called with new tokens: the last step is committed, pages are allocated for these
update    each layer writes its rows and reads those it needs
finish    the model has returned: the rows are written, and may still be removed (`crop`)
fail      the model has raised: the rows of the step are invalid, and the cache cannot be used any more
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.cache import Sequence
from kvweave.errors import BadCall, BadSequence, BadTokens
from kvweave.integrations.transformers.batch_step import BatchStep, Numbers
from kvweave.integrations.transformers.cache_rows import CacheRows
from kvweave.integrations.transformers.inputs import are_default
from kvweave.integrations.transformers.model_changes import ModelVersion, autocast_dtype
from kvweave.integrations.transformers.paged_forward import PagedForward, set_running
from kvweave.integrations.transformers.paged_memory import PagedMemory, RowSaver
from kvweave.integrations.transformers.rope import Range


class PagedCache(CacheRows):
    """The KV of a batch. Pass it to `generate` or to the model as `past_key_values`.

    Rows are aligned on the right: row i has `columns - pads[i]` tokens. Use it as a context: at its end the rows are
    closed, and what they committed stays for other prompts to find.
    """

    is_compileable = False

    def __init__(
        self,
        memory: PagedMemory,
        sequences: SequenceOf[Sequence],
        columns: int,
        store_batch: RowSaver | None = None,
        *,
        rope_range: Range = (),
        made_for: ModelVersion | None = None,
        lengths: SequenceOf[int] | None = None,
    ) -> None:
        """`made_for` is the version of the model that computed the rows, if it is to be checked at every call.
        `lengths` are those of the sequences, where pages for more are allocated already."""
        super().__init__(memory, sequences, columns, lengths)
        self.store_batch = store_batch
        self.made_for = made_for
        self._rope_range = rope_range
        self.first_token_at: float | None = None
        self.prompt_columns = 0
        """Columns of the prompts, until the first step: some ways to generate begin with all of them."""
        self.positions: torch.Tensor | None = None
        """The positions of the prompts, for models that compute them themselves."""
        self.computed_by: object = None
        """The module whose forward is running with this cache."""
        self.forward: PagedForward | None = None
        """That forward, if its attention may read pages in place."""
        self._forward_before: PagedForward | None = None
        self.step_ids: Numbers = np.zeros((0, 0), np.int64)
        """The tokens that are being computed, `[batch, n]`."""
        self.hides_tokens = False
        """Whether tokens are kept that masks hide: padding, of models whose positions count it."""
        self._had_gradients = False
        self._has_failed = self._uncommitted = False
        self._is_shared = self._is_default = True
        """Whether the rows hold what any prompt with these tokens would compute, so that they can be shared."""

    # ---- a step

    def begin(self, inputs: Mapping[str, Any], module: object) -> None:
        """`module` is about to compute `input_ids`, `[batch, n]`. If they have more rows than the cache, each row is
        repeated (beams).

        Until `finish` or `fail` the calling thread holds the core's lock, without gradients. On error nothing has
        begun.
        """
        if not self.is_open or self._has_failed:
            why = "a call of the model with this cache has failed" if self._has_failed else "this cache is closed"
            raise BadSequence(
                f"{why}: open another, or pass all tokens to generate without a cache: pages are found by tokens"
            )
        tokens: torch.Tensor = inputs["input_ids"]
        self.memory.core_lock.__enter__()
        length = self.sequences[0].length
        try:
            self._check_model()
            self._advance(tokens)
            self._bind()
        except BaseException:
            self._has_failed = self.sequences[0].length != length
            self.memory.core_lock.__exit__(None, None, None)
            raise
        self._enter(inputs, module)

    def _enter(self, inputs: Mapping[str, Any], module: object) -> None:
        self.computed_by = module
        self._had_gradients = torch.is_grad_enabled()
        if self._had_gradients:
            torch.set_grad_enabled(False)
        self._see_inputs(inputs)
        self._set_forward(inputs, module)

    def _advance(self, tokens: torch.Tensor) -> None:
        """Make room for the tokens of a call, and make them the step."""
        self.commit_pending()
        if len(tokens) != len(self.sequences):
            self.batch_repeat_interleave(len(tokens) // max(1, len(self.sequences)))
        self.step_ids = tokens.numpy(force=True)
        self._extend(self.step_ids)
        self._step = self._step_to(self.columns + tokens.shape[1])

    def _check_model(self) -> None:
        if self.made_for is not None and self.made_for != self.memory.model_changes.version():
            raise BadCall(
                "the model has changed since this cache was opened (weights, adapters, config or training): close it"
                " and open another"
            )

    def _see_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Stop sharing at the first step whose result depends on more than its tokens.

        That is a step with other rotary frequencies than the prompt's, or a call with a mask or positions of the user's
        own.
        """
        rope, step = self.memory.rope, self._step
        if rope.is_there:
            longest = rope.forced_length or step.end - int(self._pads.min())
            self._is_shared &= rope.range_of(longest) == self._rope_range
        self._is_default = self.made_for is None or are_default(inputs, self._pads, step.start, step.end)
        self._is_shared &= self._is_default

    def _set_forward(self, inputs: Mapping[str, Any], module: Any) -> None:
        """Let attention read pages in place, if the call asks for nothing that only the model's own gives."""
        memory, asked = self.memory, inputs.get("output_attentions")
        asks_weights = memory.model_changes.config.output_attentions if asked is None else asked
        if not self._is_default or self.hides_tokens or asks_weights or module.training:
            return
        if autocast_dtype(memory.device_type):  # it would round where we do not
            return
        step = self._step
        expands = step.can_gather and memory.expands(step.num_tokens)
        forward = PagedForward(memory.attention, step.packed, step.num_tokens == 1, expands)
        if forward.is_useful or not memory.keeps_tokens:
            memory.switched.enter()
            self.forward, self._forward_before = forward, set_running(forward)
            if memory.device_type == "cpu":
                forward.prepare()  # here it is faster than between two layers, when weights fill the CPU's caches

    def _extend(self, tokens: Numbers) -> None:
        """Allocate pages for the tokens. Those of the prompt are known to the core, and must be the same.

        They are one step of the core, too: at the end of a step there is a state to keep.
        """
        count, ids = tokens.shape[1], None
        known = min(*(s.num_prompt - s.length for s in self.sequences), count)
        if known > 0:
            self._check_prompts(tokens[:, :known])
        if known < count:
            ids = tokens.astype(np.int32)
            if known > 0:
                ids[:, :known] = [s.run(s.length, s.length + known) for s in self.sequences]
        self._carry_out(self.core.extend(self._batch, count, tokens=None if ids is None else ids.ravel()))

    def is_repeated_by(self, ids: torch.Tensor) -> bool:
        """Whether a first call has the whole prompts, as some generation modes make it, and not what follows here."""
        if not 0 < self.prompt_columns <= ids.shape[1]:
            return False
        held = ids[:, : self.columns].numpy(force=True)
        repeats = max(1, len(ids) // len(self.sequences))
        rows = zip(held[::repeats], self.sequences, self._pads.tolist(), strict=False)
        return all(_are_same(sequence.tokens[: len(row) - pad], row[pad:]) for row, sequence, pad in rows)

    def _check_prompts(self, tokens: Numbers) -> None:
        for sequence, row in zip(self.sequences, tokens, strict=True):
            if not _are_same(sequence.run(sequence.length, sequence.length + len(row)), row):
                raise BadTokens("these are not the tokens that this cache was opened for: open another one")

    @property
    def step(self) -> BatchStep:
        """The step that is being computed."""
        if self.computed_by is None:
            raise BadCall(
                "a cache of kvweave was used where its hooks do not run: call the model that KVWeave was made for, as"
                " model(...), not model.forward(...), an inner model, or one whose KVWeave is closed"
            )
        return self._step

    def length_after(self, step: object) -> Any:
        """Number of columns, for a layer whose last written step is `step`."""
        return self._step.end if step is self._step else self.columns

    def _bind(self) -> None:
        if self._states:
            live = {tag: self._step.live(tag) for tag in self.memory.state_tags}
            fresh = [row for row, pad in enumerate(self._pads.tolist()) if pad == self.columns]
            for layer in self._states:
                layer.bind(live, fresh, self.columns > 0)

    @property
    def reads_in_place(self) -> bool:
        """Whether all layers of the forward that runs attend in place, at positions that follow from their lengths."""
        forward = self.forward
        if not self.memory.keeps_tokens:
            return self._is_default
        return forward is not None and not forward.is_learning and not forward.needs_masks and self.positions is None

    @contextmanager
    def computed_elsewhere(self) -> Iterator[None]:
        """Within this context the step is computed on the pages by other code (a captured graph), for all layers."""
        self._write_back()
        yield
        for layer in self._states:
            for state in layer.states:
                state.unbind()
        for layer in self.layers:
            if getattr(layer, "kept", None) is not None:
                layer.written = self._step

    def finish(self) -> None:
        """The model has computed the step."""
        unwritten = [number for number, layer in enumerate(self.layers) if not _has_written(layer, self._step)]
        if unwritten:
            self.fail()
            raise BadCall(f"the model has skipped layers {unwritten}: a paged cache needs the rows of every layer")
        if self.forward and self.forward.unread:
            layers = sorted({layer.view.layer for layer in self.forward.unread})
            self.fail()
            raise BadCall(
                f"layers {layers} did not attend to their pages: the model's attention was replaced after this KVWeave"
                " was made; close it and make another"
            )
        if self.forward:
            self.forward.conclude()
        self.columns = self._step.end
        self.prompt_columns = 0
        self._uncommitted = True
        self._leave()
        if self.first_token_at is None:
            if self.memory.device_type == "cuda":
                torch.cuda.synchronize()
            self.first_token_at = time.perf_counter()

    def fail(self) -> None:
        """The model did not compute the step that it began; does nothing if none was begun."""
        if self.computed_by is not None:
            self._has_failed = True
            self._leave()

    def _leave(self) -> None:
        self.computed_by = None
        if self.forward:
            self.forward = None
            set_running(self._forward_before)
            self.memory.switched.leave()
        if self._had_gradients:
            torch.set_grad_enabled(True)
        self.memory.core_lock.__exit__(None, None, None)

    def commit_pending(self) -> None:
        """Commit what was computed, since no `crop` can remove it any more; other prompts may find it, if it is
        shared."""
        if self._uncommitted:
            self._uncommitted = False
            self._carry_out(self.core.commit(self._batch, share=self._is_shared))
            if self._is_shared and self.store_batch and (due := self.store_batch.due(self.sequences)):
                self._write_back()
                self.store_batch.capture_answers(due, len(self.sequences))

    # ---- states, which models find here

    def get_conv_state(self, *which: Any, **named: Any) -> Any:
        assert self.step, "there is one, or an error"
        return super().get_conv_state(*which, **named)

    def get_recurrent_state(self, *which: Any, **named: Any) -> Any:
        assert self.step, "there is one, or an error"
        return super().get_recurrent_state(*which, **named)

    # ---- answers to transformers

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        if self.computed_by is not None and hasattr(self.layers[layer_idx], "get_seq_length"):
            return self.layers[layer_idx].get_seq_length()
        return self.columns

    def activate_past_recording(self) -> None:
        """Nothing to do: a step is committed when the next one begins, so it can be removed until then."""

    @property
    def batch_size(self) -> int:
        return len(self.sequences)

    @property
    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        raise BadSequence("a paged cache cannot be reset: close it, and open another")

    # ---- the end

    @property
    def is_open(self) -> bool:
        return bool(self.sequences)

    def close(self) -> None:
        """Close the rows; what they committed stays in the prefix tree. Calling it twice is fine."""
        self.fail()
        with self.memory.core_lock:
            try:
                if not self._has_failed:
                    self.commit_pending()
                self._write_back()
                if self.store_batch and not self._has_failed:
                    self.store_batch.save(self.sequences)
            finally:
                while self.sequences:
                    self.core.close(self.sequences.pop())

    def __deepcopy__(self, _memo: object) -> PagedCache:
        """A fork of all rows, to be closed separately; pages are shared until they differ."""
        if self.computed_by is not None or not self.is_open:
            raise BadCall("a paged cache can be copied only while it is open and no forward runs with it")
        with self.memory.core_lock:
            twin = type(self)(self.memory, self._forked(), self.columns, self.store_batch, rope_range=self._rope_range)
        twin.made_for, twin.prompt_columns = self.made_for, self.prompt_columns
        twin._has_failed, twin._uncommitted, twin._is_shared = self._has_failed, self._uncommitted, self._is_shared
        return twin

    def __reduce__(self) -> Any:
        raise BadCall(
            "a paged cache belongs to its process and cannot be pickled: keep its tokens, by which pages are found"
        )

    def release_rows(self) -> None:
        """Give up the rows without closing them: another cache has them."""
        self.fail()
        self.sequences.clear()

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _are_same(known: NDArray[Any], tokens: Numbers) -> bool:
    return bool(np.all((known == tokens) | (known < 0)))  # numbers below 0 stand for images


def _has_written(layer: Any, step: BatchStep) -> bool:
    """Whether a layer that stores keys and values has written those of a step."""
    return getattr(layer, "kept", None) is None or layer.written is step

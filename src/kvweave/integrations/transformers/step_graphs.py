"""Forwards as graphs: on a GPU a step of few tokens is a replay of kernels that were captured once for its size.

A model is run so if it was seen to give the same logits for a step at fixed addresses, with a cache that does not know
its length; or that tells it as a tensor, of each token (Llama 4 scales its queries by it). One that cannot be captured
(its forward waits for the device) is run as before, and a warning says so.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from kvweave.attention import FixedStep, StepBuffers, StepSize
from kvweave.cache import Cache, Sequence
from kvweave.errors import OutOfPages
from kvweave.integrations.transformers.build_layers import counts_padding
from kvweave.integrations.transformers.compiled_layers import CompiledLayers
from kvweave.integrations.transformers.fixed_cache import FixedCache
from kvweave.integrations.transformers.model_changes import ModelVersion
from kvweave.integrations.transformers.opening import LEARNING_TOKENS
from kvweave.integrations.transformers.paged_cache import PagedCache
from kvweave.integrations.transformers.paged_forward import CLOSE
from kvweave.integrations.transformers.paged_memory import PagedMemory
from kvweave.integrations.transformers.prefill import forward_inputs
from kvweave.integrations.transformers.step_cache import lengths_before
from kvweave.integrations.transformers.support import Served
from kvweave.tensor import carry_out

log = logging.getLogger(__name__)

DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of decodes that graphs are captured for: a step is padded to the next of them."""
CHUNKS = (16, 64, 256)
"""Tokens of steps with chunks of prompts that graphs are captured for; larger ones are run uncaptured."""


class StepGraphs:
    """Runs steps of one model, in which every row has a past or is a first chunk. Used by the thread that holds the
    core's lock."""

    def __init__(
        self,
        model: Any,
        served: Served,
        memory: PagedMemory,
        is_wanted: bool = True,
        compiles: bool = False,
    ) -> None:
        self._model, self._served, self._memory = model, served, memory
        self._captures, self._is_refused = model.device.type == "cuda", False
        self._buffers: StepBuffers | None = None
        self._captured: dict[StepSize, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._is_wanted = is_wanted
        self._can_follow: bool | None = None
        """Whether what a forward computes follows from ids, positions and pages; None until that was found out."""
        self.tells_lengths = False
        """Whether that is so only if its cache tells lengths as a tensor, for which tokens are packed in one row."""
        self._states_stay = False
        """Whether the model's states are updated in their pages, by functions of ours."""
        self.is_useful = False
        self._layers = CompiledLayers(model) if is_wanted and compiles and self._could_be() else nullcontext()

    def _could_be(self) -> bool:
        """Whether what a forward computes could follow from ids, positions and pages alone."""
        served, in_place = self._served, self._memory.attends_in_place
        return in_place and served.own_cache is None and not counts_padding(served) and not self._memory.rope.is_there

    # ---- which steps

    def size_of(self, counts: SequenceOf[int], lengths: SequenceOf[int]) -> StepSize | None:
        """The size that a step of so many tokens a row is padded to, which come after `lengths` others; None if there
        is no graph for it. States begin as zeros, which no graph makes."""
        rows, tokens = len(counts), sum(counts)
        if not self.is_useful or (self._served.has_states and not all(lengths)):
            return None
        if rows == tokens:
            rows = _next(DECODES, rows)
            return StepSize(rows, rows) if rows else None
        tokens = _next(CHUNKS, tokens + 1)
        if self._served.has_states or not tokens:
            return None
        rows = 2 if rows == 1 else _next(DECODES, rows + 1)
        return StepSize(tokens, rows) if 0 < rows < tokens else None

    def learn(self) -> bool:
        """Find out whether a step at fixed addresses gives the logits of forwards of transformers, and return it; for a
        thread that holds the core's lock. Found out once, by prompts of a few tokens that no other prompt can find."""
        if self._can_follow is None and self._could_be():
            try:
                self._can_follow = self._follows()
            except (OutOfPages, torch.OutOfMemoryError):  # next time
                return False
            if self._is_wanted:
                self._memory.model_changes.on_change = self.follow
                self.follow(self._memory.model_changes.version())
            else:
                self._buffers = None
        return bool(self._can_follow) and self._memory.attends_in_place

    @property
    def needs_its_length(self) -> bool:
        """Whether the model is known to need more than ids, positions and pages: the length of its cache, perhaps."""
        return self._can_follow is False

    def _follows(self) -> bool:
        ways = ("states stay", "plain") if self._served.has_states else ("plain", "tells lengths")
        for way in ways:
            self.tells_lengths, self._states_stay = way == "tells lengths", way == "states stay"
            try:
                expected = self._learning_logits(False)
                found = self._learning_logits(True)
                allowed = CLOSE.get(expected.dtype, 0.0) * float(expected.abs().max())
                if float((found - expected).abs().max()) <= allowed:
                    return True
            except (OutOfPages, torch.OutOfMemoryError):
                raise
            except Exception as error:  # it will say so in its first request
                log.debug("%s at fixed addresses, %s: %s", type(self._model).__name__, way, error)
        return False

    def follow(self, version: ModelVersion) -> None:
        """The model is of another version: its tensors may be others than those that were captured. With hooks of the
        user's own, which a replay would not call, in training and under autocast no graph serves."""
        self._captured.clear()
        is_plain = not (version.hooks or version.is_training or version.autocast) and self._memory.attends_in_place
        self.is_useful = bool(self._can_follow) and is_plain and not self._is_refused

    def close(self) -> None:
        """Drop the graphs; nothing is computed by them any more."""
        self._captured.clear()
        self._buffers, self._can_follow, self.is_useful = None, False, False

    def _learning_logits(self, at_fixed_addresses: bool) -> torch.Tensor:
        """The logits after all tokens of some prompts, the last two computed one by one; or those of all prompts at
        once, at fixed addresses."""
        core, prompts = self._memory.core, [np.arange(1, 1 + LEARNING_TOKENS), np.arange(3, LEARNING_TOKENS)]
        sequences = [core.open(ids, reuse=False) for ids in prompts]
        pasts = [PagedCache(self._memory, [sequence], 0) for sequence in sequences]
        try:
            logits = torch.cat(
                [self._last_logits(*each, at_fixed_addresses) for each in zip(pasts, prompts, strict=True)]
            )
            for back in (2, 1) if at_fixed_addresses else ():
                carry_out(self._memory.arena, core.extend(sequences, 1))
                size = StepSize(len(prompts), len(prompts))
                ids = np.array([prompt[-back] for prompt in prompts])
                self._fitting_buffers().load(sequences, [1] * len(prompts), ids, size)
                logits = self._forward(size)
                carry_out(self._memory.arena, core.commit(sequences))
            return logits
        finally:
            for past, sequence in zip(pasts, sequences, strict=True):
                past.release_rows()
                core.close(sequence, keep=False)

    def _last_logits(self, past: PagedCache, ids: np.ndarray, stops_before: bool) -> torch.Tensor:
        """Compute a prompt, its last two tokens one by one, or not at all if it `stops_before`: the last logits."""
        there, count = torch.from_numpy(ids).to(self._model.device)[None], len(ids)
        for start, end in ((0, count - 2), (count - 2, count - 1), (count - 1, count))[: 1 if stops_before else 3]:
            inputs = forward_inputs(self._served, past, there[:, start:end], torch.ones_like(there[:, :end]))
            logits: torch.Tensor = self._model(**inputs).logits[0, -1:]
        past.commit_pending()
        return logits

    # ---- a step

    @torch.no_grad()
    def run(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], ids: np.ndarray, size: StepSize
    ) -> torch.Tensor:
        """The logits `[rows, vocabulary]` after each row's last token. A copy: the memory of a graph's results may be
        used by graphs that were captured before it."""
        buffers = self._fitting_buffers()
        buffers.load(sequences, counts, ids, size)
        return self.replay(size)[: len(sequences)].clone()

    def note_tokens(self, sequences: SequenceOf[Sequence], tokens: torch.Tensor) -> None:
        """The next token of each sequence, on the device: steps may have `UNKNOWN_ID` in its place."""
        self._fitting_buffers().note_tokens(sequences, tokens)

    def _fitting_buffers(self) -> StepBuffers:
        if self._buffers is None or self._buffers.are_outgrown:
            self._captured.clear()
            longest = longest_sequence(self._memory.core)
            device = self._memory.arena.memory.device
            self._buffers = StepBuffers(self._memory.core, device, max(*CHUNKS, *DECODES), max(DECODES), longest)
        return self._buffers

    def replay(self, size: StepSize) -> torch.Tensor:
        """Compute the step that is loaded."""
        if self._captures and size not in self._captured:
            try:
                self._captured[size] = self._capture(size)
            except RuntimeError as error:
                log.warning(
                    "%s is computed without graphs, its forward cannot be captured: %s",
                    type(self._model).__name__,
                    str(error).partition("\n")[0],
                )
                self._captures, self._is_refused, self.is_useful = False, True, False
        if not self._captures:
            return self._forward(size)
        graph, logits = self._captured[size]
        graph.replay()
        return logits

    def _capture(self, size: StepSize) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The first forwards compile and allocate, on a stream of their own, as capturing asks."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), FixedCache(self._memory, self._step(size)).unchanged_states():
            for _ in range(2):
                self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(size)
        self._pool = graph.pool()
        return graph, logits

    def _step(self, size: StepSize) -> FixedStep:
        assert self._buffers, "a step was loaded"
        return self._buffers.step(size)

    def _forward(self, size: StepSize) -> torch.Tensor:
        fixed = self._step(size)
        is_packed = self.tells_lengths or not size.is_decode
        shape = (1, size.tokens) if is_packed else (size.rows, 1)
        cache = FixedCache(self._memory, fixed, self._states_stay)
        inputs = {"input_ids": fixed.ids.view(shape), "use_cache": True, self._served.cache_name: cache}
        if self._served.takes_positions:
            inputs["position_ids"] = fixed.positions.view(shape)
        if self._served.takes_chosen_logits and not size.is_decode:
            inputs["logits_to_keep"] = fixed.last
        if self.tells_lengths:
            cache.lengths_before = lengths_before(fixed.positions)
        with self._layers:
            logits: torch.Tensor = self._model(**inputs).logits
        if size.is_decode:
            return logits[0] if is_packed else logits[:, -1]
        return logits[0] if self._served.takes_chosen_logits else logits[0].index_select(0, fixed.last)


def longest_sequence(core: Cache) -> int:
    """Tokens that a sequence can have: by its tables, and by the pages of those groups that keep all tokens. Of states
    alone, any number."""
    groups = [group for group in core.plan.groups if group.cache.reach.per_token]
    widths = [core.table(group.tag).shape[1] * group.block_tokens for group in groups]
    rooms = [core.plan.num_pages(group.tag) * group.block_tokens for group in groups if group.cache.reach.span is None]
    return int(min(widths + rooms, default=core.state.max_tokens))


def _next(sizes: SequenceOf[int], least: int) -> int:
    """The smallest of some sizes that is not below the least; 0 if there is none."""
    where = bisect_left(sizes, least)
    return sizes[where] if where < len(sizes) else 0

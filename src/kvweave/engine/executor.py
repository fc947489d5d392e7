"""The executor: runs the model over the chunks of a step.

captured  steps of a size that graphs are captured for: a replay
packed    models all of whose layers attend in place, and keep no states: one call `[1, tokens]` for all chunks, but for
          long ones of models with latents
stacked   all others: decodes in calls `[rows, 1]`, chunks of prompts in calls `[rows, tokens]`, if all layers with keys
          and values attend in place; otherwise each in a call of its own
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from kvweave.attention import UNKNOWN_ID, StepSize
from kvweave.cache import Sequence
from kvweave.engine.job import Job, JobChunk
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.build_layers import counts_padding, takes_no_padding
from kvweave.integrations.transformers.prefill import forward_inputs
from kvweave.integrations.transformers.step_cache import PackedCache, lengths_before, step_cache_class


class Executor:
    """Runs one model; used by the thread that holds the core's lock."""

    def __init__(self, weave: KVWeave) -> None:
        self._weave, self.model, self.served, self.memory = weave, weave.model, weave.served, weave.memory
        self._cache_class = step_cache_class(weave.opener.cache_class)
        self.rope = weave.memory.rope

    @property
    def is_packed(self) -> bool:
        """Whether a step is one call, as what is computed follows from ids, positions and pages; known once the model
        has run."""
        return not self.served.has_states and self._weave.graphs.learn()

    @property
    def _needs_equal_lengths(self) -> bool:
        has_columns = counts_padding(self.served) or takes_no_padding(self.served)
        return has_columns or self._weave.graphs.needs_its_length

    @property
    def _stacks_chunks(self) -> bool:
        """Whether chunks of equal length are computed in one call, wherever in their prompts they begin."""
        are_apart = self._needs_equal_lengths or self.rope.is_there or self.served.scans_afresh
        return self._weave.attends_in_place and not are_apart

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be computed before the tokens of the one before it are known here. States that are to be
        kept are copied between the two; what a store gets is copied there by the host, which waits for it."""
        return self._weave.graphs.is_useful and self._weave.store is None

    def can_run_ahead(self, chunks: SequenceOf[JobChunk]) -> bool:
        """Whether those tokens of a step that are not known here are needed by graphs only, which find them on the
        device."""
        groups = [[chunks[number] for number in numbers] for numbers in self._grouped(chunks)]
        return all(all(chunk.ids for chunk in group) or self._size(group) is not None for group in groups)

    def note_tokens(self, chunks: SequenceOf[JobChunk], tokens: torch.Tensor) -> None:
        """The next tokens of those chunks that give one, for the step after this one."""
        if self.runs_ahead:
            self._weave.graphs.note_tokens([chunk.sequence for chunk in chunks if chunk.gives_token], tokens)

    def limit(self, job: Job, start: int) -> int:
        """How far one chunk may go: of models whose scan ignores the state one token behind a hit, and of those whose
        frequencies depend on the length no further than these stay the same."""
        end = len(job.tokens)
        if self.served.scans_afresh and start:
            return start + 1
        if self.rope.is_there:
            if start < job.num_prompt:
                return job.num_prompt
            ranges = (length for length in range(start + 2, end + 1) if not self._same_range(start + 1, length))
            return next(ranges, end + 1) - 1
        return end

    def _same_range(self, one: int, other: int) -> bool:
        return self.rope.range_of(one) == self.rope.range_of(other)

    @torch.no_grad()
    def run(self, chunks: SequenceOf[JobChunk]) -> torch.Tensor | None:
        """Compute the chunks. Returns the logits `[rows, vocabulary]` after those that give a token, in their order;
        None if there are none."""
        logits: dict[int, torch.Tensor] = {}
        groups = self._grouped(chunks)
        for numbers in groups:
            together = [chunks[number] for number in numbers]
            giving = [number for number in numbers if chunks[number].gives_token]
            found = self._run_group(together)
            if found is not None and len(groups) == 1:
                return found
            logits |= dict(zip(giving, [] if found is None else found, strict=True))
        return torch.stack([logits[number] for number in sorted(logits)]) if logits else None

    def _grouped(self, chunks: SequenceOf[JobChunk]) -> list[list[int]]:
        """Numbers of chunks that are computed together."""
        if self._size(chunks):
            return [list(range(len(chunks)))]
        groups: dict[Hashable, list[int]] = {}
        for number, chunk in enumerate(chunks):
            if self._is_packed([chunk]):
                key: Hashable = (chunk.is_decode and self._weave.graphs.is_useful,)
            elif chunk.is_decode:
                key = chunk.start if self._needs_equal_lengths else 0, self.rope.range_of(chunk.end)
            else:
                stacks = self._stacks_chunks and not self.memory.expands(chunk.num_tokens)
                key = (chunk.num_tokens, chunk.start > 0) if stacks else number
            groups.setdefault(key, []).append(number)
        return list(groups.values())

    def _is_packed(self, chunks: SequenceOf[JobChunk]) -> bool:
        return self.is_packed and not any(self.memory.expands(chunk.num_tokens) for chunk in chunks)

    def _run_group(self, chunks: SequenceOf[JobChunk]) -> torch.Tensor | None:
        """The logits after those chunks that give a token."""
        size = self._size(chunks)
        if size is None and self._is_packed(chunks):
            return self._packed(chunks)
        logits = self._stacked(chunks) if size is None else self._captured(chunks, size)
        giving = [number for number, chunk in enumerate(chunks) if chunk.gives_token]
        return logits if len(giving) == len(chunks) else logits[giving] if giving else None

    def _size(self, chunks: SequenceOf[JobChunk]) -> StepSize | None:
        counts, lengths = [chunk.num_tokens for chunk in chunks], [chunk.start for chunk in chunks]
        return self._weave.graphs.size_of(counts, lengths)

    def _captured(self, chunks: SequenceOf[JobChunk], size: StepSize) -> torch.Tensor:
        ids = np.array([token for chunk in chunks for token in chunk.ids or [UNKNOWN_ID]], np.int64)
        return self._weave.graphs.run(_sequences(chunks), [chunk.num_tokens for chunk in chunks], ids, size)

    # ---- one call for all

    def _packed(self, chunks: SequenceOf[JobChunk]) -> torch.Tensor | None:
        device = self.model.device
        ids = torch.from_numpy(np.concatenate([chunk.ids for chunk in chunks])).to(device)
        places = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        positions = torch.from_numpy(places).to(device)
        ends = np.cumsum([chunk.num_tokens for chunk in chunks]) - 1
        last = torch.from_numpy(ends[[chunk.gives_token for chunk in chunks]]).to(device)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": True}
        if self.served.takes_chosen_logits:
            inputs["logits_to_keep"] = last if len(last) else torch.zeros(1, dtype=torch.long, device=device)
        counts, lengths = [chunk.num_tokens for chunk in chunks], [chunk.start for chunk in chunks]
        with PackedCache(self.memory, _sequences(chunks), lengths, counts) as past:
            if self._weave.graphs.tells_lengths:
                past.lengths_before = lengths_before(positions)
            logits: torch.Tensor = self.model(**inputs, past_key_values=past).logits[0]
        if not len(last):
            return None
        return logits if self.served.takes_chosen_logits else logits[last]

    def _stacked(self, chunks: SequenceOf[JobChunk]) -> torch.Tensor:
        """The logits after each row's last token."""
        lengths, count = [chunk.start for chunk in chunks], chunks[0].num_tokens
        columns = max(lengths) + count
        ids = torch.tensor([chunk.ids for chunk in chunks], device=self.model.device)
        ends = torch.tensor([columns - chunk.end for chunk in chunks], device=ids.device)
        mask = (torch.arange(columns, device=ids.device) >= ends[:, None]).long()
        with self._frequencies(chunks[0]), self._cache_class(self.memory, _sequences(chunks), lengths) as past:
            logits: torch.Tensor = self.model(**forward_inputs(self.served, past, ids, mask)).logits[:, -1]
        return logits

    def _frequencies(self, chunk: JobChunk) -> AbstractContextManager[None]:
        """Rotary frequencies that depend on the length are those of the whole prompt; behind it, of the length."""
        if not self.rope.is_there:
            return nullcontext()
        self.rope.restart()
        job = chunk.job
        job.is_shared &= self._same_range(max(chunk.end, job.num_prompt), job.num_prompt)
        return self.rope.with_length(max(chunk.end, job.num_prompt))


def _sequences(chunks: SequenceOf[JobChunk]) -> list[Sequence]:
    return [chunk.sequence for chunk in chunks]

"""Admission: jobs get their sequences, with the longest prefix that memory or the store has; the store gets what they
leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvweave.cache import Sequence
from kvweave.engine.job import Job, JobChunk
from kvweave.integrations.transformers import KVWeave
from kvweave.integrations.transformers.model_changes import ModelVersion
from kvweave.integrations.transformers.prefill import OpenRow
from kvweave.integrations.transformers.prompts import Prompt

if TYPE_CHECKING:
    from kvweave.integrations.transformers.store_sync import StoreBatch


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """The open row of a job, and what it takes from the store and leaves there, if there is one."""

    row: OpenRow
    store_batch: StoreBatch | None


class Admission:
    """Opens and closes the sequences of jobs. Used by the thread that holds the core's lock."""

    def __init__(self, weave: KVWeave) -> None:
        self._weave, self._opener = weave, weave.opener
        self._admitted: dict[int, Admitted] = {}
        self._version: ModelVersion | None = None

    def begin_step(self) -> None:
        """Look at the model again before the next job is opened: once a step, whatever is opened in it."""
        self._version = None

    def open(self, job: Job) -> Sequence:
        """The sequence of all tokens of a job so far."""
        self._weave.check_model()
        memory, sync = self._weave.memory, self._opener.store_sync
        rope_range = memory.rope.range_of(job.num_prompt)
        tokens = np.asarray(job.tokens, np.int64)
        prompt = Prompt(tokens, name=job.tenant, rope_range=rope_range, branches=job.branches)
        store_batch = sync.store_batch() if sync else None
        if store_batch is None and self._version is None:
            self._version = memory.model_changes.version()
        row = self._opener.open_sequence(prompt, store_batch, self._version)
        self._admitted[job.number] = Admitted(row, store_batch)
        if store_batch and job.num_cached is None:
            job.num_stored = store_batch.num_loaded
        return row.sequence

    def limit(self, job: Job, start: int) -> int:
        """The next length at which the store wants to look at a job."""
        points = self._admitted[job.number].row.points
        return next((point for point in points if point > start), len(job.tokens))

    def after_commit(self, chunk: JobChunk) -> None:
        """Copy for the store what the next step changes."""
        admitted = self._admitted[chunk.job.number]
        batch, sequence = admitted.store_batch, admitted.row.sequence
        if batch and chunk.job.is_shared:
            if chunk.end in admitted.row.points:
                batch.capture(sequence)
            elif chunk.end > chunk.job.num_prompt and (due := batch.due([sequence])):
                batch.capture_answers(due, 1)

    def forget(self, job: Job) -> None:
        self._admitted.pop(job.number, None)

    def before_close(self, job: Job) -> None:
        """Save what a job leaves."""
        admitted = self._admitted.get(job.number)
        if admitted and admitted.store_batch and admitted.row.sequence.is_open:
            admitted.store_batch.save([admitted.row.sequence])

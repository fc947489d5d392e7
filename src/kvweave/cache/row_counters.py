"""Counters of the rows of the block tables, one row a sequence."""

from __future__ import annotations

import numpy as np

from kvweave.pool import Counts


class RowCounters:
    """One number a row, for whole batches at once; and, for one row, the same numbers as plain ints (`length_of[row]`:
    a memoryview is read five times sooner than an array).

    `lengths`: tokens with pages allocated. `committed`: tokens whose KV is written and may be shared. `ready`: the
    length up to which `extend` has nothing to do but to count; `next_stop`: the first length at which it has to do with
    states, or refuses. `next_event`: the committed length at which `commit` has more to do than to count; `next_point`:
    at which that is work for a single sequence. `first_unpublished`: the first wanted point not in the tree yet: pages
    that it needs are not released. `published`: tokens that are in the tree. `step_start`: the length before the last
    step. `drafts`: tokens of it that may be rejected. `prompts`: lengths of the prompts, 0 where no sequence is.
    `last_snapshot`: no step is to leave a state behind it; 0 where there is none. `opened`: the clock when the sequence
    was opened. `priority`: how important it is. `known`: tokens whose ids are known; `flushed`: those whose ids the
    sequence itself keeps. `passed_stop`: not 0 where drafts that are not accepted yet reached `next_stop`.
    `generation`: counts the sequences that were in the row.
    """

    def __init__(self, rows: int) -> None:
        self._set(np.zeros((18, rows), np.int64))

    def _set(self, counts: Counts) -> None:
        self._counts = counts
        self.lengths, self.length_of = _both(counts[0])
        self.committed, self.committed_of = _both(counts[1])
        self.ready, self.ready_of = _both(counts[2])
        self.next_stop, self.next_stop_of = _both(counts[3])
        self.next_event, self.next_event_of = _both(counts[4])
        self.next_point, self.next_point_of = _both(counts[5])
        self.first_unpublished, self.first_unpublished_of = _both(counts[6])
        self.published, self.published_of = _both(counts[7])
        self.step_start, self.step_start_of = _both(counts[8])
        self.drafts, self.drafts_of = _both(counts[9])
        self.prompts, self.prompt_of = _both(counts[10])
        self.last_snapshot, self.last_snapshot_of = _both(counts[11])
        self.opened, self.opened_of = _both(counts[12])
        self.priority, self.priority_of = _both(counts[13])
        self.known, self.known_of = _both(counts[14])
        self.flushed, self.flushed_of = _both(counts[15])
        self.passed_stop, self.passed_stop_of = _both(counts[16])
        self.generation, self.generation_of = _both(counts[17])

    def add_rows(self, count: int) -> None:
        self._set(np.pad(self._counts, ((0, 0), (0, count))))

    def copy(self, source: int, row: int) -> None:
        generation = self.generation_of[row]
        self._counts[:, row] = self._counts[:, source]
        self.generation_of[row] = generation


def _both(counts: Counts) -> tuple[Counts, memoryview]:
    return counts, counts.data

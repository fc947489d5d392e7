"""What the scheduler's side tells the workers in each step, and what they report. Pickled by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.store import HashedPrompt

Pages = NDArray[np.int32]


class TableSlice(NamedTuple):
    """The pages of a block table from `first` on."""

    first: int
    pages: Pages

    def table(self) -> Pages:
        """The table, with NULL before the slice."""
        return np.concatenate((np.zeros(self.first, np.int32), self.pages))


Slices = Mapping[str, TableSlice]
"""By the name of the table."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load what a ticket stands for into these pages; before `start` the engine has everything."""

    request: str
    ticket: bytes
    start: int
    position: int
    tables: Slices


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save what resuming at `points` needs out of these pages, after this step's forward pass."""

    number: int
    prompt: HashedPrompt
    start: int
    points: tuple[int, ...]
    tables: Slices


@dataclass(frozen=True, slots=True)
class StepJobs:
    """All jobs of one step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()


@dataclass(slots=True)
class WorkerReport:
    """What ended in a worker since its last report; of several workers, in all of them together."""

    gathered: dict[int, int] = field(default_factory=dict)
    """By the number of a save: in how many workers its pages are free again."""
    ended: dict[int, int] = field(default_factory=dict)
    """By the number of a save: in how many workers it is done, well or not."""
    failed_saves: set[int] = field(default_factory=set)
    """Saves of which some pieces were not kept."""
    reached: dict[str, int] = field(default_factory=dict)
    """By request, of loads that ended early: the position that all workers reached."""
    load_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By request, of loads that were complete, and by group: how long the slowest worker took."""

    def add(self, other: WorkerReport) -> WorkerReport:
        for mine, theirs in ((self.gathered, other.gathered), (self.ended, other.ended)):
            for number, count in theirs.items():
                mine[number] = mine.get(number, 0) + count
        self.failed_saves |= other.failed_saves
        for request, position in other.reached.items():
            self.reached[request] = min(position, self.reached.get(request, position))
        for request, seconds in other.load_seconds.items():
            known = self.load_seconds.setdefault(request, {})
            known |= {tag: max(own, known.get(tag, 0.0)) for tag, own in seconds.items()}
        return self

    @property
    def is_empty(self) -> bool:
        return not (self.gathered or self.ended or self.failed_saves or self.reached or self.load_seconds)

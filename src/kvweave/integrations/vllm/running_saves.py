"""Saves that the workers were sent: whose blocks stay pinned until they are copied, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.integrations.vllm.request_state import RequestState
from kvweave.integrations.vllm.step_messages import Slices, WorkerReport


class SavedRange(NamedTuple):
    """Tokens of a request that are stored now, and where it can be resumed among them."""

    state: RequestState
    start: int
    points: tuple[int, ...]


@dataclass(slots=True)
class RunningSave:
    """A save, and in how many workers it is still going on."""

    saving: SavedRange
    pinned: list[int]
    gathering: int
    running: int
    failed: bool = False


class RunningSaves:
    """`pin` and `unpin` keep blocks from being reused, each once a call, whatever becomes of the request."""

    def __init__(
        self, pin: Callable[[Sequence[int]], None], unpin: Callable[[Sequence[int]], None], num_workers: int
    ) -> None:
        self._pin, self._unpin, self._num_workers = pin, unpin, num_workers
        self._saves: dict[int, RunningSave] = {}
        self._next = 0
        self.saved: list[SavedRange] = []
        """Ranges that were stored, until they are taken; kept only if `keep_saved`."""
        self.keep_saved = False

    def begin(self, saving: SavedRange, tables: Slices) -> int:
        """Pin the blocks of a save; returns its number."""
        blocks = sorted({page for table in tables.values() for page in table.pages.tolist()} - {0})
        self._pin(blocks)
        number, self._next = self._next, self._next + 1
        self._saves[number] = RunningSave(saving, blocks, self._num_workers, self._num_workers)
        return number

    def report(self, report: WorkerReport) -> None:
        for number, count in report.gathered.items():
            save = self._saves[number]
            save.gathering -= count
            if not save.gathering:
                self._unpin(save.pinned[::-1])
        for number in report.failed_saves:
            save = self._saves[number]
            save.failed = True  # later chunks are of no use without it: it is saved again with the next
            save.saving.state.saved = min(save.saving.start, save.saving.state.saved)
        for number, count in report.ended.items():
            self._saves[number].running -= count
            if not self._saves[number].running:
                ended = self._saves.pop(number)
                if self.keep_saved and not ended.failed:
                    self.saved.append(ended.saving)

    def is_saving(self, state: RequestState) -> bool:
        return any(save.saving.state is state for save in self._saves.values())

    @property
    def has_pins(self) -> bool:
        return any(save.gathering for save in self._saves.values())

    def __len__(self) -> int:
        return len(self._saves)

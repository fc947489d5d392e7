"""Steps at fixed addresses on a device, which captured graphs read.

The host writes a few numbers for each step, in one copy. All else follows from them on the device:

    host      ids, the row of each token, and for each row its table row, where its tokens begin, and its length
    device    positions, tables and slots by tag, the pages of states

The tables of a cache are there once; rows that have changed follow before each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.attention.step import Step
from kvweave.cache import Cache, Sequence
from kvweave.errors import BadRows
from kvweave.tensor import upload

Numbers = NDArray[np.int64]


UNKNOWN_ID = -1
"""Stands for a token that only the device knows: the one noted for its sequence by `note_tokens`."""


class StepSize(NamedTuple):
    """Tokens and rows of a step, padding included. Rows of one token each, if there are as many: a decode."""

    tokens: int
    rows: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows


@dataclass(frozen=True, slots=True, eq=False)
class FixedStep:
    """A step, and what a model takes beside it: `ids` and `positions` of its tokens, the last token of each row, and
    the pages of states, `[rows]` by tag."""

    ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    step: Step
    states: Mapping[str, torch.Tensor]


class StepBuffers:
    """Steps of at most `max_tokens` tokens and `max_rows` rows of one cache. Tokens and rows beyond those of a step are
    padding: of length 0, with slots of -1 and the NULL page for states.

    Sequences may have up to `max_length` tokens. A step may be loaded while the one before it waits for the device;
    `load` waits until the one before that has begun.
    """

    def __init__(
        self, cache: Cache, device: torch.device | str, max_tokens: int, max_rows: int, max_length: int
    ) -> None:
        self._cache, self.max_tokens, self.max_rows, self.max_length = cache, max_tokens, max_rows, max_length
        self._groups = {group.tag: group for group in cache.plan.groups}
        self._nobody = len(cache.table(next(iter(self._groups))))
        sizes = {"ids": max_tokens, "row_of": max_tokens, "rows": max_rows, "starts": max_rows + 1}
        sizes |= {"lengths": max_rows, "last": max_rows}
        is_cuda = torch.device(device).type == "cuda"
        self._twins = [torch.zeros(sum(sizes.values()), dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._twins] if is_cuda else []
        self._numbers = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device)
        self._there = dict(zip(sizes, self._numbers.split(list(sizes.values())), strict=True))
        self._here = [
            dict(zip(sizes, np.split(twin.numpy(), np.cumsum(list(sizes.values()))[:-1]), strict=True))
            for twin in self._twins
        ]
        self._tables = {
            tag: torch.zeros(self._nobody + 1, self._width(tag), dtype=torch.int32, device=device)
            for tag in self._groups
        }
        self._used = {tag: np.zeros(self._nobody + 1, np.int64) for tag in self._groups}
        """Columns of each row's table, on the device, behind which there are no pages."""
        self._noted = torch.zeros(self._nobody + 1, dtype=torch.int64, device=device)
        self._counting = torch.arange(max_tokens, device=device)
        self._loads = 0
        for tag in self._groups:
            self._copy_rows(tag, np.flatnonzero(cache.kernel_table(tag)[:, : self._width(tag)].any(axis=1)))

    def _width(self, tag: str) -> int:
        """Columns of a table on the device; of states, only the live one's."""
        group = self._groups[tag]
        return -(-self.max_length // group.kernel_tokens) if group.cache.reach.per_token else 1

    # ---- on the host

    def load(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], ids: Numbers, size: StepSize) -> None:
        """Make the step that `extend` has allocated pages for the next one: `counts[i]` tokens of `sequences[i]`."""
        lengths = [sequence.length for sequence in sequences]
        count, used = len(sequences), len(ids)
        fits = count <= size.rows <= self.max_rows and used <= size.tokens <= self.max_tokens
        if not fits or max(lengths) > self.max_length or (used < size.tokens and count == size.rows):
            raise BadRows(
                f"{used} tokens of {count} sequences, the longest of {max(lengths)}, do not fit {size}, of buffers for"
                f" {self.max_tokens} tokens, {self.max_rows} rows and {self.max_length} a sequence"
            )
        here = self._here[self._loads % 2]
        if self._copied:
            self._copied[self._loads % 2].synchronize()
        here["ids"][:used] = ids
        here["ids"][used : size.tokens] = 0
        here["row_of"][:used] = np.repeat(np.arange(count), counts)
        here["row_of"][used : size.tokens] = np.minimum(count + np.arange(size.tokens - used), size.rows - 1)
        here["rows"][:count] = [sequence.row for sequence in sequences]
        here["rows"][count : size.rows] = self._nobody
        here["starts"][1 : count + 1] = np.cumsum(counts)
        here["starts"][count + 1 : size.rows + 1] = np.minimum(used + np.arange(1, size.rows - count + 1), size.tokens)
        here["starts"][size.rows] = size.tokens
        here["lengths"][:count] = lengths
        here["lengths"][count : size.rows] = 0
        here["last"][:count] = here["starts"][1 : count + 1] - 1
        here["last"][count : size.rows] = 0
        for tag in self._groups:
            self._copy_rows(tag, self._cache.take_changed_rows(tag))
        self._numbers.copy_(self._twins[self._loads % 2], non_blocking=True)
        if self._copied:
            self._copied[self._loads % 2].record()
        self._loads += 1

    def note_tokens(self, sequences: SequenceOf[Sequence], tokens: torch.Tensor) -> None:
        """The next token of each sequence, on the device."""
        rows = np.array([sequence.row for sequence in sequences])
        self._noted.index_copy_(0, self._sent(rows), tokens)

    @property
    def are_outgrown(self) -> bool:
        """Whether the cache has more rows by now: these buffers are of no use any more."""
        return len(self._cache.table(next(iter(self._groups)))) != self._nobody

    def _copy_rows(self, tag: str, rows: Numbers) -> None:
        """Only columns that have pages, or had."""
        if len(rows):
            there, used = self._tables[tag], self._used[tag]
            new = self._cache.kernel_table(tag)[rows, : there.shape[1]]
            now = int(np.flatnonzero(new.any(axis=0)).max(initial=0)) + 1
            width = max(now, int(used[rows].max()))
            used[rows] = now
            there[:, :width].index_copy_(0, self._sent(rows), self._sent(np.ascontiguousarray(new[:, :width])))

    def _sent(self, numbers: NDArray[np.integer[Any]]) -> torch.Tensor:
        return upload(numbers, self._numbers.device)

    # ---- on the device

    def step(self, size: StepSize) -> FixedStep:
        """The tensors of a step of this size; what computes them may be captured."""
        tokens = {name: self._there[name][: size.tokens] for name in ("ids", "row_of")}
        rows = {name: self._there[name][: size.rows] for name in ("rows", "lengths", "last")}
        starts, row_of = self._there["starts"][: size.rows + 1], tokens["row_of"]
        lengths = rows["lengths"].index_select(0, row_of)
        before = lengths - starts.index_select(0, row_of + 1)
        positions = (before + self._counting[: size.tokens]).clamp(min=0)
        tables, slots, states = {}, {}, {}
        for tag, group in self._groups.items():
            table = self._tables[tag].index_select(0, rows["rows"])
            if not group.cache.reach.per_token:
                states[tag] = table[:, 0].long()
                continue
            block = table[row_of, positions // group.kernel_tokens].long()
            slot = block * group.kernel_tokens + positions % group.kernel_tokens
            tables[tag], slots[tag] = table, torch.where(lengths > 0, slot, -1)
        most = 1 if size.is_decode else size.tokens
        step = Step(starts.int(), rows["lengths"].int(), tables, slots, most)
        noted = self._noted.index_select(0, rows["rows"].index_select(0, row_of))
        ids = torch.where(tokens["ids"] == UNKNOWN_ID, noted, tokens["ids"])
        return FixedStep(ids, positions, rows["last"], step, states)

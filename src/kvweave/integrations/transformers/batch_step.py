"""A step of a batch: the columns that are computed, and the slots of their rows and of the rows before them.

Rows of a batch are aligned on the right, as transformers pads them:

    column   0        pad              start       end
    row 0    |........|################|new tokens |      its token p is in column pad + p
    row 1    |#########################|new tokens |

What a step says of a group is made once and serves all its layers.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.attention import Step
from kvweave.cache import Cache
from kvweave.integrations.transformers.paged_rows import BlockRun, RowSlots

Numbers = NDArray[np.int64]


class BatchStep:
    """The tokens of columns `[start, end)`; `rows` are their rows in the core's tables, `pads` the padding of each."""

    can_gather = True
    """Whether rows can be read as a batch, and need not be attended to in place."""

    def __init__(
        self, core: Cache, rows: Numbers, pads: Numbers, start: int, end: int, device: torch.device | str
    ) -> None:
        self.core, self.rows, self.pads = core, rows, pads
        self.start, self.end = start, end
        self.device = device
        self._found: dict[tuple[str, int, int, int], RowSlots | BlockRun] = {}
        self._new: dict[str, RowSlots] = {}

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def new(self, tag: str) -> RowSlots:
        """The slots of this step's rows."""
        if tag not in self._new:
            self._new[tag] = self.cells(tag, self.start, self.end)
        return self._new[tag]

    def places(self, tag: str, first: int, last: int, tokens_per_row: int = 1) -> RowSlots | BlockRun:
        """Where the rows of columns `[first, last)` are, to be read.

        Where several tokens share a row, columns are those of rows.
        """
        key = (tag, first, last, tokens_per_row)
        if key not in self._found:
            starts = first - self.pads // tokens_per_row
            skips = starts % self._per_block(tag, tokens_per_row)
            if (skips == skips[0]).all():
                self._found[key] = self._blocks(tag, starts, last - first, tokens_per_row)
            else:
                self._found[key] = self.cells(tag, first, last, tokens_per_row)
        return self._found[key]

    def cells(self, tag: str, first: int, last: int, tokens_per_row: int = 1) -> RowSlots:
        """The slot of each row; padding, and tokens that a window has passed, are in the NULL page."""
        per_block = self._per_block(tag, tokens_per_row)
        columns = np.arange(first, last)[None, :] - (self.pads // tokens_per_row)[:, None]
        slots, offsets = np.divmod(np.maximum(columns, 0), per_block)
        pages = np.where(columns < 0, 0, self.core.table(tag)[self.rows[:, None], slots])
        return RowSlots(*self._on_device(np.stack([pages, offsets])).unbind(0))

    def _blocks(self, tag: str, starts: Numbers, count: int, tokens_per_row: int) -> BlockRun:
        """`count` rows of each sequence from `starts` on, where these are as deep in their blocks; as `cells`."""
        per_block = self._per_block(tag, tokens_per_row)
        skip = int(starts[0]) % per_block
        slots = (starts // per_block)[:, None] + np.arange(-(-(skip + count) // per_block))
        pages = np.where(slots < 0, 0, self.core.table(tag)[self.rows[:, None], np.maximum(slots, 0)])
        return BlockRun(self._on_device(pages), skip, count)

    def _per_block(self, tag: str, tokens_per_row: int) -> int:
        return self.core.plan.group(tag).block_tokens // tokens_per_row

    def _on_device(self, numbers: NDArray[np.integer], dtype: type[np.integer] = np.int64) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(dtype, copy=False)).to(self.device)

    def packed(self) -> Step:
        """The same step for attention in place, whose rows lie one after the other without padding; padding within
        them is not written."""
        lengths = self.end - self.pads
        positions = np.arange(self.start, self.end) - self.pads[:, None]
        longest, has_padding = int(lengths.max()), int(positions.min()) < 0
        tables, slots = {}, {}
        for group in self.core.plan.groups:
            if group.cache.reach.per_token:
                width, size = -(-longest // group.kernel_tokens), group.block_tokens
                tables[group.tag] = self._on_device(self.core.kernel_table(group.tag)[self.rows, :width], np.int32)
                new = self.core.table(group.tag)[self.rows[:, None], positions // size] * size + positions % size
                slots[group.tag] = self._on_device((np.where(positions < 0, -1, new) if has_padding else new).ravel())
        starts = query_starts(len(self.rows), self.num_tokens, self.device)
        return Step(starts, self._on_device(lengths, np.int32), tables, slots, self.num_tokens)

    def live(self, tag: str) -> list[int]:
        """The page of each row's live state."""
        pages: list[int] = self.core.table(tag)[self.rows, 0].tolist()
        return pages


@lru_cache(maxsize=16)
def query_starts(rows: int, num_tokens: int, device: torch.device | str) -> torch.Tensor:
    """Where the tokens of each row begin, if all have as many; the same for all decodes of a batch."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * num_tokens

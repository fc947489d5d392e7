"""A step: the new tokens of some sequences, packed without padding, and where they and their past lie.

    rows           0            1    2
    queries        [ a a a a a ][ b ][ c c ]        query_starts  0 5 6 8
    context        lengths[r] tokens, the new ones included: a row's queries are its last tokens

A row may be a decode (one query) or a chunk of a prompt (many), in any order. A row of length 0 is padding: it sees
nothing, and its outputs are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from kvweave.cache import Cache, Sequence
from kvweave.errors import BadRows, UnknownName

Addresses = tuple[int, int, int, int, int]
"""Of query starts, lengths and a table; then its rows and its width."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Tensors of one device; by tag `tables`, kernel-block ids int32 `[rows, width]`, and `slots`, int64 `[tokens]`.

    `max_queries` is the most queries a row may have, and is all that the host must know: 1 for a step of decodes only.
    """

    query_starts: torch.Tensor
    lengths: torch.Tensor
    tables: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]
    max_queries: int
    _addresses: dict[str, Addresses] = field(default_factory=dict, init=False, repr=False)

    def addresses(self, tag: str) -> Addresses:
        """For C on the host; looked up once for all layers."""
        if tag not in self._addresses:
            if tag not in self.tables:
                raise UnknownName("tag of the step", tag, self.tables)
            table = self.tables[tag]
            starts, lengths = self.query_starts.data_ptr(), self.lengths.data_ptr()
            self._addresses[tag] = starts, lengths, table.data_ptr(), self.num_rows, table.shape[1]
        return self._addresses[tag]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def __post_init__(self) -> None:
        """What can be told from shapes alone, so that no device has to be waited for."""
        for tag, table in self.tables.items():
            kinds = [tensor.dtype for tensor in (self.query_starts, self.lengths, table)]
            if kinds != [torch.int32] * 3 or not table.is_contiguous():
                raise BadRows(f"a step has int32 starts, lengths and contiguous tables, not {kinds} for {tag!r}")
            if len(self.query_starts) != self.num_rows + 1 or len(table) != self.num_rows:
                raise BadRows(f"{self.num_rows} lengths, {len(self.query_starts)} starts, {len(table)} rows of {tag!r}")


def make_step(
    cache: Cache, sequences: SequenceOf[Sequence], counts: SequenceOf[int], device: torch.device | str = "cpu"
) -> Step:
    """The step that `cache.extend` has just made room for: `counts[i]` new tokens of `sequences[i]`.

    Tables are as wide as the longest sequence needs.
    """
    rows = np.array([sequence.row for sequence in sequences], np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lengths = np.array([sequence.length for sequence in sequences], np.int32)
    slots = cache.slot_mapping(sequences)
    if (wrong := [tag for tag, found in slots.items() if len(found) != starts[-1]]) or len(counts) != len(rows):
        raise BadRows(f"{starts[-1]} new tokens, but the last step has {[len(slots[tag]) for tag in wrong]}")
    widths = {tag: -(-int(lengths.max(initial=1)) // cache.plan.group(tag).kernel_tokens) for tag in slots}
    tables = {tag: np.ascontiguousarray(cache.kernel_table(tag)[rows, : widths[tag]]) for tag in slots}

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Step(
        there(starts),
        there(lengths),
        {tag: there(table) for tag, table in tables.items()},
        {tag: there(found) for tag, found in slots.items()},
        max(counts, default=0),
    )

"""A payload's copies as the copy kernel takes them. Making them needs no device.

A block of a copy is cut like a page: `planes` x `rows` runs here, and there, in staging memory, the payload as it will
be stored. So what the store keeps is filled straight from an engine's pages, and leaves by one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_

import numpy as np

from kvweave.copying import BlockCopy
from kvweave.transfer.copy_plan import Numbers
from kvweave.transfer.copy_templates import CopyTemplate
from kvweave.transfer.page_batches import PageBatch
from kvweave.transfer.runs import Runs
from kvweave.transfer.tiles import Tiling, widest


class PayloadTable:
    """The copies between some pools, by their addresses and sizes, and a payload in staging memory."""

    def __init__(
        self, copies: Iterable[BlockCopy], addresses: Mapping[str, int], sizes: Mapping[str, int], payload_bytes: int
    ) -> None:
        batches, found = [], list[Numbers]()
        for copy in copies:
            if len(copy.held):
                copy.check(np.array([sizes[name] for name in copy.pools]), payload_bytes)
                pools = copy.of_pools(np.array([addresses[name] for name in copy.pools]))
                batches.append(PageBatch(0, _tiling(copy), np.arange(len(copy.held)), copy.kept))
                found += [copy.held + pools, copy.kept]
        self.template = CopyTemplate(payload_bytes, 0, batches=tuple(batches), staged_bytes=payload_bytes)
        self.address_table = np.concatenate([np.empty(0, np.int64), *found])
        pages = (int(np.bitwise_or.reduce(numbers)) for numbers in found[::2])
        self.vector_bytes = widest(reduce(or_, pages, self.template.bits))


def _tiling(copy: BlockCopy) -> Tiling:
    (planes, rows, size), (plane, row) = copy.shape, copy.held_strides
    runs = Runs(0, 0, planes, plane, rows, row, size, 0, copy.kept_strides[0])
    return Tiling(runs, *copy.kept_strides)

"""At which lengths a prompt can be restored, by the pages of each pool that a store has: the joint hit, in pages.

SGLang's ranks intersect their sets of lengths: a maximum for each rank would not do, since states and windows can be
restored at some lengths and not at smaller ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


def leading(present: Flags) -> int:
    """How many pages there are before the first that is missing."""
    return int(np.argmin(present)) if not present.all() else len(present)


def restorable(present: Flags, num_trailing: int | None) -> Flags:
    """By length, from 1 on: whether the pool has what it needs there: the last `num_trailing` pages; None: all."""
    count = np.concatenate(([0], np.cumsum(present)))
    length = np.arange(1, len(present) + 1)
    tail = np.zeros_like(length) if num_trailing is None else np.maximum(0, length - num_trailing)
    found: Flags = count[length] - count[tail] == length - tail
    return found


def longest(lengths: Flags) -> int:
    """The longest of the lengths, from 1 on, that are marked; 0 if none is."""
    marked = np.flatnonzero(lengths)
    return int(marked[-1]) + 1 if len(marked) else 0

"""The joint hit: the longest position from which every group can go on.

With c the running count of present blocks, a group can resume at p iff c[p] - c[tail(p)] equals the number of blocks
between, and its head is whole. One cumulative sum and one comparison a group over all positions at once; AND the
answers on the common grid; the last true position is the hit. No iteration, longest by construction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.spec import Reach


class Present(NamedTuple):
    """Which blocks of `block_tokens` tokens a group has; for states, whether there is a snapshot at the block's end."""

    reach: Reach
    block_tokens: int
    blocks: NDArray[np.bool_]


def joint_hit(groups: Iterable[Present], grid: int, limit: int) -> int:
    """The longest p <= `limit`, a multiple of `grid`, from which all groups can go on. 0 is always one."""
    positions = np.arange(0, limit + 1, grid)
    fine = np.ones(len(positions), bool)
    for group in groups:
        fine &= resumable(group, positions)
    fine[0] = True
    return int(positions[np.flatnonzero(fine)[-1]])


def resumable(group: Present, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a group alone can go on from each position, all multiples of its block."""
    reach, size, blocks = group
    count = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(blocks, out=count[1:])
    end = np.minimum(positions // size, len(blocks))
    start = np.minimum(reach.tail(positions) // size, end)
    whole: NDArray[np.bool_] = (count[end] - count[start] == end - start) & (positions // size == end)
    if reach.head:
        head = np.minimum(-(-reach.head // size), end)
        whole &= count[head] == head
    return whole

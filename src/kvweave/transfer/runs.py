"""Runs: where the bytes of a page lie in its pool, and in a chunk.

In a pool a page is several runs of bytes, at the same offsets for every page of its group; in a chunk it is one run.
Run (block, unit):

    in the pool     start + page * page_stride + block * kernel_stride + unit * unit_stride
    in the chunk    flat_start + block * flat_stride + unit * unit_bytes         from where its block starts

A unit is a lane of the pool, restricted to the layers of the slice; blocks are kernel blocks. Units or blocks that are
adjacent on both sides are merged: a page of a page-major pool without padding is a single run.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.plan import Group, Pool


@dataclass(frozen=True, slots=True)
class Runs:
    """`blocks` x `units` runs of `unit_bytes` in every page of a group."""

    start: int
    page_stride: int
    blocks: int
    kernel_stride: int
    units: int
    unit_stride: int
    unit_bytes: int
    flat_start: int
    flat_stride: int

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.units * self.unit_bytes


def runs_of(group: Group, pool: Pool, layer_bytes: int, first: int, last: int) -> tuple[Runs, ...]:
    """The runs of the layers [first, last) of a group, counted within it: whole lanes, and partial lanes before and
    after.

    `layer_bytes` is passed in because computing it from the group is slow.
    """
    per_lane = group.lane_layers
    if pool.lanes == 1 or last - first <= per_lane - first % per_lane:
        return (_runs(group, pool, layer_bytes, first, last),)
    inner, outer = -(-first // per_lane) * per_lane, last // per_lane * per_lane
    pieces = [(first, inner), (inner, outer), (outer, last)]
    return tuple(_runs(group, pool, layer_bytes, a, b) for a, b in pieces if a < b)


def _runs(group: Group, pool: Pool, layer_bytes: int, first: int, last: int) -> Runs:
    """Runs of layers in one lane, or of all layers in some lanes."""
    lane_bytes = pool.num_superpages * pool.superpage_bytes
    row_bytes = len(group.layers) * layer_bytes
    lane, slot = divmod(first, group.lane_layers)
    units = max(1, (last - first) // group.lane_layers)
    unit_bytes = (last - first) // units * layer_bytes
    blocks = group.kernel_blocks
    if unit_bytes == row_bytes == group.kernel_stride:
        blocks, unit_bytes = 1, unit_bytes * blocks
    start = lane * lane_bytes + slot * layer_bytes
    flat_start = first * layer_bytes
    return Runs(
        start, group.page_stride, blocks, group.kernel_stride, units, lane_bytes, unit_bytes, flat_start, row_bytes
    )

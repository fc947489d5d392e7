"""What a plan keeps at a resume point, in bytes: all that oracles need to know of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvweave.plan import Plan
from kvweave.pool.group import PagedGroup, paged_groups


@dataclass(frozen=True, slots=True)
class Geometry:
    """Bytes by the grid, the tokens between positions from which all groups could go on.

    Pages count with their padding, as the plan cuts them; what super-pages leave over is not counted.
    """

    grid: int
    row_bytes: int
    """Of one grid of tokens in the groups that see every token."""
    state_bytes: int
    """Of the states of one position."""
    windows: tuple[PagedGroup, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Geometry:
        groups = [group for group in paged_groups(plan) if group.has_pages]
        grid = math.lcm(*(group.slot_tokens for group in paged_groups(plan)))
        rows = sum(group.page_bytes * (grid // group.slot_tokens) for group in groups if group.is_full)
        states = sum(group.page_bytes for group in groups if group.is_state)
        return cls(grid, rows, states, tuple(group for group in groups if group.is_window))

    @property
    def resumes_anywhere(self) -> bool:
        """Whether rows alone suffice, so that every position of a cached run is a resume point."""
        return not self.state_bytes and not self.windows

    def point_bytes(self, blocks: int) -> int:
        """What a point after `blocks` blocks of the grid keeps beside its rows: its states, and its windows' tails."""
        return self.state_bytes + sum(self.tail_bytes(group, 0, blocks) for group in self.windows)

    def tail_bytes(self, group: PagedGroup, first: int, blocks: int) -> int:
        """Bytes of a window's pages that a point after `blocks` needs and that lie at or behind block `first`."""
        end, low = blocks * self.grid // group.slot_tokens, first * self.grid // group.slot_tokens
        start, head = min(group.first_block(blocks * self.grid), end), min(group.head_blocks, end)
        return group.page_bytes * (max(0, end - max(start, low)) + max(0, head - low))

    def bytes_to_load(self, start: int, end: int) -> int:
        """What has to be brought to go on from `end` tokens where `start` are there: rows between, a point's rest."""
        if end <= start:
            return 0
        low, high = start // self.grid, end // self.grid
        windows = sum(self.tail_bytes(group, low, high) for group in self.windows)
        return (high - low) * self.row_bytes + windows + self.state_bytes


def usable_bytes(plan: Plan) -> int:
    """Bytes of all pools that pages can take, the NULL super-pages apart."""
    return sum(pool.num_usable * pool.unit_bytes for pool in plan.pools)

"""Retention: at which positions a sequence leaves a resume point behind.

Full attention can go on from any block, so this matters where something is left behind: windows and states. A point
costs the pages that only it needs, and is worth the tokens it saves times the chance of being asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvweave.errors import BadOption
from kvweave.plan import Plan

SPACING = 1024
"""Tokens between points kept on the way, where nobody says otherwise; more where a state is worth more rows."""
DENSE = 8
"""So many points are kept at that distance; further on, a sibling recomputes at most two in so many of its tokens."""
STATE_SHARE = 4
"""A state takes at most so many times the bytes of the rows up to the one before it. (While memory is free that costs
next to nothing; with 1, first siblings found 44% of what they share, with 4 81%.)"""
SPARSE = 8192
"""Once something had to be evicted, points on the way are so far apart: of closer ones, most are evicted before anybody
asks for them, and other points were evicted to make room for them (docs/measurements/reuse.md)."""
NEVER: Final = 2**62


class Spacing:
    """Where points are kept on the way. Distances double each time the position does, where they may `widen`:

    0   1   2   3   4   5   6   7   8       10      12      14      16              20   ...   x `tokens`
    """

    def __init__(self, tokens: int, widens: bool) -> None:
        self.tokens = tokens
        self.widens = widens

    def after(self, position: int) -> int:
        """The next one after `position`."""
        if not self.tokens:
            return NEVER
        step = self.tokens
        if self.widens:
            step <<= (position // (DENSE * step)).bit_length()
        return (position // step + 1) * step

    def between(self, start: int, end: int) -> list[int]:
        """Those in (start, end), ascending."""
        points, position = [], self.after(start)
        while position < end:
            points.append(position)
            position = self.after(position)
        return points


@dataclass(frozen=True, slots=True)
class Retention:
    """Which points are kept; tokens are rounded to the grid on which all groups can resume.

    `prompt_end`: the last position from which the same prompt can be asked again. `branches`: where a prompt left
    the path of an earlier one. `every`: so many tokens along each prompt, so that the first sibling of a prompt hits
    too, at multiples of `unit`: a store's chunk, say (None: by the bytes of a point and of the rows between, and less
    often the further the prompt goes; once something had to be evicted, `SPARSE`; 0: never). `decode_every`: how far
    apart states are snapshotted while generating; only the last is kept. Ends of
    sequences are always kept.
    """

    prompt_end: bool = True
    branches: bool = True
    every: int | None = None
    decode_every: int = 256
    unit: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ("every", 0 if self.every is None else self.every, 0),
            ("decode_every", self.decode_every, 1),
            ("unit", self.unit, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise BadOption(f"retention: {name} must be a whole number of at least {least}, got {value!r}")

    def spacing(self, plan: Plan, grid: int) -> Spacing:
        """Where spaced points are, on the grid, while memory is free."""
        every = self.every
        if every is None:
            growing = max(1, int(plan.bytes_per_token()))
            windows, states = plan.window_bytes() // growing, plan.state_bytes() // growing
            # windows overlap, so close points cost no more than their rows; a state is a copy, and a stop
            every = max(states // STATE_SHARE, SPACING) if states else max(4 * grid, min(windows, SPACING))
        return Spacing(self._rounded(every, grid), widens=self.every is None)

    def sparse_spacing(self, plan: Plan, grid: int) -> Spacing:
        """Where they are once something had to be evicted."""
        dense = self.spacing(plan, grid)
        return Spacing(max(dense.tokens, self._rounded(SPARSE, grid)), widens=False) if self.every is None else dense

    def _rounded(self, tokens: int, grid: int) -> int:
        unit = math.lcm(grid, self.unit)
        return -(-tokens // unit) * unit

"""An upper bound: no cache of these bytes hits more, even if it knows all requests in advance.

Two relaxations, both valid for every policy; the smaller one counts:

- **rows alone**: if states and windows took no memory, Belady's MIN over the rows would be the best (oracles.py).
- **area**: to go on from p, request i needs the rows before p, and the states and window tails there, since the
  request that last came by each of them (or longer: who resumed behind a point did not make it again). Memory for so
  long is an area, bytes x requests; all areas together fit into capacity x requests. Each request takes the part of its
  overlap that it wants; the cheapest tokens first fill the area (a fractional knapsack over the lower convex hull of
  each request's cost, so it never counts too little).

The area is that of Berger et al. (Practical Bounds on Optimal Caching with Variable Object Sizes, 2018), for points
that share rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvweave.sim.foresight import Foresight, PlacedRequest, Run
from kvweave.sim.geometry import Geometry
from kvweave.sim.oracles import IdealCache, Oracle

MIN = Oracle("rows alone", True, True)


def bound_tokens(foresight: Foresight, geometry: Geometry, capacity: int) -> int:
    """Tokens that at most could have been hit, over all requests."""
    rows_alone = Geometry(geometry.grid, geometry.row_bytes, 0)
    rows = sum(IdealCache(foresight, rows_alone, MIN, capacity).hits())
    blocks = rows if geometry.resumes_anywhere else min(rows, _area_bound(foresight, geometry, capacity))
    return blocks * foresight.grid


def _area_bound(foresight: Foresight, geometry: Geometry, capacity: int) -> int:
    """Blocks that fit the area, a part of one counted as one: prices are rounded, and a bound must not be too low."""
    left, blocks = capacity * max(0, len(foresight.requests) - 1), 0
    for _, size, area in sorted(_steps(foresight, geometry)):
        if area > left:
            return blocks - (-left * size // area)
        blocks, left = blocks + size, left - area
    return blocks


def _steps(foresight: Foresight, geometry: Geometry) -> Iterator[tuple[float, int, int]]:
    """Of every request: the price of a block in area, how many more blocks it could hit at that, and the area of them;
    prices rise."""
    last = [0] * foresight.num_runs
    for number, placed in enumerate(foresight.requests):
        hull = [(0, 0)]
        for blocks, area in _costs(placed, number, last, geometry):
            while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-1], (blocks, area)):
                hull.pop()
            hull.append((blocks, area))
        for before, after in itertools.pairwise(hull):
            yield _price(before, after), after[0] - before[0], after[1] - before[1]
        for run in placed.path:
            last[run.number] = number


def _price(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def _costs(placed: PlacedRequest, number: int, last: list[int], geometry: Geometry) -> Iterator[tuple[int, int]]:
    """The area of going on from the end of each run of the overlap."""
    rows, runs = 0, list[Run]()
    for run in placed.path:
        if run.end > placed.overlap:
            return
        ago = number - last[run.number]
        rows += (run.end - run.start) * geometry.row_bytes * ago
        runs.append(run)
        tails = sum(_tail_area(geometry, above, run.end, number - last[above.number]) for above in runs)
        yield run.end, rows + geometry.state_bytes * ago + tails


def _tail_area(geometry: Geometry, run: Run, blocks: int, ago: int) -> int:
    """The area of the window pages within a run that a point after `blocks` needs."""
    inside = (
        geometry.tail_bytes(g, run.start, blocks) - geometry.tail_bytes(g, run.end, blocks) for g in geometry.windows
    )
    return sum(inside) * ago

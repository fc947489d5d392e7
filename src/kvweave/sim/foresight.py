"""Foresight: all requests of a trace in one tree, so that it is known what each has in common with those before it,
and where later ones will go on from.

Runs of the tree end wherever a request ends, its prompt could be asked again, it parts from another, or a later one
resumes; so each request covers a run wholly or not at all. Positions are counted in blocks of the grid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.sim.trace import TokenIds, Trace

Digests = NDArray[np.uint64]
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Run:
    """A run of blocks. `resumed_by` are the requests whose overlap with all before them ends where the run ends,
    `reused_by` those whose overlap has the run in it."""

    __slots__ = ("children", "digests", "end", "number", "parent", "resumed_by", "reused_by", "start")

    def __init__(self, parent: Run | None, start: int, digests: Digests) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(digests)
        self.digests = digests
        self.children: dict[int, Run] = {}
        self.resumed_by: list[int] = []
        self.reused_by: list[int] = []
        self.number = -1
        """Counted in no particular order, once all are there."""

    def next_resume(self, request: int) -> int | None:
        """The next request after `request` that would go on from its end."""
        return _after(self.resumed_by, request)

    def next_reuse(self, request: int) -> int | None:
        """The next request after `request` that has the run in common with earlier ones."""
        return _after(self.reused_by, request)


def _after(requests: list[int], request: int) -> int | None:
    at = bisect_right(requests, request)
    return requests[at] if at < len(requests) else None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRequest:
    """A request in the tree, in blocks: its path, how much a cache may find of it at most (a token stays to be
    computed), and `overlap`: how much of that some earlier request had."""

    path: tuple[Run, ...]
    limit: int
    overlap: int
    prompt_tokens: int


class Foresight:
    """A trace on a grid. `requests` are in its order; a run's number is below `num_runs`. The requests `refused`, by
    their number, never run: they find nothing and leave nothing."""

    def __init__(self, trace: Trace, grid: int, refused: Collection[int] = ()) -> None:
        trace.check_content()
        self.grid = grid
        roots: dict[str, Run] = {}
        ends: list[tuple[Run, int, int]] = []
        for number, request in enumerate(trace.requests):
            root = roots.setdefault(request.namespace, Run(None, 0, np.empty(0, np.uint64)))
            if number in refused:
                ends.append((root, 0, 0))
                continue
            digests = block_digests(trace.tokens(request), grid)
            limit = (request.prompt_tokens - 1) // grid
            end, seen = _insert(root, digests)
            overlap = min(seen, limit)
            _cut(end, limit)
            if overlap:
                _cut(end, overlap).resumed_by.append(number)
            ends.append((end, limit, overlap))
        self.num_runs = _number(roots.values())
        self.requests = tuple(
            PlacedRequest(_path(end), limit, overlap, request.prompt_tokens)
            for (end, limit, overlap), request in zip(ends, trace.requests, strict=True)
        )
        for number, placed in enumerate(self.requests):
            for run in placed.path:
                if run.end <= placed.overlap:
                    run.reused_by.append(number)

    @property
    def overlap_tokens(self) -> int:
        """What an infinite cache that can resume anywhere on the grid would have hit."""
        return sum(placed.overlap for placed in self.requests) * self.grid

    @property
    def prompt_tokens(self) -> int:
        return sum(placed.prompt_tokens for placed in self.requests)

    def points_after(self, number: int) -> list[int]:
        """Positions in tokens on the path of a request from which later requests will go on, ascending."""
        return [run.end * self.grid for run in self.requests[number].path if run.next_resume(number) is not None]


def block_digests(tokens: TokenIds, grid: int) -> Digests:
    """A 64-bit number for each whole block of tokens."""
    whole = tokens[: len(tokens) // grid * grid].astype(np.uint64).reshape(-1, grid) + np.uint64(1)
    powers = np.cumprod(np.full(grid, MULTIPLIER, np.uint64))
    sums: Digests = (whole * powers).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> np.uint64(31))


def _insert(root: Run, digests: Digests) -> tuple[Run, int]:
    """The run that ends where a request does, made where it is missing; and how many of its blocks were there."""
    run, at = root, 0
    while at < len(digests):
        child = run.children.get(int(digests[at]))
        if child is None:
            new = Run(run, at, digests[at:].copy())
            run.children[int(digests[at])] = new
            return new, at
        size = min(len(child.digests), len(digests) - at)
        different = child.digests[:size] != digests[at : at + size]
        same = int(different.argmax()) if different.any() else size
        run, at = (child if same == len(child.digests) else _split(child, child.start + same)), at + same
    return run, at


def _split(run: Run, position: int) -> Run:
    """Cut a run in two; the upper part is new and is returned. Requests that end with the run keep its lower part."""
    parent, size = run.parent, position - run.start
    assert parent is not None
    upper = Run(parent, run.start, run.digests[:size].copy())
    parent.children[int(upper.digests[0])] = upper
    run.digests = run.digests[size:].copy()
    run.parent, run.start = upper, position
    upper.children[int(run.digests[0])] = run
    return upper


def _cut(end: Run, position: int) -> Run:
    """The run on the path to `end` that ends at a position, split where it lies inside one."""
    run = end
    while run.parent is not None and run.start >= position:
        run = run.parent
    return run if run.end <= position else _split(run, position)


def _path(end: Run) -> tuple[Run, ...]:
    runs = []
    run = end
    while run.parent is not None:
        runs.append(run)
        run = run.parent
    return tuple(reversed(runs))


def _number(roots: Iterable[Run]) -> int:
    count, stack = 0, list(roots)
    while stack:
        run = stack.pop()
        run.number = count
        count += 1
        stack.extend(run.children.values())
    return count

"""What is remembered of rows that were evicted, so that a prompt that comes back to them is known."""

from __future__ import annotations

from collections.abc import Hashable

from kvweave.prefix.node import Point, Tokens

MOST_RUNS = 16384
"""So many runs are remembered, some hundreds of bytes each; the oldest are forgotten."""


class EvictedRun:
    """The rows of a leaf from some position on up to `end`, where a point was: its class, when it was used last, and
    its age when it came to wait. `hits` are those of the point; 0 where its run was cut before, or where nobody but the
    next turn of a conversation has asked for it: no prompts part there. `key` is a number of the first block, and
    `last_key`, where there are hits, of the last one."""

    def __init__(self, key: int, number: int, point: Point, grid: int) -> None:
        node = point.node
        self.key = key
        self.number = number
        self.hits = 0 if point.cut or (point.continued and point.hits == 1) else point.hits
        self.last_key = hash(node.tokens[-grid:].tobytes()) if self.hits else 0
        self.last_used = point.last_used
        self.began = point.queued - point.last_used
        self.end = node.end


class EvictedRuns:
    """Runs by a number of their first block, its place and its namespace. Numbers of 64 bits stand for tokens: two runs
    that are taken for one another cost a wrong guess of a policy, and no wrong KV."""

    def __init__(self, grid: int) -> None:
        self._grid = grid
        self._runs: dict[int, EvictedRun] = {}
        self._last: list[EvictedRun] = []
        """The last ones, a ring: `_next` is the oldest, and is replaced next."""
        self._next = 0

    def add(self, number: int, point: Point, start: int) -> list[EvictedRun]:
        """Of the leaf that a point of class `number` ends, the rows from `start` on go. Returns the runs that are
        forgotten for them."""
        node, grid = point.node, self._grid
        at, forgotten = start - node.start, list[EvictedRun]()
        key = hash((node.namespace, start, node.tokens[at : at + grid].tobytes()))
        run = EvictedRun(key, number, point, grid)
        before = self._runs.get(key)
        if before is not None:
            forgotten.append(before)
        self._runs[key] = run
        if len(self._last) < MOST_RUNS:
            self._last.append(run)
            return forgotten
        oldest, self._last[self._next] = self._last[self._next], run
        self._next = (self._next + 1) % MOST_RUNS
        if self._runs.get(oldest.key) is oldest:
            del self._runs[oldest.key]
            forgotten.append(oldest)
        return forgotten

    def take(self, namespace: Hashable, prompt: Tokens, start: int) -> list[EvictedRun]:
        """The runs behind `start`, one behind the other, of which a prompt would have found some rows; they are
        forgotten."""
        found, at, grid = list[EvictedRun](), start, self._grid
        while at + grid < len(prompt):
            run = self._runs.pop(hash((namespace, at, prompt[at : at + grid].tobytes())), None)
            if run is None:
                break
            found.append(run)
            at = run.end
        return found

    def has_end(self, prompt: Tokens, run: EvictedRun) -> bool:
        """Whether a prompt that has the first block of a run has its last one, too, and goes on."""
        end = run.end
        return end < len(prompt) and run.last_key == hash(prompt[end - self._grid : end].tobytes())

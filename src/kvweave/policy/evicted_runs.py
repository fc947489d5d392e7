"""What is remembered of rows that were evicted, so that a prompt that comes back to them is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

from kvweave.policy.hit_density import Life
from kvweave.prefix.node import Node, Point, Tokens
from kvweave.prefix.prompt import last_tokens, num_blocks_equal, token_bytes

MOST_RUNS = 16384
MOST_BYTES = 1 << 24
"""So many runs are remembered, some hundreds of bytes each, and so many bytes of tokens, 4 a block: the oldest are
forgotten."""


class EvictedRun(Life):
    """The rows of a leaf from `start` on up to `end`, where a point was: its class, when it was used last, and its age
    when it came to wait. `hits` are those of the point; 0 where its run was cut before, or where nobody but the next
    turn of a conversation has asked for it: no prompts part there. `key` is a number of the first block, `last_tokens`
    are the last token of each block, or nothing where it does not matter where a prompt leaves it."""

    def __init__(self, key: int, number: int, point: Point, node: Node, start: int, last_tokens: bytes) -> None:
        began = point.queued - point.last_used
        super().__init__(number, point.last_used, began, began)
        is_next_turn = point.continued and point.hits == 1
        self.key = key
        self.hits = 0 if point.cut or is_next_turn or point.node is not node else point.hits
        self.start = start
        self.end = node.end
        self.last_tokens = last_tokens
        self.left_at = node.end
        """Where the prompt that came back to it left it, or ended."""

    def leave_at(self, prompt: Tokens, grid: int) -> int:
        """Note where a prompt that has its first block leaves it; a token of the prompt stays to be computed."""
        if not self.last_tokens:
            return self.end
        self.left_at = self.start + num_blocks_equal(self.last_tokens, prompt, self.start, grid) * grid
        return self.left_at


class EvictedRuns:
    """Runs by a number of their first block, its place and its namespace. Numbers of 64 bits stand for tokens: two runs
    that are taken for one another cost a wrong guess of a policy, and no wrong KV."""

    def __init__(self, grid: int) -> None:
        self._grid = grid
        self._runs: dict[int, EvictedRun] = {}
        self._last: deque[EvictedRun] = deque()
        """The last ones, the oldest first, taken or not."""
        self._num_bytes = 0

    @property
    def going_on(self) -> Collection[EvictedRun]:
        """Those that no prompt came back to."""
        return self._runs.values()

    def add(self, number: int, point: Point, node: Node, start: int, has_places: bool) -> list[EvictedRun]:
        """With a point of class `number` go the rows of a leaf from `start` on; where prompts leave them matters if it
        `has_places`. Returns the runs that are forgotten for them."""
        grid = self._grid
        at, forgotten = start - node.start, list[EvictedRun]()
        key = hash((node.namespace, start, token_bytes(node.tokens, at, grid)))
        run = EvictedRun(key, number, point, node, start, last_tokens(node.tokens, at, grid) if has_places else b"")
        before = self._runs.setdefault(key, run)
        if before is not run:
            forgotten.append(before)
            self._runs[key] = run
        self._last.append(run)
        self._num_bytes += len(run.last_tokens)
        while len(self._last) > MOST_RUNS or self._num_bytes > MOST_BYTES:
            oldest = self._last.popleft()
            self._num_bytes -= len(oldest.last_tokens)
            if self._runs.get(oldest.key) is oldest:
                del self._runs[oldest.key]
                forgotten.append(oldest)
        return forgotten

    def take(self, namespace: Hashable, prompt: Tokens, start: int) -> list[EvictedRun]:
        """The runs behind `start`, one behind the other, of which a prompt would have found some rows, up to the one
        that it leaves; they are forgotten."""
        found, at, grid = list[EvictedRun](), start, self._grid
        while at + grid < len(prompt):
            run = self._runs.pop(hash((namespace, at, token_bytes(prompt, at, grid))), None)
            if run is None:
                break
            found.append(run)
            at = run.leave_at(prompt, grid)
            if at < run.end:
                break
        return found

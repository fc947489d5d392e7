"""The replay: the requests of a trace through `kvweave.Cache` itself, one at a time, in the order of their arrival.

Each is opened, computed in steps, committed, generates its output and is closed, as an engine would do it; ids alone
are kept, so that no model, no weights and no tensor is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.cache import Cache, Sequence
from kvweave.errors import NeverFits, OutOfPages
from kvweave.plan import Plan
from kvweave.policy import Policy
from kvweave.prefix import NEVER, Kind, Retention
from kvweave.sim.foresight import Foresight
from kvweave.sim.trace import Request, TokenIds, Trace

STEP_TOKENS = 8192
"""Tokens of a prompt that are computed in one step, where memory allows."""
SAMPLES = 200
"""How often occupancy is looked at."""
NO_POINTS = Retention(prompt_end=False, branches=False, every=0, decode_every=NEVER)

Counts = NDArray[np.int64]
OnRequest = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bytes of cached pages by group, after a request."""

    request: int
    cached_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Results by request: tokens hit; tokens of which rows were there, hit or not; the kind of point that was
    hit (-1: none); whether it was refused, as engines do before its first step, for it never fits."""

    hits: Counts
    rows: Counts
    kinds: NDArray[np.int8]
    refused: NDArray[np.bool_]
    occupancy: tuple[Occupancy, ...]
    evicted_bytes: int
    seconds: float

    @property
    def hit_tokens(self) -> int:
        return int(self.hits.sum())

    @property
    def refused_requests(self) -> frozenset[int]:
        """The numbers of the requests that were refused."""
        return frozenset(np.flatnonzero(self.refused).tolist())

    def hits_by_kind(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens that were hit at each kind of point; `between`: at none, windows happened to suffice."""
        names = {int(kind): kind.name.lower() for kind in Kind} | {-1: "between"}
        found = {}
        for number, name in names.items():
            mine = (self.kinds == number) & (self.hits > 0)
            found[name] = (int(mine.sum()), int(self.hits[mine].sum()))
        return {name: counts for name, counts in found.items() if counts[0]}


def replay(
    trace: Trace,
    plan: Plan,
    *,
    policy: str | Policy = "adaptive",
    retention: Retention | None = None,
    placement: Foresight | None = None,
    step_tokens: int = STEP_TOKENS,
    whole_outputs: bool = True,
    refused: Collection[int] = (),
    on_request: OnRequest | None = None,
) -> Replay:
    """Replay a trace on a cache over `plan`. With `placement`, on the same grid, the cache leaves resume points only
    where later requests will go on, and shares nothing behind the last of them. The requests `refused`, by their
    number, do not run, whether they fit or not.

    An engine that takes the same steps hits the same tokens. It generates token by token, which evicts as steps of a
    block do; `whole_outputs` takes an output in one step where there are no windows: faster, and where memory is short
    some hits are others (at most 1.6% in sum in 64 GB, on Mooncake's conversations)."""
    trace.check_content()
    start = time.perf_counter()
    retention = NO_POINTS if placement else retention
    with Cache(plan, policy=policy, retention=retention, rows=2, max_tokens=max(1, trace.longest)) as cache:
        replayer = _Replayer(cache, trace, step_tokens, whole_outputs, placement)
        every = max(1, len(trace.requests) // SAMPLES)
        for number, request in enumerate(trace.requests):
            if number in refused:
                replayer.refused[number] = True
            else:
                replayer.request(number, request)
            if number % every == 0:
                replayer.look(number)
            if on_request is not None:
                on_request()
        return replayer.outcome(time.perf_counter() - start)


class _Replayer:
    def __init__(
        self, cache: Cache, trace: Trace, step_tokens: int, whole_outputs: bool, placement: Foresight | None
    ) -> None:
        self.cache, self.trace, self.step_tokens, self.placement = cache, trace, step_tokens, placement
        count = len(trace.requests)
        self.hits, self.rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.kinds, self.refused = np.full(count, -1, np.int8), np.zeros(count, np.bool_)
        self.occupancy: list[Occupancy] = []
        groups = cache.state.groups
        self._sizes = [group.page_bytes if group.has_pages else 0 for group in groups]
        self._has_points = bool(cache.state.windows or cache.state.states)
        """Whether points matter; with rows alone every position is one."""
        whole = whole_outputs and not cache.state.windows  # windows move on with every grid of tokens
        self._decode_step = max(1, trace.longest) if whole else cache.grid

    def request(self, number: int, request: Request) -> None:
        tokens = self.trace.tokens(request)
        prompt = tokens[: request.prompt_tokens]
        try:
            self.cache.check_fits(len(tokens))
        except NeverFits:
            self.refused[number] = True
            return
        if self._has_points:
            self.kinds[number] = self._kind(prompt, request.namespace)
        points = None if self.placement is None else self.placement.points_after(number)
        sequence = self.cache.open(prompt, namespace=request.namespace, points=points)
        self.hits[number] = sequence.num_cached
        self.rows[number] = max(sequence.num_cached, sequence.branch)
        try:
            self._compute(sequence, tokens, points)
        except OutOfPages:  # in a few super-pages a promised length can be refused (docs/measurements/core.md)
            self.hits[number], self.rows[number] = 0, 0
            self.kinds[number], self.refused[number] = -1, True
        self.cache.close(sequence)

    def _kind(self, prompt: TokenIds, namespace: str) -> int:
        """The kind of the point that a prompt will hit; being hit makes a branch of it."""
        tree = self.cache.state.prefix.tree
        match = tree.match(namespace, prompt)
        hit = tree.hit(match, len(prompt) - 1)
        for node in reversed(match.node.path() if match.node is not None else []):
            if node.start < hit <= node.end:
                point = node.point_at(hit)
                return -1 if point is None else int(point.kind)
        return -1

    def _compute(self, sequence: Sequence, tokens: TokenIds, points: list[int] | None) -> None:
        """Compute a request; with points, tokens after the last of them are not shared."""
        shared = len(tokens) if points is None else max([sequence.num_cached, *points])
        if shared < len(tokens):
            self._run(sequence, sequence.num_cached, shared, tokens)
            self.cache.commit(sequence, share=False)
        self._run(sequence, sequence.length, len(tokens), tokens)

    def _run(self, sequence: Sequence, start: int, end: int, tokens: TokenIds) -> None:
        """Compute the tokens [start, end): those of the prompt in steps, then those that are generated."""
        start = self._steps(sequence, start, min(end, sequence.num_prompt))
        while start < end:
            until = min(end, (start // self._decode_step + 1) * self._decode_step)
            self._extend(sequence, until - start, tokens[start:until])
            start = until

    def _steps(self, sequence: Sequence, start: int, end: int) -> int:
        """Compute a part of the prompt, in steps that end where a state is wanted, as those of engines do."""
        while start < end:
            start = self._step(sequence, start, min(end, start + self.step_tokens, sequence.stop or end))
        return start

    def _step(self, sequence: Sequence, start: int, end: int) -> int:
        """A step towards `end`, shorter where memory, or windows, have no room for it. Returns where it ends."""
        while True:
            try:
                self._extend(sequence, end - start, None)
                return end
            except (NeverFits, OutOfPages):
                if end - start == 1:
                    raise
                end = (start + end + 1) // 2

    def _extend(self, sequence: Sequence, count: int, tokens: TokenIds | None) -> None:
        """One step. Iterating over the copies takes them over; a replay has no bytes to copy."""
        iter(self.cache.extend(sequence, count, tokens=tokens, checkpoints=True))
        iter(self.cache.commit(sequence))

    def look(self, number: int) -> None:
        counts = (pages.num_cached for pages in self.cache.state.pages)
        sizes = tuple(count * size for count, size in zip(counts, self._sizes, strict=True))
        self.occupancy.append(Occupancy(number, sizes))

    def outcome(self, seconds: float) -> Replay:
        evicted = (pages.num_evicted for pages in self.cache.state.pages)
        gone = sum(count * size for count, size in zip(evicted, self._sizes, strict=True))
        columns = (self.hits, self.rows, self.kinds, self.refused)
        return Replay(*columns, tuple(self.occupancy), gone, seconds)

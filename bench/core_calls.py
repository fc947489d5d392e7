"""Lives of a cache in which every public call is timed, one call at a time; bench/core_scaling.py reports them.

A life is a function of a `CallTimes`: it makes a cache, brings it to some size, and has its calls timed. It does the
same whenever it is run, so that the calls of several runs can be compared one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench.core_vs_vllm import PAGE_BYTES, VOCABULARY, Tokens
from kvweave.cache import Batch, Cache
from kvweave.cache import Sequence as Running
from kvweave.errors import CacheError
from kvweave.plan import Plan, make_plan
from kvweave.spec import DType, Full, Layer, LayerCache, ModelSpec, Reach, Role, State, Window

BLOCK = 16
FAMILY = 8
"""So many prompts in a row share their first block."""


class Kinds(NamedTuple):
    """Groups of a model, and how many pages of the others a page of a state is as large as."""

    reaches: tuple[Reach, ...]
    state_pages: int = 1


CONFIGS = {
    "full": Kinds((Full(),)),
    "full + window": Kinds((Full(), Window(128))),
    "full + state": Kinds((Full(), State())),
    "full + 2 windows + state": Kinds((Full(), Window(64), Window(256), State())),
    "full + state of 64 pages": Kinds((Full(), State()), 64),
}
"""Windows are short, so that they move on in short lives."""


def num_pages(kinds: Kinds, blocks: int, states: int, step: int = 1) -> int:
    """Pages, of those that are not states, that so many blocks and states take; windows only hold what they need."""
    pages = 0
    for kind in kinds.reaches:
        if isinstance(kind, State):
            pages += states * kinds.state_pages
        else:
            pages += blocks if kind.span is None else min(blocks, (kind.span + step) // BLOCK + 2)
    return pages


def plan_of(kinds: Kinds, pages: int, block: int = BLOCK) -> Plan:
    """A plan for so many pages, of those that are not states."""
    rows = [block * 1024 * kinds.state_pages if isinstance(kind, State) else 1024 for kind in kinds.reaches]
    roles = [Role("kv", (row,), DType("bfloat16")) for row in rows]
    caches = [
        LayerCache(f"g{i}", kind, (role,)) for i, (kind, role) in enumerate(zip(kinds.reaches, roles, strict=True))
    ]
    spec = ModelSpec("bench", tuple(Layer((cache,)) for cache in caches))
    return make_plan(spec, (pages + kinds.state_pages) * PAGE_BYTES * block // BLOCK, block_tokens=block)


class CallTimes:
    """CPU time of this thread in each call, in microseconds, by the name of the call and what the cache was like."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}
        self.tokens: dict[str, int] = {}
        """Tokens that a call of this name has to touch."""
        self.enter("")

    def enter(self, phase: str, tokens: int = 0) -> None:
        """From now on the cache is like this, and a call has to touch so many tokens."""
        self.phase = phase
        self._tokens = tokens

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.thread_time_ns()
        try:
            result = call(*args, **options)
        except CacheError as error:
            result = error
        taken, claim = (time.thread_time_ns() - start) / 1e3, f"{name}, {self.phase}"
        self.us.setdefault(claim, []).append(taken)
        self.tokens[claim] = self._tokens
        if isinstance(result, CacheError) != name.endswith("refused"):
            raise AssertionError(f"{claim}: {result!r}")
        copies = result[1] if isinstance(result, tuple) else result
        if hasattr(copies, "taken"):
            list(copies)  # an engine would carry them out
        return result


class Life:
    """A cache, its clock, and prompts that are never the same."""

    def __init__(self, times: CallTimes, cache: Cache) -> None:
        self.times = times
        self.cache = cache
        self.random = np.random.default_rng(1)
        self.num_served = 0
        self.family = self.tokens(BLOCK)

    def tokens(self, count: int) -> Tokens:
        return self.random.integers(0, VOCABULARY, count).astype(np.int32)

    def prompt(self, count: int) -> Tokens:
        """A prompt that shares its first block with its family."""
        if self.num_served % FAMILY == 0:
            self.family = self.tokens(BLOCK)
        self.num_served += 1
        return np.concatenate([self.family, self.tokens(count - BLOCK)])

    # ---- one request

    def start(self, tokens: Tokens) -> Running:
        """A prompt up to its last token."""
        sequence: Running = self.times("open cold", self.cache.open, tokens)
        self.prefill(sequence)
        return sequence

    def prefill(self, sequence: Running) -> None:
        while left := sequence.num_prompt - sequence.length:
            step = min(left, 8192)
            self.times("extend prompt", self.cache.extend, sequence, step, checkpoints=True)
            self.times("commit prompt", self.cache.commit, sequence)

    def step(self, sequence: Running) -> None:
        self.times("extend one", self.cache.extend, sequence, 1, tokens=[1])
        self.times("commit one", self.cache.commit, sequence)

    def serve(self, tokens: Tokens) -> None:
        sequence = self.start(tokens)
        self.step(sequence)
        self.times("close", self.cache.close, sequence)

    def serve_quietly(self, tokens: Tokens) -> None:
        """A request whose calls are not timed."""
        times, self.times = self.times, CallTimes()
        self.serve(tokens)
        self.times = times

    # ---- every call there is

    def every_call(self) -> None:
        tokens = self.prompt(6 * BLOCK + 8)
        self.times("check_fits", self.cache.check_fits, len(tokens))
        twin = self.cache.open(tokens)
        sequence = self.start(tokens)
        self.times("rematch", self.cache.rematch, twin)
        self.times("close of what waits", self.cache.close, twin)
        self.drafts(sequence)
        self.beams(sequence)
        self.times("lookup", self.cache.lookup, tokens)
        self.times("unpin", self.cache.unpin, self.times("pin", self.cache.pin, tokens))
        self.times("close of a hit", self.cache.close, self.times("open warm", self.cache.open, tokens))
        self.load()
        self.times("publish", self.cache.publish)
        self.times("stats", self.cache.stats)
        for tag in [group.tag for group in self.cache.plan.groups]:
            self.times("take_changed_rows", self.cache.take_changed_rows, tag)

    def drafts(self, sequence: Running) -> None:
        """Two of three tokens are drafts, one of which is rejected; once by accept, once by truncate."""
        for name, call in (("accept", self.cache.accept), ("truncate", self.cache.truncate)):
            self.times("extend drafts", self.cache.extend, sequence, 3, tokens=[1, 2, 3], drafts=2)
            self.times("slot_mapping", self.cache.slot_mapping, sequence)
            self.times(name, call, sequence, sequence.length - 1)
            self.times("commit one", self.cache.commit, sequence)

    def beams(self, sequence: Running) -> None:
        children, _ = self.times("fork", self.cache.fork, sequence, 3)
        beams = [sequence, *children]
        self.times("reorder", self.cache.reorder, beams, [0, 0, 1, 3])
        batch = Batch(beams)
        for _ in range(3):
            self.times("extend batch", self.cache.extend, batch, 1, tokens=self.tokens(len(beams)))
            self.times("commit batch", self.cache.commit, batch)
        for beam in beams:
            self.times("close", self.cache.close, beam)

    def load(self) -> None:
        tokens = self.prompt(6 * BLOCK + 8)
        sequence = self.times("open cold", self.cache.open, tokens)
        self.times("load_to", self.cache.load_to, sequence, 6 * BLOCK)
        self.times("commit of what was loaded", self.cache.commit, sequence)
        self.times("close without keep", self.cache.close, sequence, keep=False)

    # ---- filling

    def is_full(self) -> bool:
        """Requests evict: what is free then is less than one of them takes, and seldom nothing."""
        return all(pool.free_superpages <= 2 * BLOCK for pool in self.cache.stats().pools)

    def fill(self, until: Callable[[], bool]) -> None:
        while not until():
            for _ in range(16):
                self.serve(self.prompt(2 * BLOCK + 8))


def with_nodes(kinds: Kinds, nodes: int, times: CallTimes) -> None:
    """Every call with so many nodes in the tree, before the pool is full and when it is."""
    life = Life(times, Cache(plan_of(kinds, nodes * num_pages(kinds, 1, 1)), rows=64, max_tokens=1024))
    times.enter(f"while {nodes} nodes are made")
    life.fill(lambda: life.cache.stats().nodes > 0.8 * nodes or life.is_full())
    times.enter(f"{nodes} nodes")
    for _ in range(30):
        life.every_call()
    times.enter(f"while {nodes} nodes are made")
    life.fill(life.is_full)
    times.enter(f"{nodes} nodes, pool full")
    for _ in range(30):
        life.every_call()
        for _ in range(10):
            life.serve(life.prompt(2 * BLOCK + 8))
    found = life.cache.stats().nodes
    assert 0.4 * nodes < found < 2 * nodes, f"{found} nodes where {nodes} were to be measured"

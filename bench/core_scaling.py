"""What every public call of the core costs as the cache grows: the worst single call, and the median.

    nodes       1k, 10k, 100k nodes in the tree, before the pool is full and when every request evicts
    sequences   256, 1k, 10k open sequences, decoding as one batch; then the same in a full pool
    held        sequences that hold nearly all pages, one of which grows until it is refused
    of a length sequences that need a page and pass a point in the same step
    twins       sequences of one prompt, all opened before the first has committed; more of them than rows
    turns       a chat of 1k, 4k turns, each a hit on the one before, in a row or with a branch at every turn; then
                requests under which it is evicted
    of a token  blocks of one token, a node each: one extend takes the pages of 1,500 nodes
    128k        a prompt cold and warm, and after every prefix of it was asked for; 16k parted at every block
    points      64k tokens with a resume point at every block
    warm 8k     as before: the best time of a hit in a pool of 10k, 100k, 1M pages full of other prompts (ours: open;
                vLLM: Request with hashes, lookup, touch), and the metadata of a cached page (tracemalloc)

`ours` is the worst call in microseconds, `median` that of all calls of the name. The goal is 1 ms for each single call,
except those that have to touch 100k tokens or more; `goal` is null there. Calls above it are listed at the end, and
the exit status is 1.

Noise: time is CPU time of this thread (time.thread_time), with Python's collector off. Each life is repeated
from the same seed, so the n-th call of one run does the work of the n-th call of every other; its time is the least of
them. A call that is slow for a reason is slow each time and stays; an interrupt or a cold cache is not. What remains is
first contact with memory, which is the call's own.

Run: make bench NAME=core_scaling, which brings vLLM and a compiled core, or anywhere: python -m bench.core_scaling
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from bench import core_vs_vllm
from bench.core_batches import pool_held, rows_in_step, twins, with_sequences
from bench.core_calls import CONFIGS, CallTimes, Kinds, with_nodes
from bench.core_long import (
    LONG,
    chat,
    dense_points,
    long_prompt,
    one_token_blocks,
    parted_everywhere,
    split_everywhere,
)
from bench.core_vs_vllm import (
    BLOCK,
    CHUNK,
    HAS_VLLM,
    VLLM,
    Ours,
    StridedBlocks,
    Timer,
    filled,
    random_tokens,
    run_prompt,
)

GOAL_US, FREE_TOKENS = 1000.0, 100_000
POOLS = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
MEASURED = ("full", "full + 2 windows + state")
Run = Callable[[CallTimes], None]


class Figure(NamedTuple):
    claim: str
    ours: float
    median: float | None
    peer: float | None
    unit: str
    goal: float | None

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and self.ours > self.goal

    def line(self) -> str:
        ratio = None if self.peer is None else round(self.peer / self.ours, 2)
        return json.dumps({**self._asdict(), "ours": round(self.ours, 1), "ratio": ratio})

    def row(self) -> str:
        median = "-" if self.median is None else f"{self.median:,.0f}"
        return f"{self.claim:<90} {self.ours:>10,.0f} {median:>10} {self.unit}"


# ---- every call


def measured(name: str, life: Run, rounds: int) -> Iterator[Figure]:
    """The calls of a life, each the least of its times in several runs."""
    runs = []
    for _ in range(rounds):
        times = CallTimes()
        life(times)
        runs.append(times)
        gc.collect()
    for claim in runs[0].us:
        calls = [min(same) for same in zip(*(run.us[claim] for run in runs), strict=True)]
        goal = None if runs[0].tokens[claim] >= FREE_TOKENS else GOAL_US
        yield Figure(f"{claim}, {name}", max(calls), round(statistics.median(calls), 1), None, "us", goal)


def lives(kinds: Kinds, quick: bool) -> Iterator[Run]:
    for nodes in (1000, 10_000) if quick else (1000, 10_000, 100_000):
        yield partial(with_nodes, kinds, nodes)
    for count in (256, 1000) if quick else (256, 1000, 10_000):
        yield from (partial(life, kinds, count) for life in (with_sequences, pool_held, rows_in_step, twins))
    yield partial(one_token_blocks, kinds, 1500)
    yield partial(split_everywhere, kinds, LONG)
    yield partial(parted_everywhere, kinds, LONG // 8)
    yield partial(dense_points, kinds, LONG // 2)
    yield partial(long_prompt, kinds, LONG)
    for turns in (1000,) if quick else (1000, 4000):
        yield partial(chat, kinds, turns, branches=False)
        yield partial(chat, kinds, turns, branches=True)


# ---- a warm hit, in pools of all sizes


def warm_us(side: StridedBlocks, rounds: int) -> list[float]:
    """The times of a hit on a prompt that was served before."""
    tokens = random_tokens(CHUNK, seed=1_000_000)
    side.close(run_prompt(side, tokens))
    times = []
    for _ in range(rounds):
        given = side.prepare(tokens)
        with Timer() as timer:
            request = side.open(given)
            side.hold(request)
        assert side.hit(request) == CHUNK - BLOCK, f"{side.hit(request)} of {CHUNK} tokens were found"
        times.append(timer.us)
        side.close(request)
    return times


def warm_hits(pools: dict[str, int], rounds: int) -> Iterator[Figure]:
    for name in MEASURED:
        kinds = core_vs_vllm.CONFIGS[name]
        for size, pages in pools.items():
            side, num_bytes = filled(partial(Ours, kinds, pages, rows=1, max_tokens=CHUNK), pages)
            us, peer_us, peer_bytes = warm_us(side, rounds), None, None
            if HAS_VLLM:
                peer, peer_bytes = filled(partial(VLLM, kinds, pages), pages)
                peer_us = min(warm_us(peer, rounds))
            yield Figure(
                f"warm 8k in {size} pages, best, {name}", min(us), statistics.median(us), peer_us, "us", GOAL_US
            )
            yield Figure(f"metadata of a cached page, {size} pages, {name}", num_bytes, None, peer_bytes, "bytes", None)
            gc.collect()


# ---- all of it


def figures(configs: list[str], rounds: int, quick: bool) -> Iterator[Figure]:
    for name in configs:
        for life in lives(CONFIGS[name], quick):
            yield from measured(name, life, rounds)
    yield from warm_hits({size: pages for size, pages in POOLS.items() if not quick or pages < 1_000_000}, rounds=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest sizes, and each life once")
    parser.add_argument("--rounds", type=int, default=2, help="how often each life is run")
    parser.add_argument("--only", choices=CONFIGS, help="one configuration")
    options = parser.parse_args()
    gc.disable()
    found = []
    configs = [options.only] if options.only else list(CONFIGS)
    for figure in figures(configs, 1 if options.quick else options.rounds, options.quick):
        print(figure.line(), flush=True)
        found.append(figure)
    missed = sorted((figure for figure in found if figure.is_missed), key=lambda figure: -figure.ours)
    print(f"\n{len(missed)} of {len(found)} figures are above the goal of {GOAL_US:,.0f} us", file=sys.stderr)
    print("\n".join(figure.row() for figure in missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The cost of a warm hit does not grow with the pool: 10k, 100k, 1M pages full of other prompts.

A pool is filled with closed prompts of 8,192 tokens, then one more is asked for again and again: the best CPU time of
this thread from its tokens to a held hit (ours: open; vLLM: Request with hashes, lookup, touch). Metadata is what
tracemalloc saw when the pool was full, a cached page. Without vLLM installed its figures are null.

Run: make bench NAME=core_scaling, which brings vLLM, or anywhere: python -m bench.core_scaling
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator

from bench.core_vs_vllm import (
    BLOCK,
    CHUNK,
    CONFIGS,
    HAS_VLLM,
    VLLM,
    Figure,
    Kinds,
    Ours,
    Side,
    Timer,
    filled,
    random_tokens,
    report,
    run_prompt,
)

POOLS = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
MEASURED = ("full", "full + 2 windows + state")


def warm_us(side: Side, rounds: int) -> float:
    """The best time of a hit on a prompt that was served before."""
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
    return min(times)


def at_size(kinds: Kinds, pages: int, rounds: int) -> tuple[list[float], list[float | None]]:
    """Time of a hit and bytes a page, ours and vLLM's."""
    side, num_bytes = filled(lambda: Ours(kinds, pages, rows=1, max_tokens=CHUNK), pages)
    ours = [warm_us(side, rounds), num_bytes]
    if not HAS_VLLM:
        return ours, [None, None]
    side, num_bytes = filled(lambda: VLLM(kinds, pages), pages)
    return ours, [warm_us(side, rounds), num_bytes]


def figures(pools: dict[str, int], rounds: int) -> Iterator[Figure]:
    for name in MEASURED:
        for size, pages in pools.items():
            ours, peer = at_size(CONFIGS[name], pages, rounds)
            yield Figure(f"warm 8k in {size} pages, {name}", ours[0], peer[0], "us")
            yield Figure(f"metadata of a cached page, {size} pages, {name}", ours[1], peer[1], "bytes")
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the pool of a million pages")
    quick = parser.parse_args().quick
    gc.disable()
    report(figures({size: pages for size, pages in POOLS.items() if not quick or pages < 1_000_000}, rounds=100))


if __name__ == "__main__":
    main()

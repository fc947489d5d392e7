"""Traces through vLLM's KV cache manager and through ours, with the same pages: what each hits, and how fast.

Both are driven as in core_vs_vllm: blocks of 16 tokens, one pool of equal pages for all groups, requests one at a time
in the order of their arrival, whole blocks of prompts only. Time is this thread's CPU time of opening, prefilling and
closing; tokens are prepared before. `--pages`: 64 GB are 30,517 pages of Llama-3.1-8B.

Run: python -m bench.reuse_vs_vllm TRACE... [--pages 30517] [--sample 0.25]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator

from bench.core_vs_vllm import CONFIGS, VLLM, Ours, StridedBlocks
from kvweave.sim import Reading, Trace, read_trace

NAMES = ("full", "full + window", "full + 3 states")


def replayed(side: StridedBlocks, trace: Trace) -> tuple[float, float]:
    """The share of prompt tokens that it finds, and requests a second."""
    hits, seconds = 0, 0.0
    for request in trace.requests:
        tokens = side.prepare(trace.tokens(request)[: request.prompt_tokens])
        start = time.thread_time()
        opened = side.open(tokens)
        side.prefill(opened)
        side.close(opened)
        seconds += time.thread_time() - start
        hits += side.hit(opened)
    return hits / trace.prompt_tokens, len(trace.requests) / seconds


def figures(trace: Trace, pages: int) -> Iterator[dict[str, object]]:
    for name in NAMES:
        kinds = CONFIGS[name]
        sides: dict[str, StridedBlocks] = {
            "ours": Ours(kinds, pages),
            "ours, lru": Ours(kinds, pages, policy="lru"),
            "peer": VLLM(kinds, pages),
        }
        found = {side: replayed(cache, trace) for side, cache in sides.items()}
        for at, unit in enumerate(("share", "requests/s")):
            numbers = {side: round(result[at], 4) for side, result in found.items()}
            ratio = round(found["ours"][at] / found["peer"][at], 3)
            yield {"claim": f"{trace.name}, {name}, {pages} pages", "unit": unit, **numbers, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--pages", type=int, action="append")
    parser.add_argument("--sample", type=float, default=1.0)
    asked = parser.parse_args()
    gc.disable()
    for path in asked.traces:
        trace = read_trace(path, reading=Reading(way="blocks")).sample(asked.sample)
        for pages in asked.pages or [30_517]:
            for line in figures(trace, pages):
                print(json.dumps(line), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()

"""Memory of a cache after many requests over many namespaces, with images: `python scripts/flat_memory.py`.

Each request is a short prompt with an image (a span of random bytes, so it is never the same) in one of `--namespaces`
namespaces, taken at random; it is opened, computed, decoded for a step and closed. The pool is small, so almost all of
it has been evicted again. Printed as JSON lines: resident bytes of the process, bytes that tracemalloc saw (unless
`--resident-only`: tracing makes it three times slower), namespaces and nodes that are left. Requests before the first
line are the warm-up: caches that are bounded fill up. Exits with 1 if memory grew by more than `--tolerance` after it.

The allocator (glibc's) is told to map and unmap large blocks one by one, and to give back what it can before it is
looked at. By itself it takes a block that is freed and allocated again from its heap from some time on: so resident
bytes would grow once, by the table of contents (5 MB), which is made anew every 100,000 requests.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

TOKENS = 40
LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD, LARGE = -3, 1 << 17
"""An option of glibc's `mallopt`, and its value at the start of a process. It stays where it is once it was set."""


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def serve(cache: Any, random: np.random.Generator, namespace: int, image_bytes: int) -> None:
    from kvweave.prefix import Span

    tokens = random.integers(0, 100_000, TOKENS).astype(np.int32)
    sequence = cache.open(
        tokens, namespace=namespace, spans=[Span(int(random.integers(0, TOKENS)), random.bytes(image_bytes))]
    )
    list(cache.extend(sequence, TOKENS - sequence.length, checkpoints=True))
    list(cache.commit(sequence))
    list(cache.extend(sequence, 1, tokens=[1]))
    list(cache.commit(sequence))
    cache.close(sequence)


def report(cache: Any, requests: int, traced: bool, start: float) -> int:
    """Print what there is now; returns the bytes that must not grow."""
    gc.collect()
    LIBC.malloc_trim(0)
    stats, resident = cache.stats(), resident_bytes()
    traced_bytes = tracemalloc.get_traced_memory()[0] if traced else None
    found = {
        "requests": requests,
        "resident_bytes": resident,
        "traced_bytes": traced_bytes,
        "namespaces": len(cache.state.prefix.tree.roots),
        "nodes": stats.nodes,
        "evicted_pages": stats.evicted_pages,
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(found), flush=True)
    return resident if traced_bytes is None else traced_bytes


def main() -> int:
    from bench.core_calls import CONFIGS, plan_of
    from kvweave.cache import Cache

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--namespaces", type=int, default=100_000)
    parser.add_argument("--image-bytes", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=4000)
    parser.add_argument("--kinds", choices=CONFIGS, default="full + 2 windows + state")
    parser.add_argument("--resident-only", action="store_true")
    parser.add_argument("--tolerance", type=float, default=0.02, help="share by which memory may grow")
    options = parser.parse_args()
    random, start = np.random.default_rng(1), time.perf_counter()
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGE)
    if not options.resident_only:
        tracemalloc.start()
    cache = Cache(plan_of(CONFIGS[options.kinds], options.pages), rows=8, max_tokens=1024)
    lines, done = [], 0
    for end in options.requests:
        for _ in range(done, end):
            serve(cache, random, int(random.integers(0, options.namespaces)), options.image_bytes)
        done = end
        lines.append(report(cache, done, not options.resident_only, start))
    print(f"after the warm-up memory grew by {lines[-1] / lines[0] - 1:+.2%}", file=sys.stderr)
    return 1 if lines[-1] > lines[0] * (1 + options.tolerance) else 0


if __name__ == "__main__":
    sys.exit(main())

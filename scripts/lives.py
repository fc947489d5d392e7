"""Random lives of the core against its oracles, as long as you like: `python scripts/lives.py --seeds 0 10000`.

Each seed is a plan and `--steps` random operations on it (tests/cache/lives.py). Prints how many operations of each
kind were done, and for each kind of failure the seeds with the shortest lives; exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> int:
    from tests.cache.lives import Life

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 1000), metavar=("FIRST", "LAST"))
    parser.add_argument("--steps", type=int, default=100, help="operations a life")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failures: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    start = time.perf_counter()
    for seed in range(*options.seeds):
        life = Life(seed)
        try:
            life.run(options.steps)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} in {where.name}, line {where.lineno}: {error}"
            failures[what].append((sum(life.counts.values()), seed))
        counts.update(life.counts)
    print(f"{sum(counts.values())} steps in {time.perf_counter() - start:.0f} s: {dict(counts)}")
    for what, lives in failures.items():
        print(f"{len(lives)} x {what}; shortest lives (steps, seed): {sorted(lives)[:3]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

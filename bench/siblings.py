"""First siblings: what the second of two prompts that share any number of tokens finds of them, for state models.

A prompt of the shared tokens and 200 to 3,000 of its own, then one that shares them and goes on differently, then a
third; shared lengths are uniform from 300 to 5,000. Memory is ample, or full of other prompts. Figures are shares of
the shared tokens.

Run: python -m bench.siblings [--trials 300] [--full]
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from kvweave import Cache, from_config, make_plan

MODELS = ("qwen3-next-80b", "nemotron-nano-9b-v2")
SHARED, OWN = (300, 5000), (200, 3000)


def run(cache: Cache, tokens: NDArray[np.int32]) -> int:
    """Tokens that a prompt finds."""
    sequence = cache.open(tokens)
    iter(cache.extend(sequence, len(tokens) - sequence.num_cached, checkpoints=True))
    iter(cache.commit(sequence))
    cache.close(sequence)
    return sequence.num_cached


def fill(cache: Cache, rng: np.random.Generator) -> None:
    """Other prompts, until something had to be evicted."""
    while not cache.stats().evicted_pages:
        run(cache, rng.integers(0, 10**6, 16000).astype(np.int32))


def figures(model: str, trials: int, *, is_full: bool) -> dict[str, object]:
    spec, rng = from_config(str(files("kvweave") / "examples" / f"{model}.json")), np.random.default_rng(0)
    shared, found = np.empty(trials), np.empty((trials, 2))
    with Cache(make_plan(spec, "64GB"), rows=2, max_tokens=16384) as cache:
        for trial in range(trials):
            if is_full:
                fill(cache, rng)
            else:
                cache.reset()
            prefix = rng.integers(0, 10**6, rng.integers(*SHARED))
            prompts = [np.append(prefix, rng.integers(0, 10**6, rng.integers(*OWN))).astype(np.int32) for _ in range(3)]
            hits = [run(cache, prompt) for prompt in prompts]
            shared[trial], found[trial] = len(prefix), hits[1:]
    none = [round(float((found[:, at] == 0).mean()), 3) for at in (0, 1)]
    share = [round(float(found[:, at].sum() / shared.sum()), 3) for at in (0, 1)]
    return {"claim": f"siblings, {model}", "unit": "share", "second": share[0], "third": share[1], "find nothing": none}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--full", action="store_true")
    asked = parser.parse_args()
    for model in MODELS:
        print(json.dumps(figures(model, asked.trials, is_full=asked.full)), flush=True)


if __name__ == "__main__":
    main()

"""What the default policy costs: processor time of a request under eviction, beside `lru`, on four models.

Requests begin with one of 200 prefixes of 2,048 tokens (Zipf), and have 512 to 3,583 tokens of their own; one at a
time, in memory that is full after a third of them. Both policies take turns, 200 requests each; the best turn counts.
The default hits more, and a hit is work as well: the tokens that both hit are beside the figures.

Run, with the core compiled: python -m bench.core_policies
"""

from __future__ import annotations

import json
import time
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

import kvweave.prefix.tree as core
from kvweave import Cache, from_config, make_plan
from kvweave.units import parse_bytes

MODELS = {"qwen3-next-80b": "16GB", "gemma-3-27b": "40GB", "gpt-oss-120b": "20GB", "llama-3.1-8b": "40GB"}
REQUESTS, TURN, WARM = 2400, 200, 800
PREFIXES, PREFIX, OWN = 200, 2048, (512, 3584)

Prompt = NDArray[np.int32]


def requests() -> list[Prompt]:
    random = np.random.default_rng(1)
    prefixes = random.integers(0, 50_000, (PREFIXES, PREFIX), np.int32)
    popularity = 1 / np.arange(1, PREFIXES + 1)
    chosen = random.choice(PREFIXES, REQUESTS, p=popularity / popularity.sum())
    return [
        np.concatenate([prefixes[number], random.integers(0, 50_000, own, np.int32)])
        for number, own in zip(chosen, random.integers(*OWN, REQUESTS), strict=True)
    ]


def serve(cache: Cache, prompt: Prompt) -> int:
    """How many of its tokens are found."""
    with cache.open(prompt) as sequence:
        list(cache.extend(sequence, len(prompt) - sequence.num_cached, checkpoints=True))
        list(cache.commit(sequence))
        return sequence.num_cached


def main() -> None:
    prompts = requests()
    for model, memory in MODELS.items():
        plan = make_plan(from_config(str(files("kvweave") / "examples" / f"{model}.json")), parse_bytes(memory))
        caches = {name: Cache(plan, policy=name, rows=2, max_tokens=8192) for name in ("adaptive", "lru")}
        least, found = dict.fromkeys(caches, float("inf")), dict.fromkeys(caches, 0)
        for first in range(0, REQUESTS, TURN):
            for name, cache in caches.items():
                began = time.thread_time()
                hit = sum(serve(cache, prompt) for prompt in prompts[first : first + TURN])
                if first >= WARM:
                    least[name] = min(least[name], (time.thread_time() - began) / TURN * 1e6)
                    found[name] += hit
        ours, peer = round(least["adaptive"], 1), round(least["lru"], 1)
        figure = {"claim": f"a request under eviction, {model}, {memory}", "ours": ours, "peer": peer, "unit": "us"}
        core_is = "compiled" if str(core.__file__).endswith(".so") else "interpreted"
        print(json.dumps({**figure, "ratio": round(peer / ours, 2), "tokens_hit": found, "core": core_is}), flush=True)


if __name__ == "__main__":
    main()

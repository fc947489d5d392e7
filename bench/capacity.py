"""As many sequences run at once as the plan promises: 20 real hybrids, 5,121 tokens each, default retention.

Ours: a cache over the plan, prompts of random tokens that share nothing, computed 64 tokens a step (16 where 64 do not
fit) until one is refused; those that reached their last token count. The peer is the arithmetic of
the scheme most engines use (kvweave.plan.one_page_size) on the same bytes; what the plan promises is beside them.

Run: make bench NAME=capacity
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np

from bench.padding import GEOMETRIES, planned
from kvweave.cache import Cache, Sequence
from kvweave.errors import OutOfPages
from kvweave.plan import Plan, one_page_size

NUM_TOKENS = 5_121
SEQUENCES = 24
STEPS = (64, 16)
LEAST = 0.95


def runs(cache: Cache, sequence: Sequence) -> bool:
    """Compute a sequence to its last token; False where it is refused."""
    while sequence.length < NUM_TOKENS:
        for step in STEPS:
            try:
                copies = cache.extend(sequence, min(step, NUM_TOKENS - sequence.length))
                break
            except OutOfPages:
                continue
        else:
            return False
        for _ in (*copies, *cache.commit(sequence)):
            pass
    return True


def running(made: Plan) -> int:
    """How many sequences are there at once when the first one is refused."""
    cache = Cache(made, max_tokens=8192)
    random = np.random.default_rng(0)
    count = 0
    while runs(cache, cache.open(random.integers(0, 100_000, NUM_TOKENS).astype(np.int32))):
        count += 1
    return count


def figures() -> Iterator[dict[str, object]]:
    for model, dtype, tp in GEOMETRIES[:: len(GEOMETRIES) // 20][:20]:
        room = planned(model, dtype, tp)
        need = sum(room.superpages_for(pool, NUM_TOKENS, SEQUENCES) * pool.unit_bytes for pool in room.pools)
        made = planned(model, dtype, tp, memory=need + sum(pool.unit_bytes for pool in room.pools))
        promised, ours = made.sequences(NUM_TOKENS), running(made)
        peer = made.memory // max(1, one_page_size(made, NUM_TOKENS).bytes_per_sequence)
        name = f"{model} {'bf16' if dtype == 'auto' else dtype}" + (f" tp {tp}" if tp > 1 else "")
        yield {
            "claim": f"sequences of {NUM_TOKENS} tokens at once, {name}",
            "ours": ours,
            "peer": peer,
            "unit": "sequences",
            "ratio": round(ours / peer, 2) if peer else None,
            "promised": promised,
        }


def main() -> int:
    shares = []
    for line in figures():
        print(json.dumps(line), flush=True)
        shares.append(int(str(line["ours"])) / int(str(line["promised"])))
    print(
        json.dumps({"claim": "least share of what plans promise", "ours": min(shares), "peer": None, "unit": "share"}),
    )
    return 0 if min(shares) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())

"""The simulator's speed, and what a policy hits on traces beside oracles: four budgets, five models.

Ours: the share of prompt tokens that the policy hits. The peer is the oracle that knows where later requests go on,
with LRU (kvweave.sim.oracles); the other oracles, the bound and the requests replayed a second are beside them. Traces
are no part of the repository: Mooncake's are in kvcache-ai/Mooncake, FAST25-release/traces. A TRACE may also be the
name of a workload (bench.workloads).

Run, with the core compiled: python -m bench.simulate TRACE... [--memory 16GB ...] [--read blocks] [--sample 0.25]
[--seed 1] [--policy lru ...] [--no-oracles]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.resources import files

import kvweave.prefix.tree as core
from bench.workloads import WORKLOADS, workload
from kvweave import from_config, make_plan
from kvweave.sim import Cell, Options, Reading, Trace, load_policy, read_trace, simulate
from kvweave.units import format_size, parse_bytes

MODELS = ("llama-3.1-8b", "qwen3-next-80b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v4-flash")
BUDGETS = ("16GB", "64GB", "256GB", "1TB")


def figures(trace: Trace, model: str, options: Options) -> Iterator[dict[str, object]]:
    spec = from_config(str(files("kvweave") / "examples" / f"{model}.json"))
    for cell in simulate(trace, partial(make_plan, spec), options, model=model).cells:
        yield figure(model, cell)


def figure(model: str, cell: Cell) -> dict[str, object]:
    prompt, found = cell.split.prompt, asdict(cell.oracles) if cell.oracles else {}
    shares = {name: round(tokens / prompt, 4) for name, tokens in found.items()}
    ours, peer = round(cell.split.hit_rate, 4), shares.get("placement")
    return {
        "claim": f"share hit, {cell.trace}, {model}, {format_size(cell.memory)}, {cell.policy}",
        "ours": ours,
        "peer": peer,
        "unit": "share",
        "ratio": round(ours / peer, 3) if peer else None,
        **shares,
        "overlap": round(cell.split.overlap / prompt, 4),
        "evicted": round(cell.split.evicted / prompt, 4),
        "no_point": round(cell.split.no_point / prompt, 4),
        "memory_cached": round(memory_cached(cell), 4),
        "refused": cell.refused,
        "requests_per_second": round(cell.requests / cell.replay.seconds),
        "core": "interpreted" if core.__file__.endswith(".py") else "compiled",
    }


def memory_cached(cell: Cell) -> float:
    """The share of the memory that holds cached pages between requests: the mean over the second half of the trace."""
    looks = cell.replay.occupancy
    shares = [sum(look.cached_bytes) / cell.memory for look in looks[len(looks) // 2 :]]
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    for name in ("memory", "model", "policy"):
        parser.add_argument(f"--{name}", action="append")
    parser.add_argument("--read", default="cont")
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-oracles", action="store_true")
    asked = parser.parse_args()
    policies = {name: load_policy(name) for name in asked.policy or ["adaptive"]}
    memories = [parse_bytes(size) for size in asked.memory or BUDGETS]
    options = Options(memories, policies, with_oracles=not asked.no_oracles)
    for path in asked.traces:
        read = workload(path, asked.seed) if path in WORKLOADS else read_trace(path, reading=Reading(way=asked.read))
        trace = read.sample(asked.sample, asked.seed)
        for model in asked.model or MODELS:
            for line in figures(trace, model, options):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

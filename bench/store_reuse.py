"""What a store finds of the prompts of traces: one tier, whose medium keeps no bytes, so that its catalog alone works.

Every request is looked up, and then saved as an engine with a store does it: its rows, and states and windows at its
resume points (ends of the prompt and of the answer, the branch from what was there, points on the way). Ours: the share
of prompt tokens found. A TRACE may also be the name of a workload (bench.workloads).

Run: python -m bench.store_reuse TRACE... [--memory 128GB ...] [--model ...] [--read cont] [--sample 0.25] [--seed 1]
[--sparse]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from bench.workloads import WORKLOADS, workload
from kvweave import from_config, make_plan
from kvweave.prefix import Retention, Spacing
from kvweave.sim import Reading, Trace, read_trace
from kvweave.sim.trace import Request
from kvweave.spec import ModelSpec
from kvweave.store import Namespace, Schema, Store, TierPolicy, TierStack
from kvweave.store.arena_tier import ArenaTier
from kvweave.store.blob import header_bytes
from kvweave.store.keys import Bytes
from kvweave.store.page_payloads import Source
from kvweave.store.store import _Piece
from kvweave.store.tier import Blob, ChecksumObserver
from kvweave.units import parse_bytes

MODELS = ("llama-3.1-8b", "qwen3-next-80b", "gpt-oss-120b")
CHUNK = 256
NOTHING = np.zeros(1, np.uint8)


class NoBytes:
    """A medium that keeps nothing."""

    def write(self, start: int, blob: Blob) -> None: ...

    def read(self, start: int, into: Bytes, observer: ChecksumObserver | None = None) -> bool:  # noqa: ARG002
        return True

    def close(self) -> None: ...


class CatalogTier(ArenaTier):
    kind = "memory"


class CatalogStore(Store):
    """A store whose payloads have a size and no content."""

    def _sealed(self, batch: Sequence[_Piece], source: Source) -> list[Blob]:  # noqa: ARG002
        shards = [self.schema.shards[piece.shard] for piece in batch]
        payloads = [np.broadcast_to(NOTHING, shard.payload_bytes) for shard in shards]
        blobs = zip(shards, payloads, strict=True)
        return [Blob(payload, header_bytes(shard), lambda _: b"") for shard, payload in blobs]


def store_of(spec: ModelSpec, capacity: int) -> CatalogStore:
    tier = CatalogTier("catalog", NoBytes(), capacity, align=4096)
    return CatalogStore(Schema.of(spec, chunk_tokens=CHUNK, parts=1), TierStack((tier, TierPolicy(inline=True))))


def spacing_of(spec: ModelSpec, *, is_sparse: bool) -> Spacing:
    retention, plan = Retention(unit=CHUNK), make_plan(spec, "256GB")
    return (retention.sparse_spacing if is_sparse else retention.spacing)(plan, CHUNK)


def request_hit(store: CatalogStore, trace: Trace, request: Request, spacing: Spacing) -> int:
    """The tokens of a prompt that the store finds; then all of it is saved."""
    namespace, tokens = Namespace(request.namespace), trace.tokens(request)
    hit = store.lookup(store.prompt(tokens[: request.prompt_tokens], namespace))
    known = np.flatnonzero(hit.present.any(axis=0))
    branch = CHUNK * (int(known[-1]) + 1) if len(known) else 0
    last, end = (request.prompt_tokens - 1) // CHUNK * CHUNK, len(tokens) // CHUNK * CHUNK
    points = {last, branch, end, *spacing.between(hit.position, last)}
    wanted = sorted(point for point in points if hit.position < point <= end)
    if wanted:
        store.save(store.prompt(tokens, namespace), lambda _shard, _chunk: NOTHING, points=wanted)
    return hit.position


def figure(trace: Trace, model: str, memory: str, *, is_sparse: bool) -> dict[str, object]:
    spec = from_config(str(files("kvweave") / "examples" / f"{model}.json"))
    spacing, began = spacing_of(spec, is_sparse=is_sparse), time.perf_counter()
    with store_of(spec, parse_bytes(memory)) as store:
        hits = sum(request_hit(store, trace, request, spacing) for request in trace.requests)
        tier = store.stats().tiers[0].tier
    return {
        "claim": f"share found in a store, {trace.name}, {model}, {memory}{', sparse points' if is_sparse else ''}",
        "ours": round(hits / trace.prompt_tokens, 4),
        "unit": "share",
        "entries": tier.entries,
        "evicted": tier.evicted,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--memory", action="append")
    parser.add_argument("--model", action="append")
    parser.add_argument("--read", default="cont")
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sparse", action="store_true", help="points on the way as in full memory of an engine")
    asked = parser.parse_args()
    for path in asked.traces:
        read = workload(path, asked.seed) if path in WORKLOADS else read_trace(path, reading=Reading(way=asked.read))
        trace = read.sample(asked.sample, asked.seed)
        for model in asked.model or MODELS:
            for memory in asked.memory or ["128GB"]:
                print(json.dumps(figure(trace, model, memory, is_sparse=asked.sparse)), flush=True)


if __name__ == "__main__":
    main()

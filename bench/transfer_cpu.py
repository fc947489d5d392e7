"""On a CPU, pages go to chunks and back at 80% of the speed of one memcpy of as many bytes.

Chunks of 256 tokens, block 16, random pages of a pool of 1 GiB. The peer is a single memcpy of the same number of bytes
between the same memory, in the same run, turn and turn about, so that both see the machine as it is; best of all turns.
`ratio` is our speed over memcpy's.

Run: make bench NAME=transfer_cpu
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvweave import plan
from kvweave.plan import Layout, Plan
from kvweave.spec import ModelSpec
from kvweave.tensor import GQA, MLA, Arena, LayerRequest, Opaque, assemble
from kvweave.transfer import Buffer, ChunkLayout, CopyPlan, CPUCopier, Mover, Transfer, whole_chunks

CHUNK, BLOCK, CHUNKS = 256, 16, 6
GOAL = 0.8


def models() -> dict[str, ModelSpec]:
    latents: list[Any] = [(MLA(), LayerRequest(layer)) for layer in range(61)]
    indexers: list[Any] = [(Opaque(132), LayerRequest(layer)) for layer in range(61)]
    return {
        "GQA 32 x 8 x 128": assemble("gqa", [(GQA(), LayerRequest(layer, heads=8)) for layer in range(32)]),
        "MLA 61 x 576 and indexer 61 x 132": assemble("mla", latents + indexers),
    }


def random_chunks(made: Plan, layout: ChunkLayout) -> CopyPlan:
    """Pages at random, no super-page of two groups."""
    rng = np.random.default_rng(0)
    supers = {pool.name: (1 + rng.permutation(pool.num_supers - 1)).tolist() for pool in made.pools}
    tables = {}
    for part in layout.groups:
        group, count = made.group(part.tag), CHUNKS * part.num_blocks
        taken = [supers[group.pool].pop() for _ in range(-(-count // group.pages_per_super))]
        pages = np.concatenate([np.arange(group.pages_per_super) + s * group.pages_per_super for s in taken])
        tables[part.tag] = rng.permutation(pages)[:count]
    return whole_chunks(layout, tables, 0, CHUNKS)


def best(acts: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The least seconds of each, all tried in every turn."""
    least = dict.fromkeys(acts, float("inf"))
    for _ in range(turns):
        for name, act in acts.items():
            begun = time.perf_counter()
            act()
            least[name] = min(least[name], time.perf_counter() - begun)
    return least


def see_through(transfer: Transfer) -> None:
    transfer.wait()


def measure(name: str, layout: Layout, spec: ModelSpec, turns: int) -> None:
    made = plan(spec, "1GiB", layout=layout, block_tokens=BLOCK)
    with Arena(made) as arena:
        for pool in made.pools:
            arena.pool(pool.name).view(torch.int64).random_()
        chunk = ChunkLayout.of(made, CHUNK)
        copies = random_chunks(made, chunk)
        memory = torch.zeros(CHUNKS * chunk.num_bytes, dtype=torch.uint8)
        buffers = [Buffer.of(piece) for piece in memory.view(CHUNKS, -1)]
        flat, pool_bytes = memory.numpy()[: copies.num_bytes], arena.pool(made.pools[0].name).numpy()
        with Mover(arena, CPUCopier(), background=False) as mover:
            took = best(
                {
                    "memcpy": lambda: np.copyto(flat, pool_bytes[: copies.num_bytes]),
                    "store": lambda: see_through(mover.store(copies, buffers)),
                    "memcpy back": lambda: np.copyto(pool_bytes[: copies.num_bytes], flat),
                    "load": lambda: see_through(mover.load(copies, buffers)),
                },
                turns,
            )
    for way, peer in (("store", "memcpy"), ("load", "memcpy back")):
        ours, theirs = (copies.num_bytes / took[key] / 1e9 for key in (way, peer))
        line = {"claim": f"{way}, {name}, {layout}, {CHUNKS} chunks", "ours": round(ours, 2), "peer": round(theirs, 2)}
        extra = {"unit": "GB/s", "ratio": round(ours / theirs, 2), "goal": GOAL, "met": ours / theirs >= GOAL}
        print(json.dumps(line | extra | {"cores": os.cpu_count(), "load": os.getloadavg()[0]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    for name, spec in models().items():
        for layout in Layout:
            measure(name, layout, spec, turns)


if __name__ == "__main__":
    main()

"""On a CPU, pages go to chunks and back at 80% of the speed of one memcpy of as many bytes.

Chunks of 256 tokens, block 16, random pages of a pool of 1 GiB. The peers are memcpy of the same number of bytes
between the same memory, as one run by one thread, and as one run for each of the threads that we have; turn and turn
about, so that all see the machine as it is; best of all turns. `ratio` is our speed over memcpy's.

Run: make bench NAME=transfer_cpu
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from kvweave import make_plan
from kvweave.plan import Layout, Plan
from kvweave.spec import ModelSpec
from kvweave.tensor import GQA, MLA, Arena, LayerRequest, Opaque, assemble
from kvweave.transfer import ChunkBuffer, ChunkLayout, CopyPlan, CPUCopier, Direction, Mover, Transfer, whole_chunks

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
    supers = {pool.name: (1 + rng.permutation(pool.num_superpages - 1)).tolist() for pool in made.pools}
    tables = {}
    for part in layout.groups:
        group, count = made.group(part.tag), CHUNKS * part.num_blocks
        taken = [supers[group.pool].pop() for _ in range(-(-count // group.pages_per_superpage))]
        pages = np.concatenate([np.arange(group.pages_per_superpage) + s * group.pages_per_superpage for s in taken])
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


def see_through(start: Callable[[], Transfer]) -> None:
    start().wait()


def shared(pool: ThreadPoolExecutor, threads: int, to: np.ndarray, source: np.ndarray) -> Callable[[], object]:
    """A memcpy in as many runs as there are threads."""
    shares = list(zip(np.array_split(to, threads), np.array_split(source, threads), strict=True))
    return lambda: list(pool.map(lambda share: np.copyto(*share), shares))


def measure(name: str, layout: Layout, spec: ModelSpec, turns: int) -> None:
    made, copier = make_plan(spec, "1GiB", layout=layout, block_tokens=BLOCK), CPUCopier()
    with Arena(made) as arena, ThreadPoolExecutor(copier.threads) as pool:
        for one in made.pools:
            arena.pool(one.name).view(torch.int64).random_()
        chunk = ChunkLayout.of(made, CHUNK)
        copies = random_chunks(made, chunk)
        memory = torch.zeros(CHUNKS * chunk.num_bytes, dtype=torch.uint8)
        buffers = [ChunkBuffer.of(piece) for piece in memory.view(CHUNKS, -1)]
        flat, pages = (m.numpy()[: copies.num_bytes] for m in (memory, arena.pool(made.pools[0].name)))
        acts: dict[str, Callable[[], object]] = {}
        with Mover(arena, copier, background=False) as mover:
            for direction, to, source in ((Direction.STORE, flat, pages), (Direction.LOAD, pages, flat)):
                acts[direction] = partial(see_through, partial(getattr(mover, direction), copies, buffers))
                acts[f"{direction} by one"] = partial(np.copyto, to, source)
                acts[f"{direction} by all"] = shared(pool, copier.threads, to, source)
            took = best(acts, turns)
    speeds = {key: copies.num_bytes / seconds / 1e9 for key, seconds in took.items()}
    for direction in Direction:
        for peer, threads in (("one", 1), ("all", copier.threads)):
            claim = f"{direction}, {name}, {layout}, {CHUNKS} chunks, against memcpy by {peer}"
            tell(claim, speeds[direction], speeds[f"{direction} by {peer}"], copier.threads, threads)


def tell(claim: str, ours: float, peer: float, threads: int, peer_threads: int) -> None:
    line = {"claim": claim, "ours": round(ours, 2), "peer": round(peer, 2), "unit": "GB/s"}
    extra = {"ratio": round(ours / peer, 2), "goal": GOAL, "met": ours / peer >= GOAL}
    machine = {"threads": threads, "peer_threads": peer_threads, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps(line | extra | machine), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    for name, spec in models().items():
        for layout in Layout:
            measure(name, layout, spec, turns)


if __name__ == "__main__":
    main()
